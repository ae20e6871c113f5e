"""Token by token through a cache is all at once without one, for every cache and causal variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from qkv.cache import Cache, ContiguousCache, PagedCache, RollingCache
from qkv.testing import truth

Array = NDArray[Any]

BATCH, HEADS, KV_HEADS, DIM, V_DIM, LENGTH = 1, 4, 2, 8, 5, 512
PAGE, WINDOW, FIRST = 16, 100, 3
STEPS = (0, 430, 447, 448, 449, 463, 464, 465, 511, LENGTH)
"""Chunks that end before, at and behind the end of a page, and single tokens there."""
LAST = 446
"""Queries from here on are compared with the definition."""

CACHES: dict[str, Callable[..., Cache]] = {
    "contiguous": ContiguousCache,
    "rolling": lambda **o: RollingCache(WINDOW, **o),
    "sinks": lambda **o: RollingCache(WINDOW, FIRST, **o),
    "paged": lambda **o: PagedCache(PAGE, **o),
}
SAID: dict[str, tuple[Any, ...]] = {
    "rolling": (qkv.SlidingWindow(WINDOW - 1, None),),
    "sinks": (qkv.SlidingWindow(WINDOW - 1, None) | qkv.Prefix(FIRST),),
}
"""What a cache that forgets means for attention over all tokens."""

TABLE = np.random.default_rng(3).normal(size=(32, HEADS))
SLOPES = np.geomspace(0.2, 0.004, HEADS)
VARIANTS: dict[str, tuple[Any, ...]] = {
    "causal": (qkv.Causal(),),
    "window": (qkv.SlidingWindow(37, 0),),
    "prefix": (qkv.Causal() | qkv.Prefix(9), qkv.SlidingWindow(None, 0)),
    "global": (qkv.Causal() & (qkv.SlidingWindow(20, 0) | qkv.GlobalTokens([0, 5])),),
    "strided": (qkv.Causal() & (qkv.SlidingWindow(7, 0) | qkv.Strided(8)),),
    "random blocks": (
        qkv.SlidingWindow(20, 0) | qkv.RandomBlocks(16, 3, 7, causal=True, length=LENGTH),
        qkv.Causal(),
    ),
    "alibi": (qkv.Causal(), qkv.ALiBi(SLOPES)),
    "rope": (qkv.Causal(), qkv.RoPE()),
    "interleaved": (qkv.Causal(), qkv.RoPE(layout="interleaved", rotary_dim=4)),
    "softcap": (qkv.Causal(), qkv.Softcap(2.0)),
    "sinks": (qkv.Causal(), qkv.Sinks(np.array([0.5, -1.0, 2.0, 0.0]))),
    "t5": (qkv.Causal(), qkv.RelativeBias(TABLE, bidirectional=False, max_distance=128)),
    "score mod": (
        qkv.Causal(),
        qkv.ScoreMod(lambda s, b, h, q_pos, kv_pos: s - 0.1 * np.sqrt(abs(q_pos - kv_pos))),
    ),
    "everything": (
        qkv.RoPE(),
        qkv.Softcap(5.0),
        qkv.ALiBi(SLOPES),
        qkv.Causal(),
        qkv.Sinks(np.array([0.5, -1.0, 2.0, 0.0])),
    ),
}


def arrays(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


QUERY = arrays(BATCH, HEADS, LENGTH, DIM, seed=0)
KEY = arrays(BATCH, KV_HEADS, LENGTH, DIM, seed=1)
VALUE = arrays(BATCH, KV_HEADS, LENGTH, V_DIM, seed=2)


def close(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= 64 * np.finfo(np.float64).eps * max(
        1.0, float(np.abs(expected).max())
    )


def rounded(rows: Array, first: Sequence[int] = ()) -> Array:
    """What int8 rows stand for; keys are kept less the mean of the first ones of each sequence."""
    offset: Any = 0.0
    if first:
        came_first = [own[:, :count] for own, count in zip(rows, first, strict=True)]
        offset = np.concatenate(came_first, 1).mean(1).astype(np.float32)[:, None]
    less = rows - offset
    scales = (np.abs(less).max(-1, keepdims=True) / 127).astype(np.float32)
    return np.rint(less / scales.astype(np.float64)) * scales + offset


@cache
def expected(variant: str, kind: str, dtype: str | None) -> Array:
    """The last rows, from the definition over all tokens."""
    keys, values = (KEY, VALUE) if dtype is None else (rounded(KEY, [STEPS[1]]), rounded(VALUE))
    whole = (*VARIANTS[variant], *SAID.get(kind, ()))
    return truth(QUERY[:, :, LAST:], keys, values, whole, q_offset=LAST).out


INT8 = ("causal", "rope", "everything")
"""Variants do not see how rows are kept, so that a few of them are enough."""


KINDS = list(product(CACHES, (None, "int8")))
READ = [*((v, None) for v in VARIANTS), *((v, "int8") for v in INT8)]


@pytest.mark.slow
@pytest.mark.sampled(("kind", "read"), list(product(CACHES, READ)), one_in=16)
def test_decoding_is_prefill(kind: str, read: tuple[str, str | None]) -> None:
    variant, dtype = read
    held = CACHES[kind](dtype=dtype)
    parts = []
    for start, stop in pairwise(STEPS):
        now = np.s_[:, :, start:stop]
        rows = held.append(KEY[now], VALUE[now])
        assert rows.q_offset == start
        parts.append(rows.attention(QUERY[now], *VARIANTS[variant]))
    close(
        np.concatenate(parts, 2)[:, :, LAST:],
        expected(variant, kind if kind in SAID else "", dtype),
    )


@pytest.mark.slow
@pytest.mark.sampled(("kind", "dtype"), KINDS, one_in=4)
def test_sequences_of_different_lengths(kind: str, dtype: str | None) -> None:
    """Each sequence of a batch gives what it gives alone, whatever lies behind its last token."""
    new = ([40, 0, 7], [1, 1, 1], [0, 130, 33], [1, 1, 1], [5, 2, 1])
    total = np.sum(new, 0)
    query, key, value = (
        arrays(3, heads, 200, dim, seed=seed)
        for seed, (heads, dim) in enumerate(((4, DIM), (2, DIM), (2, V_DIM)))
    )
    keys, values = (key, value) if dtype is None else (rounded(key, new[0]), rounded(value))
    variants = (qkv.Causal(), qkv.ALiBi(SLOPES))
    held = CACHES[kind](dtype=dtype)
    before = np.zeros(3, np.int64)
    found: list[list[Array]] = [[], [], []]
    for counts in new:
        room = max(counts)
        arriving = [np.full((3, x.shape[1], room, x.shape[3]), np.nan) for x in (query, key, value)]
        for b, count in enumerate(counts):
            for rows, x in zip(arriving, (query, key, value), strict=True):
                rows[b, :, :count] = x[b, :, before[b] : before[b] + count]
        handed = held.append(*arriving[1:], new_lens=counts)
        out = handed.attention(np.nan_to_num(arriving[0]), *variants)
        for b, count in enumerate(counts):
            found[b].append(out[b, :, :count])
        before += counts
        assert held.lengths.tolist() == before.tolist()
    for b in range(3):
        rows = np.s_[b, :, : total[b]]
        right = truth(query[rows], keys[rows], values[rows], (*variants, *SAID.get(kind, ()))).out
        close(np.concatenate(found[b], 1), right)


@pytest.mark.parametrize("kind", CACHES)
def test_beams(kind: str) -> None:
    """Beams that are forked, dropped and reordered attend to their own tokens only."""
    rng = np.random.default_rng(0)
    held = CACHES[kind]()
    beams = [rng.normal(size=(1, 2, 150, DIM))]
    held.append(beams[0], beams[0])
    for step in range(6):
        chosen = rng.integers(0, len(beams), 3) if step else np.zeros(3, np.int64)
        held.reorder(chosen)
        tokens = rng.normal(size=(3, 2, 1, DIM))
        rows = held.append(tokens, tokens)
        beams = [np.concatenate([beams[i], tokens[b : b + 1]], 2) for b, i in enumerate(chosen)]
        whole = np.concatenate(beams)
        query = rng.normal(size=(3, 4, 1, DIM))
        right = truth(query, whole, whole, SAID.get(kind, ()), q_offset=150 + step).out
        close(rows.attention(query, qkv.Causal()), right)


@pytest.mark.parametrize("kind", CACHES)
def test_forks_are_independent(kind: str) -> None:
    one = CACHES[kind]()
    one.append(KEY[:, :, :149], VALUE[:, :, :149])
    forks = [one.fork() for _ in range(3)]
    ends = [arrays(1, KV_HEADS, 1, DIM, seed=10 + i) for i in range(3)]
    handed = [held.append(end, end[..., :V_DIM]) for held, end in zip(forks, ends, strict=True)]
    for rows, end in zip(handed, ends, strict=True):
        keys = np.concatenate([KEY[:, :, :149], end], 2)
        values = np.concatenate([VALUE[:, :, :149], end[..., :V_DIM]], 2)
        query = QUERY[:, :, :1]
        right = truth(query, keys, values, SAID.get(kind, ()), q_offset=149).out
        close(rows.attention(query, qkv.Causal()), right)
    assert one.lengths.tolist() == [149]


@pytest.mark.slow
@pytest.mark.sampled(("kind", "dtype"), KINDS, one_in=4)
@pytest.mark.parametrize("queries", [1, 70], ids=["in place", "gathered"])
def test_what_was_truncated_cannot_leak(kind: str, dtype: str | None, queries: int) -> None:
    """Memory behind the last token may hold NaN, also one that NumPy warns about."""
    signalling = np.array(0x7F800001, np.uint32).view(np.float32)
    bad = np.full((1, 2, 100, 8), signalling)
    good = KEY[:, :, :71].astype(np.float32)
    held = CACHES[kind](dtype=dtype)
    held.append(bad, bad)
    held.truncate(0)
    held.append(good[:, :, :-queries], good[:, :, :-queries])
    rows = held.append(good[:, :, -queries:], good[:, :, -queries:])
    out = rows.attention(np.ones((1, 2, queries, 8), np.float32), qkv.Causal())
    assert np.isfinite(out).all()


@pytest.mark.slow
@pytest.mark.sampled(("kind", "dtype"), KINDS, one_in=4)
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_other_libraries(library: str, kind: str, dtype: str | None) -> None:
    """The same bits as NumPy's."""
    if library == "torch":
        torch = pytest.importorskip("torch", reason="compared with tensors")
        convert, kept = torch.from_numpy, torch.Tensor
    else:
        jnp = pytest.importorskip("jax.numpy", reason="compared with JAX arrays")
        convert, kept = jnp.asarray, np.ndarray
    mine, other = CACHES[kind](dtype=dtype), CACHES[kind](dtype=dtype)
    query, key, value = (x.astype(np.float32) for x in (QUERY, KEY, VALUE))
    for start, stop in ((0, 120), (120, 121), (121, 130)):
        now = np.s_[:, :, start:stop]
        rows = mine.append(key[now], value[now])
        others = other.append(convert(key[now]), convert(value[now]))
        out = others.attention(convert(query[now]), qkv.Causal(), qkv.ALiBi())
        assert type(out) is type(convert(query[now]))
        assert np.array_equal(out, rows.attention(query[now], qkv.Causal(), qkv.ALiBi()))
        held = others.parts[0].key
        held = getattr(held, "pages", held)
        assert isinstance(getattr(held, "values", held) if dtype else held, kept)


@pytest.mark.sampled("kind", list(CACHES), one_in=2)
def test_bfloat16(kind: str) -> None:
    """A cache copies bits, so that the result is that of the same rows without it."""
    torch = pytest.importorskip("torch", reason="bfloat16 tensors")
    query, key, value = (
        torch.from_numpy(x[:, :, :90]).to(torch.bfloat16) for x in (QUERY, KEY, VALUE)
    )
    held = CACHES[kind]()
    held.append(key[:, :, :80], value[:, :, :80])
    rows = held.append(key[:, :, 80:], value[:, :, 80:])
    out = rows.attention(query[:, :, 80:], qkv.Causal())
    assert out.dtype is torch.bfloat16
    right = qkv.attention(query[:, :, 80:], key, value, qkv.Causal(), q_offset=80)
    assert torch.allclose(out.float(), right.float(), rtol=2**-7, atol=0.01)


def test_arrays_over_key_rows() -> None:
    """Masks and biases are indexed by row, as without a cache."""
    bias, mask = (
        arrays(HEADS, 60, 60, seed=5),
        np.tri(60, dtype=bool) & (arrays(60, 60, seed=6) < 1),
    )
    held, parts = ContiguousCache(), []
    for start, stop in ((0, 50), (50, 51), (51, 60)):
        now = np.s_[:, :, start:stop]
        rows = held.append(KEY[now], VALUE[now])
        variants = bias[:, start:stop, :stop], mask[start:stop, :stop]
        parts.append(rows.attention(QUERY[now], *variants))
    first = np.s_[:, :, :60]
    close(np.concatenate(parts, 2), truth(QUERY[first], KEY[first], VALUE[first], (bias, mask)).out)


@pytest.mark.sampled("kind", list(CACHES), one_in=2)
def test_lse_and_statistics(kind: str) -> None:
    """Rows are ordinary arguments: lse comes with them, and `inspect` takes those of one part."""
    held = CACHES[kind]()
    held.append(KEY[:, :, :199], VALUE[:, :, :199])
    rows = held.append(KEY[:, :, 199:200], VALUE[:, :, 199:200])
    query = QUERY[:, :, 199:200]
    whole = KEY[:, :, :200], VALUE[:, :, :200]
    right = truth(query, *whole, SAID.get(kind, ()), q_offset=199)
    out, lse = rows.attention(query, qkv.Causal(), return_lse=True)
    close(out, right.out)
    close(lse, right.lse)
    if len(rows.parts) == 1:
        record = qkv.inspect(
            query,
            rows.key,
            rows.value,
            *rows.masks,
            q_offset=rows.q_offset,
            kv_offset=rows.kv_offset,
        )
        close(record.max_weight, right.weights.max(-1))
    else:
        with pytest.raises(qkv.UnsupportedError, match="2 parts"):
            rows.key  # noqa: B018


@pytest.mark.sampled("kind", list(CACHES), one_in=2)
def test_keys_that_are_stored_rotated(kind: str) -> None:
    """`RoPE.rotate` before `append` is `RoPE` as a variant."""
    rope, held, parts = qkv.RoPE(), CACHES[kind](), []
    for start, stop in pairwise(STEPS):
        now, positions = np.s_[:, :, start:stop], np.arange(start, stop)
        rows = held.append(rope.rotate(KEY[now], positions), VALUE[now])
        parts.append(rows.attention(rope.rotate(QUERY[now], positions), qkv.Causal()))
    right = expected("rope", kind if kind in SAID else "", None)
    assert np.abs(np.concatenate(parts, 2)[:, :, LAST:] - right).max() < 1e-12


@pytest.mark.sampled("kind", list(CACHES), one_in=2)
def test_a_layer_with_any_cache(kind: str) -> None:
    """`MultiHeadAttention` token by token, with keys that are rotated once."""
    torch = pytest.importorskip("torch", reason="the layer is torch's")
    from qkv.torch import MultiHeadAttention

    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4, num_kv_heads=2, causal=True, rope=qkv.RoPE()).double()
    tokens = torch.randn(2, 130, 16, dtype=torch.float64)
    held = CACHES[kind]()
    with torch.no_grad():
        whole = layer(tokens, None, None, *SAID.get(kind, ()))
        steps = pairwise((0, 120, 121, 130))
        parts = [layer(tokens[:, a:b], cache=held) for a, b in steps]
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


def test_sizes_may_be_integers_of_numpy() -> None:
    x = np.ones((1, 2, 3, 8), np.float32)
    rows = qkv.cache.PagedCache(np.uint32(16), np.uint8(200)).append(x, x)
    assert rows.attention(x, qkv.Causal()).shape == x.shape
    assert len(qkv.cache.PageAllocator(np.uint16(300)).take(np.uint8(5))) == 5


@pytest.mark.parametrize("kind", CACHES)
def test_lengths_may_be_integers_of_numpy(kind: str) -> None:
    """`cache.lengths[0]` is one."""
    x = np.ones((1, 2, 3, 8), np.float32)
    cache = CACHES[kind]()
    cache.append(x, x, new_lens=np.uint8(2))
    cache.truncate(cache.lengths[0] - 1)
    assert cache.lengths.tolist() == [1]
    pages = qkv.cache.PagedCache()
    pages.append(x, x)
    assert pages.share(pages.page_table, pages.lengths[0]).lengths.tolist() == [3]


@pytest.mark.parametrize("kind", CACHES)
def test_no_sequences_take_an_empty_list(kind: str) -> None:
    x = np.ones((0, 2, 3, 8), np.float32)
    cache = CACHES[kind]()
    cache.append(x, x, new_lens=[])
    cache.truncate([])
    cache.reorder([])
    assert cache.lengths.shape == (0,)
