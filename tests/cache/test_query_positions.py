"""Where queries stand that are not as many as the tokens that were just appended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from qkv.cache import Cache, ContiguousCache, PagedCache, RollingCache
from qkv.testing import truth

Array = NDArray[Any]

WINDOW, FIRST, TOKENS, NEW = 9, 2, 37, 5
CACHES: dict[str, Callable[..., Cache]] = {
    "contiguous": ContiguousCache,
    "rolling": lambda **o: RollingCache(WINDOW, **o),
    "sinks": lambda **o: RollingCache(WINDOW, FIRST, **o),
    "paged": lambda **o: PagedCache(4, **o),
}
SAID: dict[str, tuple[Any, ...]] = {
    "rolling": (qkv.SlidingWindow(WINDOW - 1, None),),
    "sinks": (qkv.SlidingWindow(WINDOW - 1, None) | qkv.Prefix(FIRST),),
}
"""What a cache that forgets means for attention over all tokens."""
ROLLING = ("rolling", "sinks")

RNG = np.random.default_rng(0)
QUERY = RNG.normal(size=(2, 4, TOKENS + NEW, 8))
KEY, VALUE = RNG.normal(size=(2, 2, 2, TOKENS + NEW, 8))
SLOPES = np.geomspace(0.2, 0.004, 4)
VARIANTS = (qkv.Causal(), qkv.ALiBi(SLOPES), qkv.RoPE())


def right(kind: str, first: int, stop: int, tokens: int = TOKENS + NEW) -> Array:
    """Rows `first` to `stop`, from the definition over all tokens."""
    variants = (*VARIANTS, *SAID.get(kind, ()))
    keys = KEY[:, :, :tokens], VALUE[:, :, :tokens]
    return np.asarray(truth(QUERY[:, :, first:stop], *keys, variants, q_offset=first).out)


def appended(kind: str, *lengths: int) -> tuple[Cache, Any]:
    """A cache to which the tokens were appended in chunks of these lengths, and its last rows."""
    held, start, rows = CACHES[kind](), 0, None
    for length in lengths:
        now = np.s_[:, :, start : start + length]
        rows = held.append(KEY[now], VALUE[now])
        start += length
    return held, rows


@pytest.mark.parametrize("queries", [0, 1, TOKENS - 1, 2 * TOKENS])
@pytest.mark.parametrize("kind", CACHES)
def test_as_many_queries_as_appended_tokens(kind: str, queries: int) -> None:
    _, rows = appended(kind, TOKENS)
    query = np.resize(QUERY, (2, 4, queries, 8))
    with pytest.raises(qkv.ShapeError) as caught:
        rows.attention(query, qkv.Causal())
    message = str(caught.value)
    assert f"query has {queries} row" in message
    assert f"{TOKENS} rows were appended" in message
    assert 'q_offset="end"' in message


@pytest.mark.parametrize("kind", CACHES)
def test_a_whole_query_after_one_token(kind: str) -> None:
    _, rows = appended(kind, TOKENS, 1)
    with pytest.raises(qkv.ShapeError, match=f"{TOKENS + 1} rows and 1 row was appended"):
        rows.attention(QUERY[:, :, : TOKENS + 1], qkv.Causal())


@pytest.mark.parametrize("how", ["q_offset", "the mask", "within a mask", "both", "integer"])
@pytest.mark.parametrize("queries", [1, NEW])
@pytest.mark.parametrize("kind", CACHES)
def test_the_last_query_at_the_last_key(kind: str, queries: int, how: str) -> None:
    _, rows = appended(kind, TOKENS, NEW)
    first = TOKENS + NEW - queries
    given: Any = {"q_offset": "end", "both": "end", "integer": first}.get(how)
    mask: Any = qkv.Causal() if how in ("q_offset", "integer") else qkv.Causal("end")
    mask = mask & ~(~mask | ~qkv.SlidingWindow(None, 0)) if how == "within a mask" else mask
    out, lse = rows.attention(
        QUERY[:, :, first:], mask, *VARIANTS[1:], q_offset=given, return_lse=True, backend="blocked"
    )
    assert np.abs(out - right(kind, first, TOKENS + NEW)).max() < 1e-12
    assert lse.shape == (2, 4, queries)


@pytest.mark.parametrize("kind", CACHES)
def test_sequences_of_different_lengths(kind: str) -> None:
    """The last query stands at the last token of its own sequence."""
    held, _ = appended(kind, TOKENS)
    held.truncate([TOKENS, TOKENS - 1])
    chunk = np.stack([KEY[0, :, TOKENS:], KEY[1, :, TOKENS - 1 : -1]])
    values = np.stack([VALUE[0, :, TOKENS:], VALUE[1, :, TOKENS - 1 : -1]])
    counts = [NEW, 2]
    rows = held.append(chunk, values, new_lens=counts)
    with pytest.raises(qkv.ShapeError, match=f"1 row and {NEW} rows were appended"):
        rows.attention(QUERY[:, :, -1:], qkv.Causal())
    last = [TOKENS + NEW - 1, TOKENS]
    query = np.stack([QUERY[b, :, i : i + 1] for b, i in enumerate(last)])
    for given, mask in (("end", qkv.Causal()), (None, qkv.Causal("end")), (last, qkv.Causal())):
        out = rows.attention(query, mask, *VARIANTS[1:], q_offset=given, backend="blocked")
        for b, i in enumerate(last):
            assert np.abs(out[b] - right(kind, i, i + 1, i + 1)[b]).max() < 1e-12


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_earlier_queries(kind: str) -> None:
    """A cache that forgets nothing takes queries of any position."""
    _, rows = appended(kind, TOKENS, NEW)
    for given, queries in (("end", TOKENS), (NEW, TOKENS), ("start", 3)):
        first = 0 if given == "start" else NEW
        out = rows.attention(
            QUERY[:, :, first : first + queries], *VARIANTS, q_offset=given, backend="blocked"
        )
        assert np.abs(out - right(kind, first, first + queries)).max() < 1e-12


@pytest.mark.parametrize(
    "given", ["end", "start", TOKENS - 1, [TOKENS, TOKENS - 1], [[TOKENS - 1]]]
)
@pytest.mark.parametrize("kind", ROLLING)
def test_queries_whose_window_is_gone(kind: str, given: Any) -> None:
    _, rows = appended(kind, TOKENS, NEW)
    message = f"keys before {TOKENS - WINDOW + 1} are gone"
    with pytest.raises(qkv.ShapeError, match=message):
        rows.attention(QUERY[:, :, : NEW + 1], qkv.Causal(), q_offset=given)


@pytest.mark.parametrize("kind", ROLLING)
def test_all_queries_while_nothing_is_forgotten(kind: str) -> None:
    """The rows of a first append begin at position 0, and so may queries."""
    _, rows = appended(kind, TOKENS)
    out = rows.attention(QUERY[:, :, :NEW], *VARIANTS, q_offset="start", backend="blocked")
    assert np.abs(out - right(kind, 0, NEW, TOKENS)).max() < 1e-12


@pytest.mark.parametrize("kind", CACHES)
def test_rows_that_were_read_or_shared(kind: str) -> None:
    """Nothing was appended, so that queries of any number follow the last token."""
    held, _ = appended(kind, TOKENS)
    for rows in (held.read(), held.fork().read()):
        after = rows.attention(QUERY[:, :, -2:], qkv.ALiBi(SLOPES))
        variants = (qkv.ALiBi(SLOPES), *SAID.get(kind, ()))
        expected = truth(
            QUERY[:, :, -2:], KEY[:, :, :TOKENS], VALUE[:, :, :TOKENS], variants, q_offset=TOKENS
        ).out
        assert np.abs(after - expected).max() < 1e-12
    fork = held.fork()
    rows = fork.append(KEY[:, :, TOKENS:], VALUE[:, :, TOKENS:])
    with pytest.raises(qkv.ShapeError, match=f"1 row and {NEW} rows were appended"):
        rows.attention(QUERY[:, :, -1:], qkv.Causal())


def test_words_that_contradict() -> None:
    _, rows = appended("paged", TOKENS, NEW)
    for mask, given in ((qkv.Causal("start"), "end"), (qkv.Causal("end"), 3)):
        with pytest.raises(qkv.AmbiguityError, match="two statements"):
            rows.attention(QUERY[:, :, -1:], mask, q_offset=given)
    with pytest.raises(qkv.AmbiguityError, match="two statements"):
        rows.attention(QUERY[:, :, -NEW:], qkv.Causal("start"))
    for wrong in ("last", 1.5):
        with pytest.raises(qkv.ArgumentError, match="q_offset="):
            rows.attention(QUERY[:, :, -1:], qkv.Causal(), q_offset=wrong)


@pytest.mark.parametrize("library", ["torch", "jax"])
@pytest.mark.parametrize("kind", CACHES)
def test_arrays_of_other_libraries(kind: str, library: str) -> None:
    if library == "torch":
        convert: Any = pytest.importorskip("torch", reason="tensors").from_numpy
    else:
        convert = pytest.importorskip("jax.numpy", reason="JAX arrays").asarray
    query, key, value = (convert(x.astype(np.float32)) for x in (QUERY, KEY, VALUE))
    rows = CACHES[kind]().append(key, value)
    with pytest.raises(qkv.ShapeError, match=f"1 row and {TOKENS + NEW} rows were appended"):
        rows.attention(query[:, :, -1:], qkv.Causal())
    out = rows.attention(query[:, :, -1:], *VARIANTS, q_offset="end")
    assert type(out) is type(query)
    assert np.abs(np.asarray(out) - right(kind, TOKENS + NEW - 1, TOKENS + NEW)).max() < 1e-5


@pytest.mark.parametrize("kind", CACHES)
def test_int8_rows(kind: str) -> None:
    """The last of all queries that stand at the appended tokens."""
    rows = CACHES[kind](dtype="int8").append(KEY, VALUE)
    whole = rows.attention(QUERY, *VARIANTS)
    with pytest.raises(qkv.ShapeError, match=f"1 row and {TOKENS + NEW} rows were appended"):
        rows.attention(QUERY[:, :, -1:], *VARIANTS)
    last = rows.attention(QUERY[:, :, -1:], *VARIANTS, q_offset="end")
    assert np.abs(last - whole[:, :, -1:]).max() < 1e-12


def test_a_layer_of_torch() -> None:
    """The query of a layer has a row for each new token; the cache stays as it was if not."""
    torch = pytest.importorskip("torch", reason="the layer is torch's")
    from qkv.torch import Cache, MultiHeadAttention

    layer = MultiHeadAttention(16, 4, causal=True, rope=qkv.RoPE())
    tokens, cache = torch.zeros(1, 7, 16), Cache(8)
    with (
        torch.no_grad(),
        pytest.raises(qkv.ShapeError, match="query has 1 rows and key 7 new tokens"),
    ):
        layer(tokens[:, -1:], tokens, cache=cache)
    assert cache.length == 0


@pytest.mark.parametrize("kind", CACHES)
def test_lengths_of_the_caller_are_not_the_end(kind: str) -> None:
    """The query stands at the last token, whose window has none of the first three."""
    cache = CACHES[kind]()
    tokens = np.ones((1, 1, 3, 8), np.float32)
    cache.append(tokens, tokens)
    rows = cache.append(tokens, tokens)
    out = rows.attention(tokens, qkv.SlidingWindow(1, 0), qkv.KeyLengths(3))
    assert np.array_equal(out[0, 0].any(-1), [True, False, False])
