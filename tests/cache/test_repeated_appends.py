"""Tokens that are like those before are not checked again: what is unlike them still is."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import qkv
import qkv.cache
from qkv.errors import QkvError

torch = pytest.importorskip("torch")
forward_ad = pytest.importorskip("torch.autograd.forward_ad")

HEADS, DIM, STEPS = 2, 8, 6
KINDS: dict[str, Callable[..., Any]] = {
    "contiguous": qkv.cache.ContiguousCache,
    "paged": lambda **more: qkv.cache.PagedCache(4, **more),
    "rolling": lambda **more: qkv.cache.RollingCache(7, **more),
    "sinks": lambda **more: qkv.cache.RollingCache(5, 2, **more),
}
caches = pytest.mark.parametrize("kind", KINDS)


def drawn(seed: int, tokens: int = 1, dtype: Any = torch.float32) -> Any:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((2, HEADS, tokens, DIM))).to(dtype)


def repeated(kind: str, dtype: Any = torch.float32, library: str = "torch") -> Any:
    """A cache to which alike tokens have been appended."""
    cache = KINDS[kind]()
    for n in range(STEPS):
        key, value = drawn(n, dtype=dtype), drawn(n + 100, dtype=dtype)
        if library == "numpy":
            key, value = key.numpy(), value.numpy()
        cache.append(key, value)
    return cache


def unlike() -> dict[str, tuple[Any, Any]]:
    """Tokens that a cache of float32 refuses."""
    key = drawn(0)
    freed = drawn(1)
    freed.untyped_storage().resize_(0)
    return {
        "dtype": (key.double(), key.double()),
        "dtype of value": (key, key.half()),
        "heads": (key[:, :1], key[:, :1]),
        "dim": (key, key[..., :4]),
        "batch": (key[:1], key[:1]),
        "tokens": (key, drawn(0, 2)),
        "library": (key.numpy(), key.numpy()),
        "library of value": (key, key.numpy()),
        "device": (key.to("meta"), key.to("meta")),
        "sparse": (key.to_sparse(), key),
        "gradient": (key.clone().requires_grad_(), key),
        "freed": (key, freed),
    }


@caches
@pytest.mark.parametrize("what", unlike())
def test_unlike_tokens_are_refused_after_alike_ones(kind: str, what: str) -> None:
    key, value = unlike()[what]
    cache = repeated(kind)
    before = cache.lengths
    with pytest.raises(QkvError):
        cache.append(key, value)
    np.testing.assert_array_equal(cache.lengths, before)


@caches
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
def test_tokens_that_torch_transforms_are_refused(kind: str) -> None:
    cache, key = repeated(kind), drawn(0)

    def appended(rows: Any) -> Any:
        cache.append(rows, key)
        return rows

    with pytest.raises(QkvError):
        torch.func.grad(lambda rows: appended(rows).sum())(key)
    with forward_ad.dual_level(), pytest.raises(QkvError):
        cache.append(forward_ad.make_dual(key, key), key)
    with pytest.raises(QkvError):
        torch.vmap(appended)(key[None])


@caches
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_steps_are_those_of_the_joined_tokens(kind: str, dtype: str) -> None:
    of_torch = getattr(torch, dtype)
    cache, keys, values = KINDS[kind](), [], []
    for n in range(3 * STEPS):
        tokens = 2 if n % 7 == 5 else 1
        key, value, query = (drawn(seed + n, tokens, of_torch) for seed in (0, 100, 200))
        if n % 5 == 4:  # Other strides, the same numbers.
            key = key.mT.contiguous().mT
        keys.append(key)
        values.append(value)
        out = cache.append(key, value).attention(query, qkv.Causal())
        masks = () if kind in ("contiguous", "paged") else (cache_mask(cache),)
        joined = torch.cat(keys, 2), torch.cat(values, 2)
        expected = qkv.attention(query, *joined, qkv.Causal("end"), *masks)
        tolerance = 1e-2 if dtype.endswith("16") else 1e-5
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def cache_mask(cache: qkv.cache.RollingCache) -> Any:
    return qkv.SlidingWindow(cache.window - 1, None) | qkv.Prefix(cache.sinks)


@caches
def test_tokens_are_written_where_tensors_have_moved_to(kind: str) -> None:
    cache = repeated(kind)
    for array in stored_tensors(cache):
        array.share_memory_()
    query = drawn(300)
    moved = cache.append(drawn(50), drawn(150)).attention(query)
    other = repeated(kind)
    expected = other.append(drawn(50), drawn(150)).attention(query)
    torch.testing.assert_close(moved, expected, atol=0, rtol=0)


def stored_tensors(cache: Any) -> list[Any]:
    tensors: list[Any] = []
    for part in cache.read().parts:
        both = part.key, part.value
        tensors += [rows.pages if isinstance(rows, qkv.Paged) else rows for rows in both]
    return tensors


@caches
def test_copies_of_caches_and_rows_have_memory_of_their_own(kind: str) -> None:
    cache, query = repeated(kind), drawn(300)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache.fork()]
    rows = cache.append(drawn(50), drawn(150))
    expected = rows.attention(query)
    for other in copies:
        out = other.append(drawn(50), drawn(150)).attention(query)
        torch.testing.assert_close(out, expected, atol=0, rtol=0)
    for same in (copy.copy(rows), copy.deepcopy(rows)):
        torch.testing.assert_close(same.attention(query), expected, atol=0, rtol=0)


def test_a_part_with_other_keys_is_attended_to() -> None:
    rows, query = repeated("contiguous").append(drawn(50), drawn(150)), drawn(300)
    part = replace(rows.parts[0], key=2 * rows.key)
    expected = qkv.attention(query, 2 * rows.key, rows.value)
    torch.testing.assert_close(replace(rows, parts=(part,)).attention(query), expected)


def test_gradients_of_queries_pass_through_steps() -> None:
    rows = repeated("contiguous").append(drawn(50), drawn(150))
    query = drawn(300).requires_grad_()
    rows.attention(query).sum().backward()
    twin = drawn(300).requires_grad_()
    torch.nn.functional.scaled_dot_product_attention(twin, rows.key, rows.value).sum().backward()
    torch.testing.assert_close(query.grad, twin.grad)
    batched = torch.vmap(rows.attention)(torch.stack([drawn(300), drawn(301)]))
    torch.testing.assert_close(batched[1], rows.attention(drawn(301)))


def test_numpy_tokens_are_checked_like_tensors() -> None:
    cache, token = repeated("contiguous", library="numpy"), drawn(0).numpy()
    for key in (token.astype(np.float64), token[:, :1], torch.from_numpy(token), None):
        with pytest.raises((QkvError, TypeError)):
            cache.append(key, token)
    masked = np.ma.masked_array(token, token > 0)
    with pytest.raises(QkvError):
        cache.append(masked, token)


@caches
def test_imaginary_parts_that_torch_has_not_negated_yet(kind: str) -> None:
    """The imaginary part of a conjugate is a view that NumPy cannot have."""
    cache, plain = KINDS[kind](), KINDS[kind]()
    for n in range(STEPS):
        key = torch.complex(drawn(n), drawn(n + 100)).conj().imag
        assert key.is_neg()
        value = torch.complex(drawn(n), drawn(n + 200)).conj().imag
        rows, expected = cache.append(key, value), plain.append(key.clone(), value.clone())
        assert torch.equal(rows.attention(key), expected.attention(key.clone()))


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("dtype", [None, "int8"])
@caches
def test_a_token_for_each_of_many_sequences(kind, dtype, library) -> None:
    """Twelve sequences of several lengths, of which some get no token in a step."""
    rng = np.random.default_rng(7)
    whole = rng.uniform(-1, 1, (12, HEADS, 40, DIM)).astype(np.float32)
    cache, lens = KINDS[kind](dtype=dtype), rng.integers(1, 9, 12)
    cache.append(library(whole[:, :, :8]), library(-whole[:, :, :8]), lens)
    for _ in range(20):
        counts = rng.integers(0, 2, 12)
        token = library(whole[np.arange(12), :, lens][:, :, None])
        rows = cache.append(token, -token, counts)
        lens += counts
        query = rng.standard_normal((12, HEADS, 1, DIM)).astype(np.float32)
        found = np.asarray(rows.attention(library(query)))
        for b in np.flatnonzero(counts):
            seen = np.ones(lens[b], bool)
            if kind in ("rolling", "sinks"):
                seen[: -7 if kind == "rolling" else -5] = False
                seen[: 0 if kind == "rolling" else 2] = True
            key = whole[b, :, : lens[b]][:, seen].astype(np.float64)
            weights = np.exp(key @ query[b].swapaxes(-1, -2) / np.sqrt(DIM))[..., 0]
            expected = -(weights[:, None] @ key)[:, 0] / weights.sum(-1, keepdims=True)
            np.testing.assert_allclose(found[b, :, 0], expected, atol=0.02 if dtype else 2e-6)
