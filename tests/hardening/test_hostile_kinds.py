"""Calls with hostile values that once raised no error of qkv, one for each kind of fault."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="hostile tensors need torch: pip install torch")

import qkv  # noqa: E402
import qkv.cache  # noqa: E402
import qkv.cost  # noqa: E402
import qkv.files  # noqa: E402
import qkv.mechanisms  # noqa: E402
import qkv.samples  # noqa: E402
import qkv.torch  # noqa: E402

X = np.random.default_rng(0).normal(size=(2, 5, 8))
T = torch.ones(1, 2, 5, 8)
AMBIGUOUS = np.ones((3, 2))
ITSELF: list[Any] = []
ITSELF.append(ITSELF)
STRUCTURED = np.zeros((5, 5), [("a", "f4")])
META = torch.ones(2, 2, device="meta")
NESTED = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)
with warnings.catch_warnings(action="ignore", category=UserWarning):
    STRIDED_NESTED = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
NO_VALUES = torch.ones(2, 5, 8, device="meta")
SPARSE = torch.ones(5, 8).to_sparse()


def rows() -> Any:
    cache = qkv.cache.PagedCache()
    return cache.append(X, X)


def pages() -> Any:
    cache = qkv.cache.PagedCache()
    cache.append(X[None], X[None])
    return cache


CASES: dict[str, Callable[[], Any]] = {
    "a list that holds itself": lambda: qkv.attention(X, X, X, ITSELF),
    "flags: causal": lambda: qkv.RandomBlocks(2, 1, causal=AMBIGUOUS),
    "flags: return_lse": lambda: rows().attention(X, return_lse=AMBIGUOUS),
    "flags: enable_gqa": lambda: qkv.torch.scaled_dot_product_attention(
        T, T, T, enable_gqa=AMBIGUOUS
    ),
    "words: layout of RoPE": lambda: qkv.RoPE(layout=AMBIGUOUS),
    "words: layout of merge": lambda: qkv.merge((X, X[..., 0]), layout=AMBIGUOUS),
    "words: backend": lambda: qkv.attention(X, X, X, backend=AMBIGUOUS),
    "types: an array": lambda: qkv.inspect(X, X, X).weights.sum(dtype=AMBIGUOUS),
    "types: half a character": lambda: qkv.inspect(X, X, X).weights.mean(dtype="\ud800"),
    "no array: a module": lambda: qkv.inspect(torch.nn.Linear(2, 2), X, X),
    "no array: in a cache": lambda: pages().append(torch.nn.Linear(2, 2), X[None]),
    "no array: ragged mask": lambda: qkv.attention(X, X, X, qkv.Mask([1, [2]])),
    "no array: ragged positions": lambda: qkv.RoPE().rotate(X, [1, [2]]),
    "no array: mask of the drop-in": lambda: qkv.torch.scaled_dot_product_attention(
        T, T, T, [None]
    ),
    "no array: a generator": lambda: pages().append(np.random.default_rng(0), X[None]),
    "no array: ragged ids": lambda: qkv.attention(X, X, X, qkv.Segments([1, [2]])),
    "no array: ragged edges": lambda: qkv.Segments.from_cu_seqlens([1, [2]], [0, 1]),
    "no array: itself": lambda: qkv.SinusoidalPositions(8)(X, ITSELF),
    "no array: ragged places": lambda: qkv.attention(X, X, X, qkv.GlobalTokens([1, [2]])),
    "nested beside text": lambda: qkv.cache.ContiguousCache().append("x", NESTED),
    "a table of another library": lambda: qkv.LearnedPositions(torch.ones(9, 8).bfloat16())(X),
    "flags: return_lse of jvp": lambda: qkv.jvp(
        X, X, X, tangents=qkv.Tangents(query=X), return_lse=AMBIGUOUS
    ),
    "names of a state": lambda: qkv.mechanisms.RWKV6(8, 2).step(X, {1: 2}),
    "names of a config": lambda: qkv.cost.read_config({1: 2}),
    "no dimension": lambda: qkv.torch.scaled_dot_product_attention(torch.tensor(1.0), T, T),
    "ragged offsets": lambda: qkv.inspect(X, X, X, kv_offset=[1, [2]]),
    "no rows of a key": lambda: qkv.mechanisms.Additive(8)(X, X[:, :0]),
    "an index for no matrix": lambda: qkv.inspect(X, X, X).weights.matrix(np.array([1, 2, 3])),
    "nested keys": lambda: pages().append(NESTED, X[None]),
    "blocks beyond memory": lambda: qkv.mechanisms.BigBird(8, 2, block=2).block_mask(2**31),
    "a scale beyond float64": lambda: qkv.inspect(X, X, X, scale=10**400),
    "a factor beyond float64": lambda: qkv.RoPE(attention_factor=10**400),
    "distances beyond memory": lambda: qkv.RelativeBias(np.ones((4, 2)), max_distance=2**63),
    "a table that holds itself": lambda: qkv.RelativeBias(ITSELF),
    "a divisor beyond float64": lambda: qkv.RoPE.longrope(
        8,
        short_factor=10**400,
        long_factor=np.ones(4),
        original_max_position_embeddings=8,
        seq_len=4,
        factor=2.0,
    ),
    "flags: backward": lambda: qkv.prepare(T, T, T, backward=AMBIGUOUS),
    "no axes": lambda: qkv.inspect(X, X, X).plot(ax=AMBIGUOUS),
    "nested rows in a file": lambda: qkv.files.write_arrays("x", X, NESTED, X),
    "nested positions": lambda: qkv.RoPE().rotate(T, NESTED),
    "layers to keep": lambda: qkv.ModelRecord("x", keep=AMBIGUOUS),
    "no layers to keep": lambda: qkv.ModelRecord("x", keep=np.array(1)),
    "a name too long for a file": lambda: qkv.cost.read_config("x" * 10_000),
    "an array for a name": lambda: qkv.prepare(X, X, X, free=AMBIGUOUS),
    "tokens beyond memory": lambda: qkv.samples.tiny_model().repeated_sequence(2**31),
    "no number: dropout_p": lambda: qkv.torch.scaled_dot_product_attention(
        T, T, T, dropout_p=torch.ones(2)
    ),
    "no dense query": lambda: qkv.torch.scaled_dot_product_attention(SPARSE, T[0, 0], T[0, 0]),
    "fewer than no pairs": lambda: qkv.cost.attended_pairs(-1, 5),
    "fewer than no bytes": lambda: qkv.cost.memory(-1),
    "no variant of the call": lambda: qkv.vjp(X, X, X)[1](X).of(7),
    "no array: structured": lambda: qkv.inspect(X, X, X, STRUCTURED),
    "no array: page table": lambda: pages().share(META, 1),
    "no array: objects": lambda: qkv.cache.quantize(np.array([[None, "x"]], object)),
    "no array: cumulative lengths": lambda: qkv.Segments.from_cu_seqlens(torch.ones(2), b"x"),
    "no dense array": lambda: qkv.SinusoidalPositions(8)(SPARSE),
    "several libraries": lambda: qkv.mechanisms.Linear(8, 2)(X, X, torch.ones(5, 8)),
    "rows of value": lambda: qkv.mechanisms.Additive(8)(X, X, X[:, :3]),
    "of_variants": lambda: qkv.jvp(X, X, X, tangents=qkv.Tangents(query=X, of_variants=3)),
    "of_variants: entries": lambda: qkv.jvp(
        X, X, X, tangents=qkv.Tangents(query=X, of_variants=[1])
    ),
    "wrt: integers": lambda: qkv.vjp(X, X, X)[1](X, wrt=b"x"),
    "operations of a ledger": lambda: qkv.cost.Ledger(operations=1),
    "steps of a ledger": lambda: qkv.cost.Ledger(operations={1: 1}),
    "changes of a model": lambda: qkv.samples.tiny_model().loss([1, 2], {2: 3}),
    "a distance beyond int64": lambda: qkv.inspect(X, X, X).mass_at(2**64),
    "positions beyond float64": lambda: qkv.SinusoidalPositions(8).encoding(-(10**400)),
    "nested rows to quantize": lambda: qkv.cache.quantize(NESTED),
    "rows of a sparse tensor": lambda: qkv.cache.quantize(SPARSE),
    "nested rows to rotate": lambda: qkv.RoPE().rotate(STRIDED_NESTED, [0, 1]),
    "nested rows without shape": lambda: qkv.cache.quantize(STRIDED_NESTED),
    "a query of no values": lambda: qkv.explain(NO_VALUES, X, X),
    "no array: structured edges": lambda: qkv.Segments.from_cu_seqlens(STRUCTURED[0]),
    "random blocks without values": lambda: qkv.mechanisms.BigBird(
        8, 1, block=1, random_blocks=META[:1]
    )(X),
    "no row": lambda: qkv.ScaledDotProductAttention(3).explain(*[np.eye(3)] * 3, "abc", None),
    "no tokens": lambda: qkv.ScaledDotProductAttention(3).explain(*[np.eye(3)] * 3, None),
    "width of a trace": lambda: qkv.explain(X[0], X[0], X[0]).text(width=-3),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_an_error_of_qkv(case: str) -> None:
    with pytest.raises(qkv.QkvError):
        CASES[case]()


def test_additive_weights_of_no_rows_are_none() -> None:
    assert qkv.mechanisms.Additive(8).token_mixing(X[:, :0]).shape == (2, 0, 0)


@pytest.mark.parametrize("tokens", [[0], [0, 1, 6], [3, 11]])
@pytest.mark.parametrize("window", [1, 4])
def test_the_pairs_of_a_long_window_are_counted_without_rows(window: int, tokens: Any) -> None:
    """A loop counts the same pairs; 2^31 tokens, for which there are no arrays, are counted too."""
    layer, n = qkv.mechanisms.Longformer(8, window=window, global_tokens=tokens), 9
    pairs = sum(
        abs(i - j) <= window or i in tokens or j in tokens for i in range(n) for j in range(n)
    )
    assert layer.pairs(n) == pairs
    assert layer.pairs(2**31) > 2**31 * (2 * window + len(tokens))


def test_a_ring_of_no_rows_has_no_hops() -> None:
    layer = qkv.mechanisms.Ring(8, num_devices=2)
    assert list(layer.hops(np.zeros((2, 0, 8), np.float32))) == []


def test_a_trace_of_no_rows_of_a_gradient_is_text() -> None:
    x = X[0]
    assert "===" in qkv.explain(x, x, x).text(top=0)


def test_states_of_bfloat16_are_read_into_tensors() -> None:
    layer = qkv.mechanisms.RWKV4(8)
    mixed = layer.token_mixing(torch.ones(5, 8, dtype=torch.bfloat16))
    expected = layer.token_mixing(np.ones((5, 8), np.float32))
    np.testing.assert_allclose(torch.as_tensor(mixed).float(), expected, rtol=0, atol=2**-7)


def test_calls_work_after_a_list_that_holds_itself_was_given_to_jax() -> None:
    pytest.importorskip("jax", reason="JAX's signature needs jax: pip install jax")
    import qkv.jax

    def calls_left() -> int:
        try:
            return 1 + calls_left()
        except RecursionError:
            return 0

    before = calls_left()
    for place in ("query", "value", "mask"):
        with pytest.raises(qkv.DTypeError, match="holds itself"):
            qkv.jax.dot_product_attention(**{"query": X, "key": X, "value": X, place: ITSELF})
    assert calls_left() == before


def test_a_ring_needs_an_axis_of_devices() -> None:
    jnp = pytest.importorskip("jax.numpy", reason="rings of JAX need jax: pip install jax")
    import qkv.jax

    x = jnp.asarray(X, jnp.float32)
    with pytest.raises(qkv.ArgumentError, match="axis_name='rows' is not an axis"):
        qkv.jax.ring_attention(x, x, x, axis_name="rows")
    with pytest.raises(qkv.ArgumentError, match=r"axis_name=\[\] is not an axis"):
        qkv.jax.ring_attention(x, x, x, axis_name=[])


def test_reductions_of_layers_name_what_torch_does_not_take() -> None:
    import qkv.hf

    layer = qkv.hf.LayerCall(torch.nn.Identity(), T, T, T, (qkv.Causal(),), None, 0, 0)
    with pytest.raises(qkv.ArgumentError, match="dim='x'"):
        qkv.hf.LayerWeights(layer).mean("x")
