"""Random variants: what is structure is drawn once, what is a value with every problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fuzz.memory import scattered
from fuzz.mods import random_mod
from qkv.problem.builder import Shape
from qkv.variants import (
    ALiBi,
    Bias,
    BlockSparse,
    Causal,
    Dropout,
    GlobalTokens,
    KeyLengths,
    Mask,
    Prefix,
    RandomBlocks,
    RelativeBias,
    RoPE,
    Segments,
    Sinks,
    SlidingWindow,
    Softcap,
    Strided,
)

Array = NDArray[Any]
Rng = np.random.Generator
Make: TypeAlias = Callable[[Shape, Rng], Any]
"""A variant of a known structure with values for one problem."""


def random_masks(rng: Rng, axes: int) -> list[Make]:
    """Up to three masks for scores of so many leading axes."""
    count = int(rng.choice([0, 0, 1, 1, 1, 2, 3]))
    return [MASKS[int(i)](rng, axes) for i in rng.integers(len(MASKS), size=count)]


def random_scores(rng: Rng, axes: int) -> list[Make]:
    """Up to three score variants."""
    count = int(rng.choice([0, 0, 0, 1, 1, 2, 3]))
    return [SCORES[int(i)](rng, axes) for i in rng.integers(len(SCORES), size=count)]


def random_others(rng: Rng, axes: int) -> list[Make]:
    """Some of those that can be said only once."""
    return [kind(rng, axes) for kind in ONCE if rng.random() < 0.12]


def _often(rng: Rng) -> bool:
    return bool(rng.random() < 0.5)


# Masks


def _causal(rng: Rng, axes: int) -> Make:
    return lambda s, r: Causal()


def _window(rng: Rng, axes: int) -> Make:
    left, right = ((True, True), (True, False), (False, True))[int(rng.integers(3))]

    def make(s: Shape, r: Rng) -> SlidingWindow:
        a, b = (int(n) for n in r.integers(0, max(2, s.kv_len // 2), 2))
        return SlidingWindow(a if left else None, b if right else None)

    return make


def _key_lengths(rng: Rng, axes: int) -> Make:
    """Often nothing at all, or everything."""
    each = _often(rng)

    def make(s: Shape, r: Rng) -> KeyLengths:
        lens = r.integers(0, s.kv_len + 1, s.batch_shape if each else ())
        return KeyLengths(np.where(r.random(lens.shape) < 0.2, r.choice([0, s.kv_len]), lens))

    return make


def _prefix(rng: Rng, axes: int) -> Make:
    each = _often(rng)
    return lambda s, r: Prefix(r.integers(0, s.kv_len + 2, s.batch_shape if each else ()))


def _global_tokens(rng: Rng, axes: int) -> Make:
    return lambda s, r: GlobalTokens(r.integers(0, s.kv_len + 2, int(r.integers(1, 5))))


def _strided(rng: Rng, axes: int) -> Make:
    return lambda s, r: Strided(int(r.integers(1, 9)))


def _block_sparse(rng: Rng, axes: int) -> Make:
    block_q, block_kv = (int(rng.choice([1, 3, 16])) for _ in range(2))
    own = rng.random(axes + 1) < 0.5

    def make(s: Shape, r: Rng) -> BlockSparse:
        lead = (*s.batch_shape, s.num_heads)
        blocks = -(-s.q_len // block_q), -(-s.kv_len // block_kv)
        size = (*(n if o else 1 for n, o in zip(lead, own, strict=True)), *blocks)
        return BlockSparse(scattered(r.random(size) < 0.6, r), block_q, block_kv)

    return make


def _random_blocks(rng: Rng, axes: int) -> Make:
    size, causal = int(rng.choice([1, 3, 16])), _often(rng)
    return lambda s, r: RandomBlocks(size, int(r.integers(5)), int(r.integers(2**63)), causal)


def _extent(rng: Rng, axes: int) -> Callable[[Shape], tuple[int, ...]]:
    """Which axes of the scores an array has; leading ones that it lacks may be left out."""
    own = rng.random(axes + 3) < [*[0.3] * axes, 0.4, 0.8, 0.8]
    short = _often(rng)

    def extent(s: Shape) -> tuple[int, ...]:
        sizes = tuple(n if o else 1 for n, o in zip(s.scores, own, strict=True))
        first = int(np.argmax(own)) if own.any() else len(own) - 1
        return sizes[first:] if short else sizes

    return extent


def _dense(rng: Rng, axes: int) -> Make:
    extent = _extent(rng, axes)
    bare = _often(rng)

    def make(s: Shape, r: Rng) -> Any:
        array = scattered(r.random(extent(s)) < r.choice([0.05, 0.5, 0.95]), r)
        return array if bare else Mask(array)

    return make


def _any(rng: Rng, axes: int) -> Make:
    a, b = (_leaf(rng)(rng, axes) for _ in range(2))
    return lambda s, r: _as_mask(a(s, r)) | b(s, r)


def _all(rng: Rng, axes: int) -> Make:
    a, b = (_leaf(rng)(rng, axes) for _ in range(2))
    return lambda s, r: _as_mask(a(s, r)) & b(s, r)


def _not(rng: Rng, axes: int) -> Make:
    a = _leaf(rng)(rng, axes)
    return lambda s, r: ~_as_mask(a(s, r))


def _prefix_lm(rng: Rng, axes: int) -> Make:
    prefix = _prefix(rng, axes)
    return lambda s, r: Causal() | prefix(s, r)


def _longformer(rng: Rng, axes: int) -> Make:
    window, tokens = _window(rng, axes), _global_tokens(rng, axes)
    return lambda s, r: window(s, r) | tokens(s, r)


def _leaf(rng: Rng) -> Callable[[Rng, int], Make]:
    return LEAVES[int(rng.integers(len(LEAVES)))]


def _as_mask(mask: Any) -> Any:
    return Mask(mask) if isinstance(mask, np.ndarray) else mask


# Scores


def _bias(rng: Rng, axes: int) -> Make:
    """With a few entries of -inf, or of a large finite number where that keeps its digits."""
    extent = _extent(rng, axes)
    kinds = (np.float16, ml_dtypes.bfloat16, np.float32, np.float32, np.float64)
    dtype = np.dtype(kinds[int(rng.integers(len(kinds)))])
    bare = _often(rng)

    def make(s: Shape, r: Rng) -> Any:
        bias = r.normal(size=extent(s))
        if r.random() < 0.4:
            bias[r.random(bias.shape) < r.choice([0.1, 0.9])] = -np.inf
        array = scattered(bias.astype(dtype), r)
        return array if bare else Bias(array)

    return make


def _alibi(rng: Rng, axes: int) -> Make:
    """Slopes whose products with distances are exact in any type of computation."""
    which = int(rng.integers(3))
    return lambda s, r: (
        ALiBi(),
        ALiBi(int(r.integers(32)) / 64),
        ALiBi(scattered(r.integers(0, 32, s.num_heads) / 64, r)),
    )[which]


def _relative_bias(rng: Rng, axes: int) -> Make:
    two_sided = _often(rng)

    def make(s: Shape, r: Rng) -> RelativeBias:
        table = scattered(r.normal(size=(int(r.integers(2, 17)) * 2, s.num_heads)), r)
        return RelativeBias(table, bidirectional=two_sided, max_distance=int(r.integers(33, 150)))

    return make


def _softcap(rng: Rng, axes: int) -> Make:
    return lambda s, r: Softcap(float(r.uniform(0.5, 30.0)))


def _score_mod(rng: Rng, axes: int) -> Make:
    make = random_mod(rng)
    return lambda s, r: make(r)


def forbidding(rng: Rng) -> Make:
    """A score of -inf for some pairs; what follows it could bring them back."""
    make = random_mod(rng, forbids=True)
    return lambda s, r: make(r)


# Said once


def _segments(rng: Rng, axes: int) -> Make:
    """Sorted as packed rows are, or in any order."""
    each, ordered = _often(rng), _often(rng)

    def make(s: Shape, r: Rng) -> Segments:
        lead = s.batch_shape if each else ()

        def ids(length: int) -> Array:
            found = r.integers(0, int(r.integers(1, 6)), (*lead, length))
            return np.sort(found, axis=-1) if ordered else found

        return Segments(ids(s.q_len), ids(s.kv_len))

    return make


def _rope(rng: Rng, axes: int) -> Make:
    halves, whole, given = _often(rng), _often(rng), _often(rng)

    def make(s: Shape, r: Rng) -> RoPE:
        pairs = s.head_dim // 2 if whole else int(r.integers(0, s.head_dim // 2 + 1))
        return RoPE(
            layout="half_split" if halves else "interleaved",
            rotary_dim=2 * pairs,
            inv_freq=r.random(pairs) if given else None,
        )

    return make


def _sinks(rng: Rng, axes: int) -> Make:
    each = _often(rng)
    return lambda s, r: Sinks(2.0 * r.normal(size=s.num_heads if each else ()))


def _dropout(rng: Rng, axes: int) -> Make:
    return lambda s, r: Dropout(float(r.choice([0.0, 0.1, 0.5, 0.9])), int(r.integers(2**63)) * 2)


Kinds: TypeAlias = Sequence[Callable[[Rng, int], Make]]

LEAVES: Kinds = (
    _causal, _window, _key_lengths, _prefix, _global_tokens, _strided, _block_sparse,
    _random_blocks, _dense,
)  # fmt: skip
MASKS: Kinds = (*LEAVES, _causal, _window, _dense, _any, _all, _not, _prefix_lm, _longformer)
SCORES: Kinds = (_bias, _bias, _alibi, _relative_bias, _softcap, _score_mod, _score_mod)
ONCE: Kinds = (_segments, _rope, _sinks, _dropout)
