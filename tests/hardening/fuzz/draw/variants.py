"""Random variants: what is structure is drawn once, what is a value with every problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..problem import Variant  # noqa: TID252 - it has two names
from .memory import scattered
from .mods import CONSTANTS, random_tree
from .shape import Shape

Array = NDArray[Any]
Rng = np.random.Generator
Make: TypeAlias = Callable[[Shape, Rng], Variant]
"""A variant of a known structure with values for one problem."""
Kinds: TypeAlias = Sequence[Callable[[Rng, int], Make]]


def random_variants(rng: Rng, axes: int, decoding: bool) -> list[Make]:
    """Masks, scores and others in any order, for scores of so many leading axes.

    While decoding, only what depends on positions: other steps are calls of their own.
    """
    masks, scores = (POSITION_MASKS, POSITION_SCORES) if decoding else (MASKS, SCORES)
    once = (_rope, _sinks, _dropout) if decoding else (_segments, _rope, _sinks, _dropout)
    made = [
        *(masks[int(i)](rng, axes) for i in rng.integers(len(masks), size=rng.choice(COUNTS))),
        *(scores[int(i)](rng, axes) for i in rng.integers(len(scores), size=rng.choice(COUNTS))),
        *(kind(rng, axes) for kind in once if rng.random() < 0.12),
    ]
    last = [_forbidding(rng)] if rng.random() < 0.1 else []
    return [*(made[i] for i in rng.permutation(len(made))), *last]


COUNTS = (0, 0, 0, 1, 1, 1, 2, 3)


def variant(name: str, **fields: Any) -> Variant:
    """A variant whose values are the same in every draw."""
    return Variant(name, fields)


def _often(rng: Rng) -> bool:
    return bool(rng.random() < 0.5)


# Masks


def _causal(rng: Rng, axes: int) -> Make:
    return lambda s, r: variant("Causal")


def _window(rng: Rng, axes: int) -> Make:
    left, right = ((True, True), (True, False), (False, True))[int(rng.integers(3))]

    def make(s: Shape, r: Rng) -> Variant:
        a, b = (int(n) for n in r.integers(0, max(2, s.kv_len // 2), 2))
        return variant("SlidingWindow", left=a if left else None, right=b if right else None)

    return make


def _key_lengths(rng: Rng, axes: int) -> Make:
    """Often nothing at all, or everything."""
    each = _often(rng)

    def make(s: Shape, r: Rng) -> Variant:
        lens = r.integers(0, s.kv_len + 1, s.batch_shape if each else ())
        lens = np.where(r.random(lens.shape) < 0.2, r.choice([0, s.kv_len]), lens)
        return variant("KeyLengths", kv_lens=lens)

    return make


def _prefix(rng: Rng, axes: int) -> Make:
    each = _often(rng)
    return lambda s, r: variant(
        "Prefix", length=r.integers(0, s.kv_len + 2, s.batch_shape if each else ())
    )


def _global_tokens(rng: Rng, axes: int) -> Make:
    return lambda s, r: variant(
        "GlobalTokens", positions=r.integers(0, s.kv_len + 2, int(r.integers(1, 5)))
    )


def _strided(rng: Rng, axes: int) -> Make:
    return lambda s, r: variant("Strided", stride=int(r.integers(1, 9)))


def _block_sparse(rng: Rng, axes: int) -> Make:
    block_q, block_kv = (int(rng.choice([1, 3, 16])) for _ in range(2))
    own = rng.random(axes + 1) < 0.5

    def make(s: Shape, r: Rng) -> Variant:
        lead = (*s.batch_shape, s.num_heads)
        blocks = -(-s.q_len // block_q), -(-s.kv_len // block_kv)
        size = (*(n if o else 1 for n, o in zip(lead, own, strict=True)), *blocks)
        mask = scattered(r.random(size) < 0.6, r)
        return variant("BlockSparse", mask=mask, block_q=block_q, block_kv=block_kv)

    return make


def _random_blocks(rng: Rng, axes: int) -> Make:
    size, causal = int(rng.choice([1, 3, 16])), _often(rng)
    return lambda s, r: variant(
        "RandomBlocks",
        block_size=size,
        num_random_blocks=int(r.integers(5)),
        seed=int(r.integers(2**63)),
        causal=causal,
    )


def _extent(rng: Rng, axes: int) -> Callable[[Shape], tuple[int, ...]]:
    """Which axes of the scores an array has; leading ones that it lacks may be left out."""
    own = rng.random(axes + 3) < [*[0.3] * axes, 0.4, 0.8, 0.8]
    short = _often(rng)

    def extent(s: Shape) -> tuple[int, ...]:
        sizes = tuple(n if o else 1 for n, o in zip(s.scores, own, strict=True))
        first = int(np.argmax(own)) if own.any() else len(own) - 1
        return sizes[first:] if short else sizes

    return extent


def _mask_of_draws(rng: Rng, axes: int) -> Make:
    extent, bare = _extent(rng, axes), _often(rng)

    def make(s: Shape, r: Rng) -> Variant:
        mask = r.random((s.draws, *extent(s))) < r.choice([0.05, 0.5, 0.95])
        return Variant("array" if bare else "Mask", {"array": scattered(mask, r, draws=True)}, True)

    return make


def _mask(rng: Rng, axes: int) -> Make:
    extent = _extent(rng, axes)
    return lambda s, r: variant(
        "Mask", array=scattered(r.random(extent(s)) < r.choice([0.05, 0.5, 0.95]), r)
    )


def _any(rng: Rng, axes: int) -> Make:
    a, b = (_leaf(rng)(rng, axes) for _ in range(2))
    return lambda s, r: variant("AnyOf", masks=(a(s, r), b(s, r)))


def _all(rng: Rng, axes: int) -> Make:
    a, b = (_leaf(rng)(rng, axes) for _ in range(2))
    return lambda s, r: variant("AllOf", masks=(a(s, r), b(s, r)))


def _not(rng: Rng, axes: int) -> Make:
    a = _leaf(rng)(rng, axes)
    return lambda s, r: variant("Not", mask=a(s, r))


def _prefix_lm(rng: Rng, axes: int) -> Make:
    prefix = _prefix(rng, axes)
    return lambda s, r: variant("AnyOf", masks=(variant("Causal"), prefix(s, r)))


def _longformer(rng: Rng, axes: int) -> Make:
    window, tokens = _window(rng, axes), _global_tokens(rng, axes)
    return lambda s, r: variant("AnyOf", masks=(window(s, r), tokens(s, r)))


def _leaf(rng: Rng) -> Callable[[Rng, int], Make]:
    return LEAVES[int(rng.integers(len(LEAVES)))]


# Scores


def _bias(rng: Rng, axes: int) -> Make:
    """A bias, which may have some entries of -inf."""
    extent = _extent(rng, axes)
    kinds = (np.float16, ml_dtypes.bfloat16, np.float32, np.float32, np.float64)
    dtype = np.dtype(kinds[int(rng.integers(len(kinds)))])
    bare = _often(rng)

    def make(s: Shape, r: Rng) -> Variant:
        bias = r.normal(size=(s.draws, *extent(s)))
        if r.random() < 0.4:
            bias[r.random(bias.shape) < r.choice([0.1, 0.9])] = -np.inf
        array = scattered(bias.astype(dtype), r, draws=True)
        return Variant("array" if bare else "Bias", {"array": array}, True)

    return make


def _alibi(rng: Rng, axes: int) -> Make:
    """Slopes whose products with distances are exact in any type of computation."""
    which = int(rng.integers(3))

    def make(s: Shape, r: Rng) -> Variant:
        each = scattered(r.integers(0, 32, s.num_heads) / 64, r)
        return variant("ALiBi", slopes=(None, int(r.integers(32)) / 64, each)[which])

    return make


def _relative_bias(rng: Rng, axes: int) -> Make:
    two_sided = _often(rng)

    def make(s: Shape, r: Rng) -> Variant:
        table = scattered(r.normal(size=(int(r.integers(2, 17)) * 2, s.num_heads)), r)
        far = int(r.integers(33, 150))
        return variant("RelativeBias", table=table, bidirectional=two_sided, max_distance=far)

    return make


def _softcap(rng: Rng, axes: int) -> Make:
    return lambda s, r: variant("Softcap", cap=float(r.uniform(0.5, 30.0)))


def _score_mod(rng: Rng, axes: int, forbids: bool = False) -> Make:
    tree = random_tree(rng, forbids)
    return lambda s, r: variant("ScoreMod", tree=tree, constants=r.uniform(0.25, 1.0, CONSTANTS))


def _forbidding(rng: Rng) -> Make:
    """A score of -inf for some pairs; what follows it could bring them back."""
    return _score_mod(rng, 0, forbids=True)


# Said once


def _segments(rng: Rng, axes: int) -> Make:
    """Sorted as packed rows are, or in any order."""
    each, ordered = _often(rng), _often(rng)

    def make(s: Shape, r: Rng) -> Variant:
        lead = s.batch_shape if each else ()

        def ids(length: int) -> Array:
            found = r.integers(0, int(r.integers(1, 6)), (*lead, length))
            return np.sort(found, axis=-1) if ordered else found

        return variant("Segments", q_ids=ids(s.q_len), kv_ids=ids(s.kv_len))

    return make


def _rope(rng: Rng, axes: int) -> Make:
    halves, whole, given = _often(rng), _often(rng), _often(rng)

    def make(s: Shape, r: Rng) -> Variant:
        pairs = s.head_dim // 2 if whole else int(r.integers(0, s.head_dim // 2 + 1))
        return variant(
            "RoPE",
            layout="half_split" if halves else "interleaved",
            rotary_dim=2 * pairs,
            inv_freq=r.random(pairs) if given else None,
            attention_factor=float(r.choice([1.0, 1.0, 0.75])),
        )

    return make


def _sinks(rng: Rng, axes: int) -> Make:
    each = _often(rng)
    return lambda s, r: variant("Sinks", values=2 * r.normal(size=s.num_heads if each else ()))


def _dropout(rng: Rng, axes: int) -> Make:
    return lambda s, r: variant(
        "Dropout", p=float(r.choice([0.0, 0.1, 0.5, 0.9])), seed=int(r.integers(2**63)) * 2
    )


LEAVES: Kinds = (
    _causal, _window, _key_lengths, _prefix, _global_tokens, _strided, _block_sparse,
    _random_blocks, _mask,
)  # fmt: skip
MASKS: Kinds = (
    *LEAVES[:-1], _mask_of_draws, _causal, _window, _mask_of_draws, _any, _all, _not, _prefix_lm,
    _longformer,
)  # fmt: skip
SCORES: Kinds = (_bias, _bias, _alibi, _relative_bias, _softcap, _score_mod, _score_mod)
POSITION_MASKS: Kinds = (
    _causal, _causal, _window, _window, _key_lengths, _prefix, _global_tokens, _strided,
    _prefix_lm, _longformer,
)  # fmt: skip
POSITION_SCORES: Kinds = (_alibi, _relative_bias, _softcap, _score_mod)
