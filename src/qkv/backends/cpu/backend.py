"""The compiled backend: a checked problem laid out for the kernel, and the kernel run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Refusal
from qkv.partial import Partial
from qkv.problem.bounds import Interval, bound
from qkv.problem.expressions import walk
from qkv.problem.scores import Scores
from qkv.problem.spec import Problem, Spec
from qkv.problem.tiles import TileGrid, TileKind

Array = NDArray[Any]

TILE_KV = 64
"""Keys of one tile of the schedule; the kernel joins neighbouring tiles of a kind."""

_SLICE_SECONDS = 0.1
"""How long compiled code may keep Ctrl-C waiting."""
_OPERATIONS_PER_SECOND = 5e10
"""Of one thread, roughly."""
_WORTH_A_THREAD = 4e6
"""Operations that pay for waking one."""


class CpuBackend:
    """float32 attention in machine code made for this processor, on all its cores."""

    name = "cpu"
    priority = 100

    def refusals(self, spec: Spec) -> tuple[Refusal, ...]:
        from qkv.errors import ArgumentError

        if not _llvmlite_found():
            return (Refusal("llvmlite is not installed", "a platform that has it"),)
        reasons = []
        if spec.dtype != "float32":
            reasons.append(Refusal(f"the dtype is {spec.dtype}", "float32"))
        try:
            from qkv.backends.cpu.host import host

            host()
        except ImportError as error:
            reasons.append(Refusal(f"llvmlite cannot be loaded: {error}", "one that loads"))
        except ArgumentError as error:
            reasons.append(Refusal(error.fact, "an instruction set of this machine"))
        return tuple(reasons)

    def blocks(self, spec: Spec) -> tuple[int, int]:
        from qkv.backends.cpu.host import host

        return host().shape.block_q, TILE_KV

    def scratch_bytes(self, spec: Spec) -> int:
        from qkv.backends.cpu.forward import scratch_bytes
        from qkv.backends.cpu.host import host, thread_limit

        size = thread_limit() * scratch_bytes(host().shape, spec.head_dim, spec.v_head_dim)
        if spec.rotation is not None:
            rows = spec.num_heads * spec.q_len + spec.num_kv_heads * spec.kv_len
            size += spec.batch_size * rows * spec.head_dim * 4
        return size

    def run(self, problem: Problem) -> Partial:
        spec = problem.spec
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        if 0 in (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len):
            out = np.zeros(shape, np.float32)
            return Partial(out, np.full(shape[:-1], -np.inf, np.float32))
        out = np.empty(shape, np.float32)
        lse = np.empty(shape[:-1], np.float32)
        _run(problem, out, lse)
        return Partial(out, lse)


@lru_cache(maxsize=1)
def _llvmlite_found() -> bool:
    return find_spec("llvmlite") is not None


def describe_host() -> dict[str, str]:
    """This machine as the backend sees it, for `qkv info`."""
    from qkv.backends.cpu.compile import cache_folder
    from qkv.backends.cpu.host import host, thread_limit

    here = host()
    folder = cache_folder()
    files = [f for f in folder.iterdir() if f.is_file()] if folder and folder.is_dir() else []
    size = sum(f.stat().st_size for f in files)
    return {
        "processor": here.cpu,
        "instruction set": here.isa,
        "vectors": f"{here.shape.lanes} float32, tiles of {here.shape.block_q} queries",
        "threads": str(thread_limit()),
        "kernel cache": f"{folder} ({len(files)} kernels, {size / 1024:.0f} KiB)"
        if folder
        else "off",
    }


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tasks and their runs of keys, as the kernel reads them, and the operations they take."""

    tasks: Array
    runs: Array
    operations: float


def schedule(problem: Problem, grid: TileGrid) -> Schedule:
    """Every block of queries of every head, the longest of a head first."""
    spec = problem.spec
    batches, heads, blocks = spec.batch_size, spec.num_heads, grid.q_blocks
    own_batch, own_head = "batch" in grid.depends_on, "head" in grid.depends_on
    runs: list[tuple[int, int, bool]] = []
    table = np.empty((batches if own_batch else 1, heads if own_head else 1, blocks, 3), np.int64)
    for batch, head in np.ndindex(table.shape[:2]):
        for block, kinds in grid.rows(batch, head):
            first, length = len(runs), 0
            for run in grid.runs(kinds):
                runs.append((run.start, run.stop, run.kind == TileKind.PARTIAL))
                length += run.stop - run.start
            table[batch, head, block] = first, len(runs), length
    tasks = np.empty((batches, heads, blocks, 5), np.int64)
    tasks[..., 0] = np.arange(batches)[:, None, None]
    tasks[..., 1] = np.arange(heads)[:, None]
    order = np.argsort(-table[..., 2], axis=-1, kind="stable")
    tasks[..., 2] = order * grid.block_q
    tasks[..., 3:] = np.take_along_axis(table[..., :2], order[..., None], axis=2)
    keys = float(table[..., 2].sum()) * (tasks[..., 0].size / table[..., 0].size)
    return Schedule(
        tasks.reshape(-1, 5),
        np.array(runs, np.int64).reshape(-1, 3),
        2 * (spec.head_dim + spec.v_head_dim) * grid.block_q * keys,
    )


def integer_bits(problem: Problem) -> int:
    """32 when every integer of the expressions is known to fit, else 64."""
    spec, tables = problem.spec, problem.operands.tables
    sizes = {
        "q_index": spec.q_len,
        "kv_index": spec.kv_len,
        "head": spec.num_heads,
        "batch": spec.batch_size,
    }
    places = {name: Interval.of(0, size - 1) for name, size in sizes.items()}
    nodes = {n for root in (spec.score, spec.mask) for n in walk(root) if n.kind == "int"}
    # Uniform values have 64 bits anyway.
    for node in nodes:
        found = bound(node, places, tables)
        if found.low.min() < -(2**31) or found.high.max() >= 2**31:
            return 64
    return 32


def _run(problem: Problem, out: Array, lse: Array) -> None:
    from qkv.backends.cpu import threads
    from qkv.backends.cpu.host import host, thread_limit

    spec, here = problem.spec, host()
    kernel = _kernel(_kernel_key(spec), here, integer_bits(problem))
    scores = Scores(problem, spec.compute_dtype)
    plan = schedule(problem, scores.grid(here.shape.block_q, TILE_KV))
    count = len(plan.tasks)
    workers = max(1, min(thread_limit(), count, int(plan.operations / _WORTH_A_THREAD)))
    arguments = Arguments(problem, scores, plan, out, lse, workers)
    seconds = plan.operations / (_OPERATIONS_PER_SECOND * workers)
    step = math.ceil(count / max(1, math.ceil(seconds / _SLICE_SECONDS)))
    for start in range(0, count, step):
        arguments.allow(start, min(start + step, count))
        threads.run(kernel.address, arguments.address, workers)


def _kernel_key(spec: Spec) -> Spec:
    """The kernel takes row lengths at run time, and rotated rows and sinks are not its business."""
    return replace(spec.kernel_key, head_dim=0, v_head_dim=0, rotation=None, sinks=False)


@lru_cache(maxsize=256)
def _kernel(key: Spec, here: Any, int_bits: int) -> Any:
    from qkv.backends.cpu.compile import build
    from qkv.backends.cpu.forward import emit_forward

    return build(emit_forward(key, here.shape, int_bits), here)


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


class Arguments:
    """The argument block of one call, and the arrays that it points to."""

    def __init__(
        self,
        problem: Problem,
        scores: Scores,
        plan: Schedule,
        out: Array,
        lse: Array,
        workers: int,
    ) -> None:
        from qkv.backends.cpu.forward import (
            COUNTER_BYTES,
            FIELDS,
            WORD,
            argument_words,
            scratch_bytes,
        )
        from qkv.backends.cpu.host import host

        spec = problem.spec
        self._first = COUNTER_BYTES // WORD
        self._kept: list[Array] = [plan.tasks, plan.runs, out, lse]
        self._words = _aligned(argument_words(spec) * WORD).view(np.int64)
        self.address = _address(self._words)
        per_worker = scratch_bytes(host().shape, spec.head_dim, spec.v_head_dim)
        scratch = _aligned(per_worker * workers)
        self._kept.append(scratch)
        fields = {
            "limit": 0,
            "tasks": _address(plan.tasks),
            "runs": _address(plan.runs),
            "scratch": _address(scratch),
            "scratch_bytes": per_worker,
            "out": _address(out),
            "lse": _address(lse),
            "num_heads": spec.num_heads,
            "group_size": spec.group_size,
            "q_len": spec.q_len,
            "head_dim": spec.head_dim,
            "v_head_dim": spec.v_head_dim,
            "scale": _float_bits(problem.operands.scale),
            "dropout_seed": 0,
            "dropout_threshold": 0,
            "dropout_factor": 0,
        }
        query, key = _rotated(problem, scores)
        for name, array in (("query", query), ("key", key), ("value", problem.operands.value)):
            fields.update(self._operand(name, array, spec))
        dropout = problem.operands.dropout
        if dropout is not None:
            fields["dropout_seed"] = dropout.seed - 2**64 * (dropout.seed >= 2**63)
            fields["dropout_threshold"] = math.ceil(dropout.p * 2.0**32)
            fields["dropout_factor"] = _float_bits(1 / (1 - dropout.p))
        words = [fields[name] for name in FIELDS]
        for table in spec.tables:
            array = problem.operands.tables[table.name]
            self._kept.append(array)
            words.append(_address(array))
            for size, stride in zip(array.shape, array.strides, strict=True):
                words += [size, stride]
        self._words[self._first :] = words

    def _operand(self, name: str, array: Array, spec: Spec) -> dict[str, int]:
        lead = len(spec.batch_shape)
        batches = np.zeros(spec.batch_shape, np.int64)
        for axis, (size, stride) in enumerate(
            zip(spec.batch_shape, array.strides[:lead], strict=True)
        ):
            steps = np.arange(size, dtype=np.int64) * stride
            batches += steps.reshape(-1, *[1] * (lead - axis - 1))
        self._kept += [array, batches]
        head, row, element = array.strides[lead:]
        return {
            name: _address(array),
            f"{name}_batches": _address(batches),
            f"{name}_head": head,
            f"{name}_row": row,
            f"{name}_element": element,
        }

    def allow(self, start: int, stop: int) -> None:
        """Let the next run take the tasks from `start` to `stop`."""
        self._words[0] = start
        self._words[self._first] = stop


def _rotated(problem: Problem, scores: Scores) -> tuple[Array, Array]:
    """Query and key as the product meets them: rotated copies, or the arrays as they are."""
    spec, operands = problem.spec, problem.operands
    if spec.rotation is None or spec.rotation.rotary_dim == 0:
        return operands.query, operands.key
    query = np.empty(operands.query.shape, np.float32)
    key = np.empty(operands.key.shape, np.float32)
    for batch, index in enumerate(np.ndindex(*spec.batch_shape)):
        for head in range(spec.num_heads):
            query[(*index, head)] = scores.query(batch, head, slice(None))
        for head in range(spec.num_kv_heads):
            key[(*index, head)] = scores.key(batch, head * spec.group_size, slice(None))
    return query, key


def _float_bits(value: float) -> int:
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.int32))


def _aligned(size: int, boundary: int = 4096) -> Array:
    """Uninitialised bytes that start at a page."""
    raw = np.empty(size + boundary, np.uint8)
    start = -_address(raw) % boundary
    return raw[start : start + size]
