"""Steps of decoding, prepared for any number of keys.

Nothing about a step is worked out in Python. A call writes addresses, strides and lengths into an
argument block, and the kernel finds out which keys it meets. What code depends on, above all how
wide integers are, is found once for all lengths and shifts up to `LONGEST`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Addresses
from qkv.backends.cpu.decode.rows import FIELDS
from qkv.backends.cpu.emit.frame import WORD
from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.machine.host import isa_setting
from qkv.backends.cpu.passes.arguments import word_of
from qkv.backends.cpu.passes.decode import DecodeArguments, DecodePass, Share
from qkv.backends.cpu.passes.scratch import NOTHING, Block
from qkv.backends.cpu.plan.kernel_spec import bits_of, sizes_of
from qkv.backends.cpu.prepared.decode import KEY, LSE, OUT, QUERY, VALUE
from qkv.backends.cpu.prepared.placeholders import tables_of, without_values
from qkv.backends.cpu.rows.sinks import Sinks
from qkv.errors import ArgumentError, ShapeError
from qkv.partial import Partial
from qkv.problem.bounds import check_table_reads
from qkv.problem.expressions import Const, Load, Node, Op, Var, rebuilt, walk
from qkv.problem.intervals import Interval
from qkv.problem.spec import Problem

Array = NDArray[Any]

LONGEST = 2**29
"""The largest number of keys, and of |q_shift|, that steps are prepared for, so that differences of
positions fit 32 bits."""

_KV_LEN, _Q_SHIFT = (word_of(name, FIELDS) for name in ("kv_len", "q_shift"))


@dataclass(frozen=True, slots=True)
class _ArrayWords:
    """Where the table of an array that each call brings stands in a block, and what it must be.

    The size of an axis stands before its stride. `sizes` are 1 for an axis that is not indexed;
    where `keys` is not 0, the axis has an entry for so many keys instead, the last perhaps for
    fewer.
    """

    address: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    keys: tuple[int, ...]

    def write(
        self,
        words: memoryview,
        address: int,
        shape: Sequence[int],
        strides: Sequence[int],
        kv_len: int,
    ) -> bool:
        """Whether the array is like the one that was prepared for."""
        if len(shape) != len(self.sizes):
            return False
        for word, expected, keys, size, stride in zip(
            self.strides, self.sizes, self.keys, shape, strides, strict=True
        ):
            if keys and size == -(-kv_len // keys):
                words[word - 1] = size
            elif keys or (size != expected and (expected != 1 or stride)):
                return False
            words[word] = stride
        words[self.address] = address
        return True


class GrowingDecode:
    """The pass of few queries for any number of keys and any distance between them.

    A block of words is prepared once. A step writes into it where its operands lie, how many keys
    there are and where the queries stand among them; all steps cost the same.
    """

    def __init__(
        self, problem: Problem, int_bits: int, arrays: tuple[Array, ...], read: list[_ArrayWords]
    ) -> None:
        shifts = _shifts(problem)
        problem, _ = without_values(problem, arrays)
        spec = problem.spec
        self._isa = isa_setting()
        self._pass = DecodePass(problem, int_bits=int_bits)
        self._template = template = DecodeArguments(problem, NOTHING)
        self._batch_shape = spec.batch_shape
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        self._out = shape, np.dtype(spec.dtype)
        self._partial_out = shape, self._pass.out_dtype
        self._lse = shape[:-1], spec.compute_dtype
        sinks = problem.operands.sinks
        self._sinks = None if sinks is None else Sinks(sinks, shape, *self._types())
        self._ndim = problem.operands.query.ndim
        self._shifts = [template.word_of_table(name) for name in shifts]
        self._read = read
        self._blocks: list[Block] = []

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        rows: bool,
        q_shift: int,
        arrays: Sequence[Array] = (),
    ) -> tuple[Array, Array | None, None] | None:
        at, out = quick_address_of, np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        found = self.run(
            (at(query), at(key), at(value), at(out), 0 if lse is None else at(lse), 0, ()),
            key.shape[-2],
            q_shift,
            (query.strides, key.strides, value.strides),
            (query, key, value, out, lse, arrays),
            [(at(array), array.shape, array.strides) for array in arrays],
        )
        return (out, lse, None) if found else None

    def run(
        self,
        addresses: Addresses,
        kv_len: int,
        q_shift: int,
        strides: tuple[Sequence[int], Sequence[int], Sequence[int]],
        keep_alive: Any,
        arrays: Sequence[tuple[int, Sequence[int], Sequence[int]]] = (),
    ) -> bool:
        """Read operands, and write out and lse, at these addresses.

        `keep_alive` are the objects that own the memory.

        False if something is not as it was prepared for: the machine, or a length or shift beyond
        `LONGEST`, or an array of another form; or if an output is not finite: a checked call may
        know better.
        """
        block = self._take_block()
        tables = self._fill(block.words, kv_len, q_shift, strides, arrays)
        if tables is None:
            return False
        is_finite = self._run(block, self._pass.share(kv_len), addresses, (keep_alive, tables))
        self._blocks.append(block)
        return is_finite

    def repeated(self) -> RepeatedDecode:
        """A step for callers one after the other, whose operands are alike but lie elsewhere."""
        return RepeatedDecode(self, self._new_block())

    def _fill(
        self,
        words: memoryview,
        kv_len: int,
        q_shift: int,
        strides: tuple[Sequence[int], Sequence[int], Sequence[int]],
        arrays: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    ) -> tuple[Array | None, ...] | None:
        """Write all of a step but where its operands lie. The result is to be kept alive; None if
        something is not as it was prepared for."""
        of_query, of_key, of_value = strides
        if (
            isa_setting() != self._isa
            or not 0 < kv_len <= LONGEST
            or not -LONGEST <= q_shift <= LONGEST
            or not self._ndim == len(of_query) == len(of_key) == len(of_value)
            or ((arrays or self._read) and not self._write_arrays(words, arrays, kv_len))
        ):
            return None
        words[_KV_LEN] = kv_len
        words[_Q_SHIFT] = q_shift
        batch_shape = self._batch_shape
        return (
            QUERY.write(words, batch_shape, of_query),
            KEY.write(words, batch_shape, of_key),
            VALUE.write(words, batch_shape, of_value),
        )

    def _run(self, block: Block, share: Share, addresses: Addresses, keep_alive: Any) -> bool:
        """Run a block that was filled for operands of this form; whether the output is finite."""
        words = block.words
        words[QUERY.address], words[KEY.address], words[VALUE.address], out, lse, _, _ = addresses
        if self._sinks is None:
            words[OUT] = out
            words[LSE] = lse
            return self._pass.run(block, share, keep_alive)
        partial = self._new_partial()
        words[OUT] = quick_address_of(partial.out)
        words[LSE] = place = quick_address_of(partial.lse)
        if not self._pass.run(block, share, (keep_alive, partial)):
            return False
        self._sinks(words[OUT], place, 0, out, lse or place, partial)
        return True

    def _take_block(self) -> Block:
        try:
            return self._blocks.pop()
        except IndexError:
            return self._new_block()

    def _write_arrays(
        self,
        words: memoryview,
        arrays: Sequence[tuple[int, Sequence[int], Sequence[int]]],
        kv_len: int,
    ) -> bool:
        """Whether the arrays are like those that were prepared for."""
        return len(arrays) == len(self._read) and all(
            place.write(words, *array, kv_len)
            for place, array in zip(self._read, arrays, strict=True)
        )

    def _new_partial(self) -> Partial:
        """What the kernel leaves where sinks have not taken their share yet."""
        return Partial(np.empty(*self._partial_out), np.empty(*self._lse))

    def _types(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """Of what the kernel leaves, and of the output."""
        return self._partial_out[1], self._out[1]

    def _new_block(self) -> Block:
        """A block whose expressions read the shift from one of its own words."""
        block = Block(self._template.copy())
        for word in self._shifts:
            block.words[word] = block.address + WORD * _Q_SHIFT
        return block


class RepeatedDecode:
    """A step that is run for several operands of one form, as by the layers of a model.

    Between two calls of `move` nothing is written but addresses. It is for one caller at a time.
    """

    def __init__(self, growing: GrowingDecode, block: Block) -> None:
        self._growing = growing
        self._block = block
        self._share: Share
        self._tables: Any = None

    def move(
        self,
        kv_len: int,
        q_shift: int,
        strides: tuple[Sequence[int], Sequence[int], Sequence[int]],
        arrays: Sequence[tuple[int, Sequence[int], Sequence[int]]] = (),
    ) -> bool:
        """Take the next length, position and strides; False where `GrowingDecode.run` says so."""
        self._share = self._growing._pass.share(kv_len, between_products=True)
        self._tables = self._growing._fill(self._block.words, kv_len, q_shift, strides, arrays)
        return self._tables is not None

    def run(self, addresses: Addresses, keep_alive: Any) -> bool:
        """Read operands, and write out and lse, at these addresses.

        False if the machine is not taken for the same any more, or an output is not finite: a
        checked call may know better.
        """
        growing, block = self._growing, self._block
        if isa_setting() != growing._isa:
            return False
        arrays = addresses[-1]
        if arrays:
            for place, address in zip(growing._read, arrays, strict=True):
                block.words[place.address] = address
        return growing._run(block, self._share, addresses, keep_alive)


def growing(problem: Problem, arrays: tuple[Array, ...]) -> GrowingDecode | None:
    """The calls of a cache that grows; None if something depends on how many keys there are.

    Tables that are no views of `arrays` must serve any number of keys.
    """
    read = tables_of(problem, arrays)
    if any(len(names) != 1 for names in read):
        return None
    brought = {name for names in read for name in names}
    # Offsets of single batch rows change with the number of keys.
    if any(problem.operands.tables[n].ndim and n not in brought for n in _offsets(problem)):
        return None
    spec, operands = problem.spec, problem.operands
    known = {t.name: t for t in spec.tables}
    shifts = set(_shifts(problem)) | _lengths(problem, brought)
    widest = [np.iinfo(known[n].dtype) for n in brought - shifts if known[n].kind == "int"]
    limits = [(int(i.min), int(i.max)) for i in widest] or [(0, 0)]
    places = {
        **sizes_of(spec),
        "kv_index": Interval.of(0, LONGEST - 1),
        "q_pos": Interval.of(-LONGEST, LONGEST),
        "kv_pos": Interval.of(min(low for low, _ in limits), max(high for _, high in limits)),
    }
    roots = [_for_any_length(node, shifts, brought) for node in (spec.score, spec.mask)]
    loads = [n for n in walk(spec.score, spec.mask) if isinstance(n, Load) and n.table in brought]
    reads = [_read_for_any_length(load, shifts, brought) for load in loads]
    try:
        check_table_reads([*roots, *reads], places, operands.tables)
    except (ShapeError, ArgumentError):
        return None
    template = DecodeArguments(problem, NOTHING)
    words = []
    for array, (name,) in zip(arrays, read, strict=True):
        found = _array_words(problem, name, array, template.word_of_table(name))
        if found is None:
            return None
        words.append(found)
    return GrowingDecode(problem, bits_of(roots, places, operands.tables), arrays, words)


def _offsets(problem: Problem) -> list[str]:
    """Tables of where the queries stand."""
    origins = problem.operands.origins
    return [
        table.name
        for table in problem.spec.tables
        if table.label == "q_offset" and origins[table.name].variant is None
    ]


def _lengths(problem: Problem, brought: set[str]) -> set[str]:
    """Tables that each step brings of numbers of keys, and of places that follow from them."""
    of_lengths = {t.name for t in problem.spec.tables if t.label in ("kv_lens", "q_offset")}
    return {
        name
        for name in of_lengths & brought
        if "lengths" in getattr(problem.operands.origins[name].variant, "roles", {}).values()
        or problem.operands.origins[name].variant is None
    }


def _shifts(problem: Problem) -> list[str]:
    """Of these, tables of one number, which each step has its own of."""
    return [name for name in _offsets(problem) if not problem.operands.tables[name].ndim]


def _for_any_length(node: Node, shifts: set[str], brought: set[str]) -> Node:
    """The node with variables, of known bounds, in the place of what changes from step to step.

    `q_pos` stands for where the queries are, `kv_pos` for integers of arrays that calls bring.
    """

    def changed(n: Node, following: tuple[Node, ...]) -> Node:
        match n:
            case Load(table=table) if table in shifts:
                return Var("q_pos")
            case Load(table=table, kind="bool") if table in brought:
                return Op("eq", "bool", (Var("q_pos"), Const("int", 0)))
            case Load(table=table, kind=kind) if table in brought:
                return Var("kv_pos" if kind == "int" else "score")
            case Load(table=table, kind=kind):
                return Load(table, kind, following)
            case Op(name=name, kind=kind):
                return Op(name, kind, following)
        return n

    return rebuilt(node, changed)


def _read_for_any_length(load: Load, shifts: set[str], brought: set[str]) -> Load:
    """The read of an array that calls bring, without the axes that are as long as its keys ask."""
    indices = [
        Const("int", 0) if _keys_of_entry(index) else _for_any_length(index, shifts, brought)
        for index in load.indices
    ]
    return Load(load.table, load.kind, tuple(indices))


def _array_words(problem: Problem, name: str, array: Array, word: int) -> _ArrayWords | None:
    """How the table `name` is read at each step; None if an axis is not read as it is long."""
    table = problem.operands.tables[name]
    roots = problem.spec.score, problem.spec.mask
    loads = {n for n in walk(*roots) if isinstance(n, Load) and n.table == name}
    axes = range(table.ndim - array.ndim, table.ndim)
    keys = []
    for axis in axes:
        indices = {load.indices[axis] for load in loads}
        found = {_keys_of_entry(index) for index in indices}
        if len(found) > 1:
            return None
        keys.append(found.pop() if found else 0)
    # The words of a table are its address, then the size and stride of each axis.
    strides = tuple(word + 2 + 2 * axis for axis in axes)
    return _ArrayWords(word, strides, tuple(table.shape[axis] for axis in axes), tuple(keys))


def _keys_of_entry(index: Node) -> int:
    """For how many keys an axis with this index has one entry; 0 if it does not go along keys."""
    match index:
        case Var(name="kv_index"):
            return 1
        case Op(name="floordiv", args=(Var(name="kv_index"), Const(value=int(keys)))):
            return keys
    return 0
