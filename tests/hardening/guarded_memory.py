"""Problems in memory that ends, or begins, where nothing may be touched.

A program of its own, since it crashes when it finds something: it names each problem before it
runs it, and the last name is the one. See test_guard_pages.py.
"""

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
from fuzz import random_case
from fuzz.draw import memory

import qkv
from qkv.backends.cpu.passes import arguments, gradient
from qkv.backends.cpu.passes import backward as backward_pass
from qkv.backends.cpu.prepared import backward as prepared_backward
from qkv.backends.cpu.prepared import forward as prepared
from qkv.backends.cpu.split_bf16 import choice
from qkv.call.binding.bound import bind
from qkv.call.binding.options import OptionValues
from qkv.call.derivatives.jvp import second_vjp
from qkv.call.derivatives.pull_back import Residuals, pull_back
from qkv.problem.building.builder import Shape
from qkv.testing import Case

PAGE = mmap.PAGESIZE
LINE = 64
"""What compiled code may take scratch memory to be aligned to."""
SPOILED = 0xFF
"""A byte of which NaN is made in every floating type, and -1 in every integer."""


class Fence:
    """Gives memory between two pages that may not be touched, full of NaN."""

    def __init__(self, side: str) -> None:
        self.at_end = side == "end"
        self.protect = ctypes.CDLL(None, use_errno=True).mprotect

    def bytes(self, size: int) -> np.ndarray:
        inside = -(-size // PAGE) * PAGE
        region = np.frombuffer(mmap.mmap(-1, inside + 2 * PAGE), np.uint8)
        address = region.ctypes.data
        for fence in (address, address + PAGE + inside):
            assert self.protect(ctypes.c_void_p(fence), PAGE, 0) == 0
        start = PAGE + (inside - size if self.at_end else 0)
        found = region[start : start + size]
        found[:] = SPOILED
        return found

    def full(self, shape, fill_value, dtype=None, order="C") -> np.ndarray:
        found = self.empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order)
        found[...] = fill_value
        return found

    def empty(self, shape, dtype=float, order="C") -> np.ndarray:
        dtype = np.dtype(dtype)
        if dtype.hasobject or order != "C":
            return plain_empty(shape, dtype, order)
        sizes = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        return np.ndarray(sizes, dtype, self.bytes(int(np.prod(sizes)) * dtype.itemsize).data)

    def scratch(self, size: int) -> np.ndarray:
        return self.bytes(-(-size // LINE) * LINE)[:size]


plain_empty, take_scratch = np.empty, prepared.take_scratch


def taken(size: int) -> Any:
    """Scratch that an earlier call left is spoiled too."""
    found = take_scratch(size)
    found.array[:] = SPOILED
    return found


def set_up(side: str) -> None:
    """Let whatever compiled code is given from here on lie at a fence."""
    fence = Fence(side)
    aligned = arguments.page_aligned
    for name, module in list(sys.modules.items()):
        if name.startswith("qkv.backends.cpu") and hasattr(module, "page_aligned"):
            assert module.page_aligned is aligned
            module.page_aligned = fence.scratch
    memory.spoiled = fence.bytes
    prepared.take_scratch = prepared_backward.take_scratch = taken
    np.empty, np.full = fence.empty, fence.full
    np.zeros = lambda shape, dtype=float: fence.full(shape, 0, dtype)
    np.zeros_like = lambda array, dtype=None: fence.full(array.shape, 0, dtype or array.dtype)


class FencedCase(Case):
    """Arrays side by side, at the fence."""

    def place(self, array, role):
        order = np.arange(array.ndim)
        return memory.laid(array, order, np.ones_like(order))


def dense(shape, rng):
    order = np.arange(3)
    mask = rng.random(shape.scores[-3:]) < 0.7
    bias = rng.normal(size=shape.scores[-3:]).astype(np.float32)
    return tuple(memory.laid(array, order, np.ones_like(order)) for array in (mask, bias))


def sizes(few_queries: bool):
    """Every dimension from 1 to 70, of either kind, and lengths around whole tiles."""
    rng = np.random.default_rng(5)
    for dim in range(1, 71):
        q_len = int(rng.integers(1, 5)) if few_queries else int(rng.integers(13, 90))
        kv_len = int(rng.choice([1, 7, 31, 63, 64, 65, 66, 100, 129]))
        group = 3 if few_queries else 1
        yield Shape((), group, 1, q_len, kv_len, dim, 71 - dim)


def swept(dtypes: list[str]):
    for dtype in dtypes:
        for few_queries in (False, True):
            for n, shape in enumerate(sizes(few_queries)):
                layout = ("bhld", "blhd")[n % 2]
                yield FencedCase(
                    f"{dtype} {shape}", shape, dense if n % 3 == 0 else lambda s, r: (),
                    layout=layout, dtypes=(dtype,),
                )  # fmt: skip


def random(first: int, last: int):
    for structure in range(first, last):
        for number in range(8):
            yield random_case(12, structure, number)


ROOM = {"float64": 1e-9, "float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""Wrong memory is NaN or far off; how near a result is, other tests ask."""


def near(found, expected, dtype: str, what: str) -> None:
    room = ROOM[dtype] * np.max(np.abs(expected), initial=1.0)
    assert np.max(np.abs(found - expected), initial=0.0) <= room, f"{what} is off"


def forward(case: Case) -> None:
    """Three calls: the third may have been prepared by the second."""
    (dtype,) = case.dtypes
    call, truth = case.build(dtype), case.truth(dtype)
    for _ in range(3):
        out, lse = qkv.attention(
            *call.arrays, *call.variants, backend="cpu", return_lse=True, **call.keywords
        )
        near(case.plain_order(out), truth.out, dtype, "the output")
        seen = ~np.isneginf(truth.lse)
        assert (np.isneginf(lse) != seen).all()
        near(lse[seen], truth.lse[seen], dtype, "lse")


def backward(case: Case) -> None:
    """Gradients are those of the backend that is easy to read, recalled or not."""
    (dtype,) = case.dtypes
    call = case.build(dtype)
    rng = np.random.default_rng(1)
    found = []
    for backend in ("cpu", "blocked"):
        given_options = {**call.keywords, "backend": backend}
        (out, lse), pullback = qkv.vjp(
            *call.arrays, *call.variants, return_lse=True, **given_options
        )
        if not found:
            grad_out = rng.normal(size=out.shape).astype(out.dtype)
            grad_out = memory.laid(grad_out, np.arange(out.ndim), np.ones(out.ndim, int))
        gradients = pullback(grad_out)
        found.append((gradients.query, gradients.key, gradients.value))
        kept = pullback._partial or pullback._residuals
        rest = np.full_like(lse, np.nan) if kept.lse_rest is None else kept.lse_rest
        # Not `out`, which was rounded to 16 bits.
        unrounded = kept.out if pullback._call is None else pullback._call.arranged(kept.out)
        left = Residuals(unrounded, lse, rest.reshape(lse.shape))
        for _ in range(3 if backend == "cpu" else 0):
            bound = bind(*call.arrays, tuple(call.variants), OptionValues(**given_options))
            again = pull_back(bound, left, grad_out)
            assert again.query.tobytes() == gradients.query.tobytes()
            assert again.key.tobytes() == gradients.key.tobytes()
            assert again.value.tobytes() == gradients.value.tobytes()
    for ours, readable in zip(*found, strict=True):
        near(ours, readable.astype(float), dtype, "a gradient")


def second(case: Case) -> None:
    """Tangents, and gradients of gradients, are those of NumPy."""
    (dtype,) = case.dtypes
    call = case.build(dtype)
    rng = np.random.default_rng(1)

    def like(array: np.ndarray) -> np.ndarray:
        drawn = rng.normal(size=array.shape).astype(array.dtype)
        return memory.laid(drawn, np.arange(array.ndim), np.ones(array.ndim, int))

    along = qkv.Tangents(*map(like, call.arrays))
    found, grad_out = [], None
    for backend in ("cpu", "blocked"):
        options = {**call.keywords, "backend": backend}
        out, moved = qkv.jvp(*call.arrays, *call.variants, tangents=along, **options)
        grad_out = like(out) if grad_out is None else grad_out
        bound = bind(*call.arrays, tuple(call.variants), OptionValues(**options))
        gradients = second_vjp(bound, grad_out=grad_out, tangents=along, given=call.variants)
        found.append((moved, gradients.query, gradients.key, gradients.value))
    for ours, readable in zip(*found, strict=True):
        near(ours, readable.astype(float), dtype, "a second derivative")


def statistics(case: Case) -> None:
    """What comes with the output, and what is replayed; as with gradients."""
    (dtype,) = case.dtypes
    call = case.build(dtype)
    found = []
    for backend in ("cpu", "blocked"):
        record = qkv.inspect(*call.arrays, *call.variants, backend=backend, **call.keywords)
        weights = record.top(5)[1]
        found.append((record.entropy, record.max_weight, record.received, weights))
    for ours, readable in zip(*found, strict=True):
        near(ours, readable.astype(float), dtype, "a statistic")


def main(side: str, way: str, parts: str, what: str, *which: str) -> None:
    problems = swept(list(which)) if what == "swept" else random(*map(int, which))
    if parts == "parts":
        choice.LEAST_SIZES = dict.fromkeys(choice.LEAST_SIZES, (1, 1))
        backward_pass._LEAST_QUERIES, gradient._MOST_QUERIES = 1, 0
        problems = (case for case in problems if case.dtypes[0] in choice.LEAST_SIZES)
    set_up(side)
    ways = {"forward": forward, "backward": backward, "second": second, "statistics": statistics}
    for case in problems:
        print(case.name, flush=True)
        ways[way](case)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
