"""`RoPE.rotate`: the rotation of attention itself, for arrays of every library."""

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import qkv

ROPES = {
    "halves": qkv.RoPE(base=50.0),
    "interleaved": qkv.RoPE(base=50.0, layout="interleaved"),
    "partial": qkv.RoPE(base=50.0, rotary_dim=4),
    "partial, interleaved": qkv.RoPE(base=50.0, rotary_dim=4, layout="interleaved"),
    "attention factor": qkv.RoPE(base=50.0, rotary_dim=6, attention_factor=1.3),
    "frequencies": qkv.RoPE(inv_freq=[2.0, 0.5, 0.01]),
}
each_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)


def rows(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def by_hand(rope, x, positions):
    """Every pair as a complex number, one at a time."""
    x = np.asarray(x, np.float64)
    out = x.copy()
    frequencies = rope.frequencies(x.shape[-1])
    n = len(frequencies)
    for index in np.ndindex(x.shape[:-1]):
        for i in range(n):
            a, b = (i, i + n) if rope.layout == "half_split" else (2 * i, 2 * i + 1)
            z = complex(x[(*index, a)], x[(*index, b)])
            z *= rope.attention_factor * np.exp(1j * float(positions[index]) * frequencies[i])
            out[(*index, a)], out[(*index, b)] = z.real, z.imag
    return out


@each_rope
def test_pairs_one_at_a_time(rope) -> None:
    x = rows(2, 3, 5, 8)
    positions = np.array([[7, 0, 3, 3, 90], [1, 2, 30, 4, 5]])[:, None]
    expected = by_hand(rope, x, np.broadcast_to(positions, (2, 3, 5)))
    np.testing.assert_allclose(rope.rotate(x, positions), expected, rtol=1e-13, atol=1e-13)


@each_rope
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_attention_over_rotated_rows_is_attention_with_the_variant(rope, dtype) -> None:
    """Both agree to the last bit: a cache of rotated keys changes nothing."""
    q, k, v = (rows(2, n, 9, 8, seed=n).astype(dtype) for n in (4, 2, 2))
    at = np.arange(11, 20)
    got = qkv.attention(rope.rotate(q, at), rope.rotate(k, at), v, backend="blocked")
    expected = qkv.attention(q, k, v, rope, q_offset=11, kv_offset=11, backend="blocked")
    np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
@each_rope
@pytest.mark.sampled("dtype", ["float64", "float32", "float16", "bfloat16"], one_in=4)
def test_torch_and_jax_agree_with_numpy(rope, dtype) -> None:
    x = rows(2, 2, 5, 8).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    at = np.array([3, 1, 4, 1, 59])
    expected = rope.rotate(x, at)
    assert expected.dtype == x.dtype
    wide = expected.astype(np.float64)

    tensor = torch.from_numpy(x.astype(np.float64)).to(getattr(torch, dtype))
    for positions in (at, torch.from_numpy(at)):
        got = rope.rotate(tensor, positions)
        assert got.dtype is tensor.dtype
        np.testing.assert_array_equal(got.double().numpy(), wide)

    with jax.enable_x64(dtype == "float64"):
        # Computed in float32 here: one more rounding than in NumPy, of a number below 6.
        eps = float(ml_dtypes.finfo(x.dtype).eps) * 8
        for positions in (at, jax.numpy.asarray(at)):
            given = jax.numpy.asarray(x)
            got = rope.rotate(given, positions)
            assert got.dtype == given.dtype
            np.testing.assert_allclose(np.asarray(got, np.float64), wide, atol=eps)
            traced = jax.jit(rope.rotate)(given, positions)
            np.testing.assert_allclose(
                np.asarray(traced, np.float64), wide, atol=max(eps, 5 * 59 * 2.0**-23)
            )


@pytest.mark.slow
@each_rope
@pytest.mark.one_in(3)
def test_gradients_are_rotated_back(rope) -> None:
    x, direction, at = rows(3, 5, 8), rows(3, 5, 8, seed=1), np.arange(5)
    # The rotation is linear: its gradient is the transpose, found here column by column.
    identity = np.eye(8).reshape(8, 1, 8).repeat(5, 1)
    columns = np.array([by_hand(rope, column, at) for column in identity])
    expected = np.einsum("hid,cid->hic", direction, columns)

    tensor = torch.from_numpy(x).requires_grad_()
    rope.rotate(tensor, at).backward(torch.from_numpy(direction))
    np.testing.assert_allclose(tensor.grad.numpy(), expected, rtol=1e-12, atol=1e-12)

    with jax.enable_x64(True):
        _, pull = jax.vjp(lambda a: rope.rotate(a, at), jax.numpy.asarray(x))
        (got,) = pull(jax.numpy.asarray(direction))
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-12, atol=1e-12)


def test_rows_of_either_layout_and_single_positions() -> None:
    rope, x = qkv.RoPE(), rows(2, 5, 3, 8)  # batch, length, heads, head_dim
    by_heads = rope.rotate(x.swapaxes(1, 2), np.arange(5)).swapaxes(1, 2)
    np.testing.assert_array_equal(rope.rotate(x, np.arange(5)[:, None]), by_heads)
    np.testing.assert_array_equal(rope.rotate(x[:, 4], 4), by_heads[:, 4])
    np.testing.assert_array_equal(rope.rotate(x[0, 2], range(2, 3)), by_heads[0, 2])
    assert rope.rotate(x[:, :0], np.arange(0)[:, None]).shape == (2, 0, 3, 8)


@pytest.mark.parametrize("layout", ["half_split", "interleaved"])
def test_a_matrix_of_numpy_is_rotated_as_the_array_is(layout) -> None:
    """Multiplying matrices by `*` is their product, which once gave other numbers."""
    rope, x = qkv.RoPE(layout=layout), rows(4, 8)
    found = rope.rotate(x.view(np.matrix), np.arange(4))
    assert type(found) is np.ndarray
    np.testing.assert_allclose(found, by_hand(rope, x, np.arange(4)), atol=1e-12)


@pytest.mark.slow
def test_torch_compiles_it() -> None:
    rope, x, at = qkv.RoPE(), torch.from_numpy(rows(2, 5, 8)), torch.arange(5)
    compiled = torch.compile(rope.rotate, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, at), rope.rotate(x, at), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_torch_exports_it_for_any_length() -> None:
    """The check of positions made a constant of the length, which torch refused."""
    rope, length = qkv.RoPE(), torch.export.Dim("length", max=64)

    class Rotated(torch.nn.Module):
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return rope.rotate(x, at)

    given = torch.from_numpy(rows(2, 5, 8)), torch.arange(5)
    program = torch.export.export(Rotated(), given, dynamic_shapes=({1: length}, {0: length}))
    x, at = rows(2, 9, 8), np.arange(9)[::-1].copy()
    found = program.module()(torch.from_numpy(x), torch.from_numpy(at))
    right = by_hand(rope, x, np.broadcast_to(at, (2, 9)))
    np.testing.assert_allclose(found.numpy(), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("x", "positions", "expected", "fact"),
    [
        ([[1.0, 2.0]], 0, qkv.DTypeError, "not an array"),
        (np.ones((3, 8), int), 0, qkv.DTypeError, "int64"),
        (np.ones((3, 8)), np.arange(3.0), qkv.DTypeError, "float64"),
        (np.ones((3, 8)), np.array([True] * 3), qkv.DTypeError, "bool"),
        (np.ones((3, 8)), np.arange(4), qkv.ShapeError, "(4,)"),
        (np.ones((3, 8)), np.zeros((2, 3), int), qkv.ShapeError, "(2, 3)"),
        (np.ones((3, 8)), "start", qkv.ArgumentError, "str"),
        (np.ones((3, 5)), np.arange(3), qkv.ShapeError, "(3, 5)"),
        (np.ones(()), 0, qkv.ShapeError, "()"),
        (torch.ones(3, 8), torch.arange(3.0), qkv.DTypeError, "float32"),
        (torch.ones(3, 8, dtype=torch.int32), torch.arange(3), qkv.DTypeError, "int32"),
        (torch.ones(3, 8).to(torch.float8_e5m2), 0, qkv.DTypeError, "float8_e5m2"),
        (np.ones((3, 8), ml_dtypes.float8_e5m2), 0, qkv.DTypeError, "float8_e5m2"),
    ],
)
def test_what_cannot_be_rotated(x, positions, expected, fact) -> None:
    with pytest.raises(expected) as caught:
        qkv.RoPE(rotary_dim=6).rotate(x, positions)
    assert fact in caught.value.fact
    assert caught.value.action
