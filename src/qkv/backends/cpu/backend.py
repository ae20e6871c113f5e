"""The compiled backend: what it takes, and one call of it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkv._threads import get_num_threads
from qkv.backends import Refusal
from qkv.errors import ArgumentError
from qkv.partial import Partial, RowStatistics, identity
from qkv.problem.bounds import bound
from qkv.problem.expressions import Load, Op, walk
from qkv.problem.intervals import Interval
from qkv.problem.spec import Problem, Spec

if TYPE_CHECKING:
    from qkv.backends.cpu.compile import Kernel
    from qkv.backends.cpu.forward import ForwardKey
    from qkv.backends.cpu.host import Host

Array = NDArray[Any]

DTYPES = ("float32", "float64", "float16", "bfloat16")
_NOTHING = np.empty(0)

_SLICE_SECONDS = 0.1
"""How long compiled code may keep Ctrl-C waiting."""
_OPERATIONS_PER_SECOND = 5e10
"""Of one thread, roughly."""
_WORTH_A_THREAD = 4e6
"""Operations that pay for waking one."""


class CpuBackend:
    """Attention in machine code made for this processor, on all its cores."""

    name = "cpu"
    priority = 100

    def refusals(self, spec: Spec) -> tuple[Refusal, ...]:
        if spec.dtype not in DTYPES:
            return (Refusal(f"the dtype is {spec.dtype}", ", ".join(DTYPES)),)
        try:
            from qkv.backends.cpu.host import host

            host()
        except (ImportError, OSError) as error:
            return (Refusal(f"llvmlite cannot be loaded: {error}", "platforms that have it"),)
        except ArgumentError as error:
            return (Refusal(error.fact.rstrip("."), "one that it has"),)
        return ()

    def blocks(self, spec: Spec) -> tuple[int, int]:
        from qkv.backends.cpu.host import host
        from qkv.backends.cpu.schedule import TILE_KV

        return host().shape_of(spec.compute_dtype).block_q, TILE_KV

    def scratch_bytes(self, spec: Spec) -> int:
        from qkv.backends.cpu.forward import scratch_bytes
        from qkv.backends.cpu.host import host

        shape, item = host().shape_of(spec.compute_dtype), spec.compute_dtype.itemsize
        size = get_num_threads() * scratch_bytes(shape, item, spec.head_dim, spec.v_head_dim)
        if spec.rotation is not None:
            rows = spec.num_heads * spec.q_len + spec.num_kv_heads * spec.kv_len
            size += spec.batch_size * rows * spec.head_dim * item
        return size

    def run(self, problem: Problem) -> Partial:
        return self._run(problem, statistics=False)[0]

    def run_with_statistics(self, problem: Problem) -> tuple[Partial, RowStatistics]:
        """Output, lse, entropy and largest score in one pass."""
        return self._run(problem, statistics=True)

    def _run(self, problem: Problem, *, statistics: bool) -> tuple[Partial, RowStatistics]:
        spec = problem.spec
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        compute = spec.compute_dtype
        lowest = np.full(shape[:-1], -np.inf, compute) if statistics else _NOTHING
        if 0 in (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len):
            zeros = np.zeros(shape[:-1], compute) if statistics else _NOTHING
            return identity(shape, compute), RowStatistics(zeros, lowest)
        # Sinks scale the output afterwards: round to the type of storage only then.
        out_dtype = compute if spec.sinks else np.dtype(spec.dtype)
        whole = Partial(np.empty(shape, out_dtype), np.empty(shape[:-1], compute))
        rows = RowStatistics(np.empty_like(lowest), lowest)
        _run(problem, whole, rows if statistics else None)
        return whole, rows


def _run(problem: Problem, result: Partial, statistics: RowStatistics | None) -> None:
    from qkv.backends.cpu import threads
    from qkv.backends.cpu.arguments import ForwardArguments
    from qkv.backends.cpu.forward import ForwardKey
    from qkv.backends.cpu.host import host
    from qkv.backends.cpu.schedule import folds, schedule

    spec, here = problem.spec, host()
    shape = here.shape_of(spec.compute_dtype)
    folded = folds(spec, shape.lanes)
    key = ForwardKey(
        _kernel_spec(spec),
        shape,
        integer_bits(problem),
        folded,
        spec.rotation is not None,
        result.out.dtype.name,
        statistics is not None,
    )
    kernel = _kernel(key, here)
    plan = schedule(problem, shape.block_q, folded)
    count = len(plan.tasks)
    operations = 2.0 * (spec.head_dim + spec.v_head_dim) * plan.pairs
    workers = max(1, min(get_num_threads(), count, int(operations / _WORTH_A_THREAD)))
    arguments = ForwardArguments(
        problem, plan, result, statistics, folded=folded, shape=shape, workers=workers
    )
    seconds = operations / (_OPERATIONS_PER_SECOND * workers)
    step = -(-count // max(1, math.ceil(seconds / _SLICE_SECONDS)))
    for start in range(0, count, step):
        arguments.allow(start, min(start + step, count))
        threads.run(kernel, arguments, workers)


def _kernel_spec(spec: Spec) -> Spec:
    """The kernel takes sizes of rows at run time; rotation and sinks happen outside it."""
    return replace(spec.kernel_key, head_dim=0, v_head_dim=0, rotation=None, sinks=False)


@lru_cache(maxsize=256)
def _kernel(key: ForwardKey, here: Host) -> Kernel:
    from qkv.backends.cpu.compile import Kernel, build
    from qkv.backends.cpu.forward import emit_forward

    return Kernel(build(emit_forward, (key,), here))


def integer_bits(problem: Problem) -> int:
    """32 when every integer of the expressions is known to fit, else 64.

    Rows and heads fit by themselves; what is read or computed is bounded.
    """
    spec = problem.spec
    nodes = {
        node
        for root in (spec.score, spec.mask)
        for node in walk(root)
        if node.kind == "int" and isinstance(node, Op | Load)
    }
    if not nodes:
        return 32
    sizes = {
        "q_index": spec.q_len,
        "kv_index": spec.kv_len,
        "head": spec.num_heads,
        "batch": spec.batch_size,
    }
    places = {name: Interval.of(0, size - 1) for name, size in sizes.items()}
    for node in nodes:
        found = bound(node, places, problem.operands.tables)
        if found.low.min() < -(2**31) or found.high.max() >= 2**31:
            return 64
    return 32


def describe_host() -> dict[str, str]:
    """This machine as the backend sees it, for `qkv info`.

    Raises
    ------
    ArgumentError
        If `QKV_ISA` or `QKV_NUM_THREADS` is set to what cannot be.
    """
    from qkv.backends.cpu.compile import cache_folder
    from qkv.backends.cpu.host import host

    here, folder = host(), cache_folder()
    cache = "off"
    if folder is not None:
        try:
            sizes = [f.stat().st_size for f in folder.iterdir()]
        except OSError:
            sizes = []
        cache = f"{folder} ({len(sizes)} kernels, {sum(sizes) / 1024:.0f} KiB)"
    shape = here.shape
    return {
        "processor": here.cpu,
        "instruction set": here.isa,
        "vector width": f"{32 * shape.lanes} bits, {shape.lanes} float32",
        "tile": f"{shape.block_q} queries",
        "threads": str(get_num_threads()),
        "kernel cache": cache,
    }
