"""The compiled backend: what it takes, and one call of it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Refusal
from qkv.errors import ArgumentError
from qkv.partial import Partial, identity
from qkv.problem.bounds import bound
from qkv.problem.expressions import Load, Op, walk
from qkv.problem.intervals import Interval
from qkv.problem.spec import Problem, Spec

if TYPE_CHECKING:
    from qkv.backends.cpu.compile import Kernel
    from qkv.backends.cpu.host import Host

Array = NDArray[Any]

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
        if spec.dtype != "float32":
            return (Refusal(f"the dtype is {spec.dtype}", "float32"),)
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
            return identity(shape, np.float32)
        whole = Partial(np.empty(shape, np.float32), np.empty(shape[:-1], np.float32))
        _run(problem, whole)
        return whole


def _run(problem: Problem, result: Partial) -> None:
    from qkv.backends.cpu import threads
    from qkv.backends.cpu.arguments import Arguments
    from qkv.backends.cpu.host import host, thread_limit
    from qkv.backends.cpu.schedule import folds, schedule

    spec, here = problem.spec, host()
    folded = folds(spec, here.shape.lanes)
    kernel = _kernel(_kernel_key(spec), here, integer_bits(problem), folded)
    plan = schedule(problem, here.shape.block_q, folded)
    count = len(plan.tasks)
    operations = 2.0 * (spec.head_dim + spec.v_head_dim) * plan.pairs
    workers = max(1, min(thread_limit(), count, int(operations / _WORTH_A_THREAD)))
    arguments = Arguments(problem, plan, result, folded=folded, shape=here.shape, workers=workers)
    seconds = operations / (_OPERATIONS_PER_SECOND * workers)
    step = -(-count // max(1, math.ceil(seconds / _SLICE_SECONDS)))
    for start in range(0, count, step):
        arguments.allow(start, min(start + step, count))
        threads.run(kernel, arguments, workers)


def _kernel_key(spec: Spec) -> Spec:
    """The kernel takes sizes of rows at run time; rotation and sinks happen outside it."""
    return replace(spec.kernel_key, head_dim=0, v_head_dim=0, rotation=None, sinks=False)


@lru_cache(maxsize=256)
def _kernel(key: Spec, here: Host, int_bits: int, folded: bool) -> Kernel:
    from qkv.backends.cpu.compile import build
    from qkv.backends.cpu.forward import emit_forward

    return build(emit_forward(key, here.shape, int_bits, folded), here)


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
    from qkv.backends.cpu.host import host, thread_limit

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
        "threads": str(thread_limit()),
        "kernel cache": cache,
    }
