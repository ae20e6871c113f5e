"""Blocks of keys at the edge of a mask are computed in steps; keys outside of it are not read."""

from __future__ import annotations

import mmap
import sys
from itertools import product

import numpy as np
import pytest

import qkv
from forced import as_it_runs
from processes import in_a_process
from qkv.backends.cpu.forward.layout import skips_keys_within_blocks
from qkv.problem.building.builder import Shape
from qkv.problem.building.check import check
from qkv.testing import Case, check_case

KINDS = ["float32", "float64"]
SHAPES = {
    "square": Shape((), 2, 2, 200, 200, 24, 16),
    "one block": Shape((2,), 3, 3, 64, 64, 17, 40),
    "grouped": Shape((), 4, 2, 90, 333, 64, 64),
    "rest": Shape((), 1, 1, 145, 146, 5, 3),
}
SEGMENTS = np.repeat(np.arange(9), 40)
WAYS = {
    "causal": lambda s, r: (qkv.Causal(),),
    "narrow": lambda s, r: (qkv.SlidingWindow(5, 2),),
    "wide": lambda s, r: (qkv.SlidingWindow(100, 3),),
    "late": lambda s, r: (qkv.SlidingWindow(0, 70),),
    "hole": lambda s, r: (~qkv.SlidingWindow(50, 50),),
    "corner": lambda s, r: (qkv.SlidingWindow(40, 0) | qkv.GlobalTokens([0, 1]),),
    "lengths": lambda s, r: (qkv.KeyLengths(r.integers(1, s.kv_len, s.batch_shape)),),
    "segments": lambda s, r: (
        qkv.Segments(SEGMENTS[: s.q_len], SEGMENTS[: s.kv_len]), qkv.Causal(),
    ),
    "prefix": lambda s, r: (qkv.Prefix(70), qkv.Causal()),
    "blocks": lambda s, r: (
        qkv.BlockSparse(r.random((-(-s.q_len // 16), -(-s.kv_len // 16))) < 0.4, 16, 16),
    ),
    "softcap": lambda s, r: (qkv.Causal(), qkv.Softcap(3.0)),
    "dropout": lambda s, r: (qkv.Causal(), qkv.Dropout(0.2, seed=3)),
}  # fmt: skip


def case(way, shape):
    return Case(f"steps {way} {shape}", SHAPES[shape], WAYS[way], q_offset="end")


@pytest.mark.slow
@pytest.mark.sampled(("way", "shape"), list(product(WAYS, SHAPES)), one_in=48)
def test_small_problems(way, shape):
    assert check_case("cpu", case(way, shape))


@pytest.mark.sampled(("way", "shape"), list(product(WAYS, SHAPES)), one_in=48)
def test_gradients_of_small_problems(way, shape):
    inputs = case(way, shape).build("float64")
    v_head_dim = SHAPES[shape].v_head_dim
    grad_out = np.random.default_rng(1).normal(size=(*inputs.query.shape[:-1], v_head_dim))
    found, expected = (
        qkv.vjp(*inputs.arrays, *inputs.variants, q_offset="end", backend=backend)[1](grad_out)
        for backend in ("cpu", "blocked")
    )
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=1e-11, atol=1e-11
        )


# What a row may not see


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e20])
@pytest.mark.parametrize("window", [(300, 0), (70, 0), (3, 9)])
def test_what_a_row_may_not_see_does_not_change_its_bits(window, value):
    rng = np.random.default_rng(0)
    q, k, v, grad_out = (rng.standard_normal((1, 2, 300, 40), np.float32) for _ in range(4))
    mask = qkv.SlidingWindow(*window)
    last = 250 - window[1]
    out, pull_back = qkv.vjp(q, k, v, mask)
    d_query = pull_back(grad_out).query
    for rows in (q, k, v):
        rows[..., 250, :] = value
    changed, pull_back = qkv.vjp(q, k, v, mask)
    now = pull_back(grad_out).query
    np.testing.assert_array_equal(changed[..., :last, :], out[..., :last, :])
    np.testing.assert_array_equal(now[..., :last, :], d_query[..., :last, :])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_of_keys_that_a_wrong_query_may_not_see_keep_their_bits(value):
    rng = np.random.default_rng(0)
    q, k, v, grad_out = (rng.standard_normal((1, 2, 300, 40), np.float32) for _ in range(4))
    found = []
    for wrong in (False, True):
        if wrong:
            q[..., 200, :] = grad_out[..., 210, :] = value
        gradients = qkv.vjp(q, k, v, qkv.SlidingWindow(150, 0))[1](grad_out)
        found.append([x[..., rows, :] for x in (gradients.key, gradients.value)
                      for rows in (slice(0, 50), slice(211, None))])  # fmt: skip
    for before, after in zip(*found, strict=True):
        np.testing.assert_array_equal(before, after)


# What is not read


KERNELS = [
    (as_it_runs("amx"), "float32"), (as_it_runs("amx"), "float16"), (as_it_runs("amx"), "bfloat16"),
    (as_it_runs("avx512-bf16"), "bfloat16"), (as_it_runs("avx2"), "float32"),
]  # fmt: skip
"""Instruction sets and dtypes: products of parts, of tiles, of pairs, of elements."""

PRODUCTS = {
    ("amx", "float32"): ("tiles", "3"),
    ("amx", "float16"): ("tiles", "2"),
    ("amx", "bfloat16"): ("tiles", "1"),
    ("avx512-bf16", "bfloat16"): ("pairs", "1"),
    ("avx2", "float32"): ("elements", "1"),
}
"""What the kernel of each multiplies, and how many parts an operand has."""

PROTECTED = """
    import ctypes, mmap, sys
    import numpy as np, qkv
    from qkv.testing import DTYPES, truth
    from qkv.testing.tolerances import bounds

    libc = ctypes.CDLL(None, use_errno=True)
    rng = np.random.default_rng(0)
    TILE = 64  # rows that are read together, of which some may be hidden
    dim = max(64, mmap.PAGESIZE // (2 * TILE))

    def normal(rows, dtype):
        return rng.standard_normal((1, 2, rows, dim)).astype(DTYPES[dtype])

    def only(first, last, array):
        '''A copy of one head of which nobody may touch the rows outside of these.'''
        array = array[:, :1]
        memory = mmap.mmap(-1, -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        view = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
        view[...] = array
        row = array.strides[-2]
        for start, stop in ((0, first * row), (last * row, len(memory))):
            assert start % mmap.PAGESIZE == stop % mmap.PAGESIZE == 0
            if start == stop:
                continue  # Linux protects an empty range without an error, QEMU refuses it.
            place = ctypes.c_void_p(view.ctypes.data + start)
            assert libc.mprotect(place, ctypes.c_size_t(stop - start), 0) == 0
        return view
"""


@pytest.mark.slow
@pytest.mark.large
@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is of POSIX")
@pytest.mark.sampled(("isa", "dtype"), KERNELS, one_in=5)
def test_tiles_of_keys_that_no_query_may_see_are_not_read(isa: str, dtype: str) -> None:
    """The forward pass, the backward pass and the replays read no such tile, at either end."""
    in_a_process(
        PROTECTED
        + """
    from qkv.backends.cpu.passes.forward import ForwardPass
    from qkv.call.binding.bound import bind
    from qkv.call.inspected import attend_for_inspection
    from qkv.call.binding.options import OptionValues
    from qkv.inspection.records.record import Record
    from qkv.problem.building.check import check

    dtype, product, terms = sys.argv[1:]
    for window, length, q_offset, first, last, keys in (
        (1000, 270, 0, 0, 192, 270),  # causal
        (40, 460, 200, 128, 384, 460),
        (1000, 170, 400, 0, 192, 400),
    ):
        # One structure, so that a kernel of each pass is compiled once.
        variants = qkv.SlidingWindow(window, 0), qkv.KeyLengths([length])
        query = normal(168, dtype)
        whole = [normal(keys, dtype)[:, :1] for _ in range(2)]
        key, value = (only(first, last, array) for array in whole)
        keywords = {"q_offset": q_offset, "backend": "cpu"}
        shape = ForwardPass(check(query, *whole, variants, q_offset=q_offset)).shape
        assert (shape.product, shape.terms) == (product, int(terms)), shape
        out, pullback = qkv.vjp(query, key, value, *variants, **keywords)
        exact = truth(query, *whole, variants, q_offset=q_offset)
        assert np.abs(out.astype(float) - exact.out).max() <= bounds(exact, out.dtype, 1).out
        gradients = pullback(out)
        assert not gradients.key[..., last:, :].any() and not gradients.value[..., :first, :].any()
        # Not `qkv.inspect`, which copies its arrays, all rows of them.
        bound = bind(query, key, value, variants, OptionValues(**keywords))
        record = Record(attend_for_inspection(bound))
        np.testing.assert_allclose(record.received, exact.weights.sum(-2), rtol=0.01, atol=0.01)
        top = record.top(3)[1]
        best = np.sort(exact.weights)[..., :-4:-1]
        np.testing.assert_allclose(top, best, rtol=0.01, atol=0.01)
        """,
        dtype,
        *PRODUCTS[isa.removesuffix("-emulated"), dtype],
        QKV_ISA=isa,
    )


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is of POSIX")
@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="16 rows have to be a page")
def test_keys_that_no_query_may_see_are_not_read():
    """The forward pass over elements reads no such key, except within 16 of one that is seen."""
    in_a_process(
        PROTECTED
        + """
    query, key, value = (normal(rows, "float32") for rows in (168, 192, 192))
    variants = (qkv.Causal("start"),)
    hidden = [only(0, 176, array) for array in (key, value)]
    out = qkv.attention(query, *hidden, *variants, backend="cpu")
    exact = truth(query, key[:, :1], value[:, :1], variants)
    assert np.abs(out - exact.out).max() <= bounds(exact, np.float32, 1).out
        """,
        QKV_ISA=as_it_runs("avx2"),
    )


# Which masks


@pytest.mark.parametrize(
    ("mask", "steps"),
    [
        (qkv.Causal(), True),
        (qkv.SlidingWindow(40, 0), True),
        (qkv.Segments(SEGMENTS[:100], SEGMENTS[:100]), True),
        (qkv.Mask(np.eye(100, dtype=bool)), False),
        (qkv.Softcap(3.0), False),
    ],
)
def test_masks_that_are_read_pair_by_pair_have_no_steps(mask, steps):
    q, k, v = (np.zeros((1, 1, 100, 8), np.float32) for _ in range(3))
    assert skips_keys_within_blocks(check(q, k, v, (mask,)).spec.mask) == steps
