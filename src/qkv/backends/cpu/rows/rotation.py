"""Rotary embedding as a compiled pass of its own: rows of query or key, turned by their positions.

    out[2 i], out[2 i + 1] = a cos - b sin, a sin + b cos      of the pair (a, b) of entries

in float64 and rounded once to the type of computation, so that a rotation costs no accuracy. Other
kernels then read the turned rows. The same kernel turns gradients back, with the sines negated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from qkv._threads import get_num_threads
from qkv.backends.cpu.compiler.compile import Kernel, build
from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import DOUBLE, FLOAT, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.frame import WORD
from qkv.backends.cpu.machine.addresses import address_of, quick_address_of
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.rows.row_pass import Block, each_head, words_at, words_of
from qkv.backends.cpu.threads import jobs
from qkv.problem.spec import Angles, Problem

Array = NDArray[Any]

__all__ = ["AngleTable", "Rotation", "RotationKey", "angle_tables", "emit_rotation", "rotated_rows"]

SHARED = ("limit", "first_count", "dim", "pairs")
OF_ROWS = (
    "rows", "batches", "head_stride", "row_stride", "element_stride", "out", "heads", "length",
    "cosines", "sines", "table_bytes",
)  # fmt: skip
FIELDS = (*SHARED, *[f"{name}_{n}" for n in (0, 1) for name in OF_ROWS])
"""Words of the argument block after the counter. Tasks below `first_count` turn heads of the first
array, the others of the second; `table_bytes` is from one batch row's angles to the next one's, 0
if all share theirs."""

_WORTH_A_THREAD = 2**15
"""Number of entries that makes it worthwhile to wake a thread."""
_BRIEF = 2**16
"""Number of entries for which Python may stay locked."""
_LARGEST_TABLE = 2**23
"""The most bytes of cosines and sines that are kept from call to call."""


@dataclass(frozen=True, slots=True)
class RotationKey:
    """What the kernel depends on; `lanes` are of float64."""

    dtype: str
    out_dtype: str
    interleaved: bool
    lanes: int
    halves: bool


def emit_rotation(key: RotationKey) -> str:
    """The module of one kernel; `job(arguments, worker)` turns the rows of a head for each task."""
    e = Emitter("rotation", key.lanes, DOUBLE, halves=key.halves, fused=False)
    row = _row(e, key)

    def turn_head(number: Value, words: dict[str, Value]) -> None:
        b = e.builder
        is_first = e.below(number, words["first_count"])
        fields = {n: b.select(is_first, words[f"{n}_0"], words[f"{n}_1"]) for n in OF_ROWS}
        fields |= {name: words[name] for name in SHARED}
        number = e.sub(number, b.select(is_first, e.index(0), words["first_count"]))
        batch, head = b.sdiv(number, fields["heads"]), b.srem(number, fields["heads"])
        offset = e.load(e.at(e.pointer(fields["batches"]), e.mul(batch, WORD)), INT64, WORD)
        source = e.at(e.pointer(fields["rows"]), offset, e.mul(head, fields["head_stride"]))
        size = e.mul(fields["dim"], storage.ITEM_BYTES[key.out_dtype])
        target = e.at(e.pointer(fields["out"]), e.mul(number, fields["length"], size))
        angles = e.mul(batch, fields["table_bytes"])

        def turn_row(r: Value, _: list[Value]) -> None:
            place = e.add(angles, e.mul(r, fields["pairs"], 8))
            e.builder.call(
                row,
                [
                    e.at(source, e.mul(r, fields["row_stride"])),
                    e.at(target, e.mul(r, size)),
                    e.at(e.pointer(fields["cosines"]), place),
                    e.at(e.pointer(fields["sines"]), place),
                    fields["element_stride"],
                    fields["dim"],
                    fields["pairs"],
                ],
            )

        e.loop(0, fields["length"], 1, [], turn_row)

    each_head(e, FIELDS, turn_head)
    return str(e.module)


def _row(e: Emitter, key: RotationKey) -> Value:
    """A function that turns one row: `(from, to, cosines, sines, element, dim, pairs)`."""
    item, out_item = storage.ITEM_BYTES[key.dtype], storage.ITEM_BYTES[key.out_dtype]
    with e.function("row", [*[POINTER] * 4, *[INT64] * 3]) as (function, args):
        source, target, cosines, sines, element, dim, pairs = args
        b = e.builder

        def store(value: Value, place: Value) -> None:
            if key.out_dtype == "float32":
                count = value.type.count if isinstance(value.type, ir.VectorType) else 0
                value = b.fptrunc(value, ir.VectorType(FLOAT, count) if count else FLOAT)
            e.store(value, place, out_item)

        def turned(first: Value, second: Value, at: Value, lanes: int) -> tuple[Value, Value]:
            cos, sin = (storage.load(e, e.at(t, at), "float64", lanes) for t in (cosines, sines))
            return (
                b.fsub(b.fmul(first, cos), b.fmul(second, sin)),
                b.fadd(b.fmul(first, sin), b.fmul(second, cos)),
            )

        def halves(d: Value, _: list[Value]) -> None:
            d = e.least(d, e.sub(pairs, e.lanes))
            ends = d, e.add(d, pairs)
            entries = [
                storage.load(e, e.at(source, e.mul(i, item)), key.dtype, e.lanes) for i in ends
            ]
            for i, value in zip(
                ends, turned(entries[0], entries[1], e.mul(d, 8), e.lanes), strict=True
            ):
                store(value, e.at(target, e.mul(i, out_item)))

        def neighbours(d: Value, _: list[Value]) -> None:
            d = e.least(d, e.sub(pairs, e.lanes))
            first = e.mul(d, 2)
            low, high = (
                storage.load(e, e.at(source, e.mul(e.add(first, n), item)), key.dtype, e.lanes)
                for n in (0, e.lanes)
            )
            evens, odds = (
                b.shuffle_vector(low, high, e.picks(range(n, 2 * e.lanes, 2))) for n in (0, 1)
            )
            a, c = turned(evens, odds, e.mul(d, 8), e.lanes)
            order = [half * e.lanes + lane for lane in range(e.lanes) for half in (0, 1)]
            for n, picks in ((0, order[: e.lanes]), (e.lanes, order[e.lanes :])):
                value = b.shuffle_vector(a, c, e.picks(picks))
                store(value, e.at(target, e.mul(e.add(first, n), out_item)))

        def one_pair(d: Value, _: list[Value]) -> None:
            ends = (e.mul(d, 2), e.add(e.mul(d, 2), 1)) if key.interleaved else (d, e.add(d, pairs))
            entries = [storage.load(e, e.at(source, e.mul(i, element)), key.dtype) for i in ends]
            for i, value in zip(ends, turned(entries[0], entries[1], e.mul(d, 8), 0), strict=True):
                store(value, e.at(target, e.mul(i, out_item)))

        def copy(load_lanes: int) -> Callable[[Value, list[Value]], None]:
            def entries(d: Value, _: list[Value]) -> None:
                d = e.least(d, e.sub(dim, max(load_lanes, 1)))
                step = item if load_lanes else element
                value = storage.load(e, e.at(source, e.mul(d, step)), key.dtype, load_lanes)
                store(value, e.at(target, e.mul(d, out_item)))

            return entries

        side_by_side = b.icmp_signed("==", element, e.index(item))
        enough = b.icmp_signed(">=", pairs, e.index(e.lanes))
        stop = b.select(b.and_(side_by_side, enough), pairs, e.index(0))
        e.loop(0, stop, e.lanes, [], neighbours if key.interleaved else halves)
        e.loop(stop, pairs, 1, [], one_pair)
        rest = e.mul(pairs, 2)
        enough = b.icmp_signed(">=", e.sub(dim, rest), e.index(e.lanes))
        stop = b.select(b.and_(side_by_side, enough), dim, rest)
        e.loop(rest, stop, e.lanes, [], copy(e.lanes))
        e.loop(stop, dim, 1, [], copy(0))
    return function


@lru_cache(maxsize=64)
def _kernel(key: RotationKey, here: Host) -> Kernel:
    return Kernel(build(emit_rotation, (key,), here))


class Turns(NamedTuple):
    """Cosines and sines `(1 or batch, length, pairs)`, dense float64."""

    cosines: Array
    sines: Array


class AngleTable:
    """Cosines and sines of positions that follow one another, kept from call to call.

    Parameters
    ----------
    inv_freq : array (pairs,)
        Radians per position of each pair.
    factor : float
        What cosines and sines are multiplied with.
    """

    def __init__(self, inv_freq: Array, factor: float = 1.0) -> None:
        self._inv_freq = np.asarray(inv_freq, np.float64)
        self._factor = factor
        self._start = 0
        self._turns = self._made(0, 0)

    def rows(self, start: int, count: int) -> Turns:
        """Of the positions from `start` on."""
        first, turns = self._start, self._turns
        if start < first or start + count > first + turns.cosines.shape[1]:
            # Twice as many, so that steps of decoding find theirs.
            room = (
                max(2 * count, 256) if 16 * count * len(self._inv_freq) < _LARGEST_TABLE else count
            )
            first, turns = start, self._made(start, room)
            self._start, self._turns = first, turns
        at = slice(start - first, start - first + count)
        return Turns(turns.cosines[:, at], turns.sines[:, at])

    def _made(self, start: int, count: int) -> Turns:
        angle = np.arange(start, start + count).astype(np.float64)[:, None] * self._inv_freq
        return Turns(self._factor * np.cos(angle)[None], self._factor * np.sin(angle)[None])


def angle_tables(angles: Angles, side: str) -> Turns:
    """The angles of all rows of one side, "q" or "kv"."""
    found = [angles.cos_sin(side, batch) for batch in range(angles.rows(side))]
    cosines, sines = (np.ascontiguousarray(np.stack(part)) for part in zip(*found, strict=True))
    return Turns(cosines, sines)


class RowLayout:
    """Where the rows of an array `(*batch_shape, heads, length, head_dim)` lie."""

    def __init__(self, array: Array) -> None:
        *lead, heads, length, dim = array.shape
        *steps, head, row, element = array.strides
        self.shape = array.shape
        self.count = math.prod(lead) * heads
        self.entries = self.count * length * dim
        batches = np.zeros(lead, np.int64)
        for axis, stride in enumerate(steps):
            along = np.arange(lead[axis], dtype=np.int64) * stride
            batches += along.reshape(-1, *[1] * (len(lead) - axis - 1))
        self.batches = np.ascontiguousarray(batches.reshape(-1))
        self.fields = {
            "batches": address_of(self.batches), "head_stride": head, "row_stride": row,
            "element_stride": element, "heads": heads, "length": length,
        }  # fmt: skip


class Rotation:
    """Turns the rows of one array or two, such as query and key, in one launch.

    Parameters
    ----------
    problem : Problem
        With a rotation.
    arrays : sequence of array (*batch_shape, heads, length, head_dim)
        Arrays like those that will be turned: of one dtype, with these shapes and strides.
    """

    def __init__(self, problem: Problem, arrays: Sequence[Array]) -> None:
        rotation = problem.spec.rotation
        assert rotation is not None
        here = host()
        wide = here.shape_of(np.dtype(np.float64))
        self.out_dtype = problem.spec.compute_dtype
        interleaved = rotation.layout == "interleaved"
        key = RotationKey(
            arrays[0].dtype.name, self.out_dtype.name, interleaved, wide.lanes, wide.halves
        )
        self._kernel = _kernel(key, here)
        self.layouts = layouts = [RowLayout(array) for array in arrays]
        count = sum(layout.count for layout in layouts)
        values = {
            "limit": count, "first_count": layouts[0].count, "dim": arrays[0].shape[-1],
            "pairs": rotation.rotary_dim // 2,
        }  # fmt: skip
        for n, layout in enumerate(layouts):
            values |= {f"{name}_{n}": value for name, value in layout.fields.items()}
        self._words = words_of(FIELDS, values)
        entries = sum(layout.entries for layout in layouts)
        self._most_workers = max(1, min(count, entries // _WORTH_A_THREAD))
        self._is_brief = entries <= _BRIEF

    def outputs(self) -> list[Array]:
        """Memory for the turned rows: dense, in the type of computation."""
        return [np.empty(layout.shape, self.out_dtype) for layout in self.layouts]

    def __call__(
        self, addresses: Sequence[int], angles: Sequence[Turns], outputs: Sequence[Array]
    ) -> None:
        """Turn the rows at these addresses by these angles into the outputs."""
        block = Block(self._words, (outputs, angles, self.layouts))
        words = block.words
        for n, address in enumerate(addresses):
            at_rows, at_out, at_cosines, at_sines, at_bytes = _WORDS[n]
            out, (cosines, sines) = outputs[n], angles[n]
            words[at_rows] = address
            words[at_out] = quick_address_of(out)
            words[at_cosines] = quick_address_of(cosines)
            words[at_sines] = quick_address_of(sines)
            words[at_bytes] = 0 if len(cosines) == 1 else cosines.strides[0]
        workers = 1 if self._most_workers == 1 else min(get_num_threads(), self._most_workers)
        if workers == 1 and self._is_brief:
            self._kernel.brief_job(block.address, 0)
        else:
            jobs.run(self._kernel, block, workers)


_WORDS = [
    words_at(FIELDS, f"rows_{n}", f"out_{n}", f"cosines_{n}", f"sines_{n}", f"table_bytes_{n}")
    for n in (0, 1)
]


def rotated_rows(problem: Problem, array: Array, side: str, *, back: bool = False) -> Array:
    """Rows of one side, "q" or "kv", turned by their positions, or turned back."""
    angles = problem.operands.angles
    assert angles is not None
    turns = angle_tables(angles, side)
    if back:
        turns = Turns(turns.cosines, -turns.sines)
    rotation = Rotation(problem, [array])
    (out,) = outputs = rotation.outputs()
    if out.size:
        rotation([address_of(array)], [turns], outputs)
    return out
