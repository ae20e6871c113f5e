"""Attention from its definition, in float64: whole matrices, all draws at once.

    s = scale R(q) . R(k), then the score variants in their order; -inf where a mask forbids
    w = exp(s - lse),  lse = log(sum exp(s) + exp(sink)),  out = (w f) v

Written after docs/semantics.md and the papers. Nothing here is the library's, nor reads its
objects: a problem is arrays, numbers and names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..draw.mods import derivative, evaluate  # noqa: TID252 - it has two names
from ..problem import Variant  # noqa: TID252 - it has two names
from .masks import Masks
from .published import alibi_slopes, philox, t5_bucket

Array = NDArray[Any]

__all__ = ["Oracle", "ScoreVariant", "by_head", "summed"]


class ScoreVariant(NamedTuple):
    """A score variant: new scores, their derivative by the scores before, and by its own array.

    `of_own(scores, grad)` turns cotangents of new scores into the gradient of the variant's array,
    in its shape; `along(tangent)` turns a tangent of that array into one of the new scores.
    """

    variant: Variant
    new: Callable[[Array], Array]
    slope: Callable[[Array], Array]
    of_own: Callable[[Array, Array], Array] | None = None
    along: Callable[[Array], Array] | None = None


class Oracle(Masks):
    """What a problem means, and its answer."""

    # Scores

    @cached_property
    def mods(self) -> list[ScoreVariant]:
        """The score variants, in their order."""
        made = {
            "array": self._bias, "Bias": self._bias, "ALiBi": self._alibi,
            "RelativeBias": self._relative_bias, "Softcap": self._softcap,
            "ScoreMod": self._score_mod,
        }  # fmt: skip
        found = [v for v in self.variants if v.name in made]
        return [
            made[v.name](v) for v in found if v.name != "array" or v.fields["array"].dtype != bool
        ]

    def _bias(self, v: Variant) -> ScoreVariant:
        array = np.asarray(v.fields["array"])
        bias = self.over_scores(v, array).astype(np.float64)
        bias = np.where(np.isneginf(bias), 0.0, bias)
        return ScoreVariant(
            v,
            lambda s: s + bias.astype(s.dtype),
            lambda s: np.ones(()),
            lambda s, grad: summed(grad, bias.shape).reshape(array.shape),
            lambda tangent: self.over_scores(v, tangent),
        )

    def _alibi(self, v: Variant) -> ScoreVariant:
        slopes = v.fields["slopes"]
        slopes = alibi_slopes(self.num_heads) if slopes is None else slopes
        shape = np.shape(slopes)
        each = np.broadcast_to(np.asarray(slopes, float), self.num_heads)[:, None, None]
        far = np.abs(self.distance)

        def of_own(s: Array, grad: Array) -> Array:
            found = by_head(-grad * far)
            return found if shape else found.sum(axis=1)

        return ScoreVariant(
            v, lambda s: s - (each * far).astype(s.dtype), lambda s: np.ones(()),
            None if v.fields["slopes"] is None else of_own,
        )  # fmt: skip

    def _relative_bias(self, v: Variant) -> ScoreVariant:
        table = np.asarray(v.fields["table"], np.float64)
        bucket = t5_bucket(
            -self.distance, len(table), v.fields["bidirectional"], v.fields["max_distance"]
        )
        heads = np.arange(self.num_heads)[:, None, None]
        bias = table[bucket, heads]

        def of_own(s: Array, grad: Array) -> Array:
            full = np.broadcast_to(bucket, (*grad.shape[:-3], self.num_heads, *grad.shape[-2:]))
            found = np.zeros((len(grad), *table.shape))
            for draw, (where, g) in enumerate(zip(full, grad, strict=True)):
                np.add.at(found[draw], (where, np.broadcast_to(heads, where.shape)), g)
            return found

        return ScoreVariant(v, lambda s: s + bias.astype(s.dtype), lambda s: np.ones(()), of_own)

    def _softcap(self, v: Variant) -> ScoreVariant:
        cap = v.fields["cap"]
        return ScoreVariant(
            v,
            lambda s: cap * np.tanh(s.astype(float) / cap),
            lambda s: 1 - np.tanh(s / cap) ** 2,
            lambda s, grad: by_head(
                grad * (np.tanh(s / cap) - s / cap * (1 - np.tanh(s / cap) ** 2))
            ).sum(axis=1),
        )

    def _score_mod(self, v: Variant) -> ScoreVariant:
        flat = np.arange(int(np.prod(self.batch_shape))).reshape(self.batch_shape)
        places = (
            flat.reshape(1, *self.batch_shape, 1, 1, 1),
            np.arange(self.num_heads)[:, None, None],
            *self.positions,
        )
        tree, constants = v.fields["tree"], v.fields["constants"]

        def slope(s: Array) -> Array:
            return np.broadcast_to(derivative(tree, constants, s, *places)[1], s.shape)

        return ScoreVariant(v, lambda s: evaluate(tree, constants, s, *places), slope)

    # Answers

    @cached_property
    def steps(self) -> list[Array]:
        """Scores before the first variant, after it, and so on."""
        with np.errstate(all="ignore"):
            found = [self.scale * (self.query @ self.key.swapaxes(-1, -2))]
            shape = np.broadcast_shapes(
                found[0].shape, (self.problem.draws, *self.batch_shape, 1, 1, 1)
            )
            found = [np.broadcast_to(found[0], shape)]
            for mod in self.mods:
                found.append(mod.new(found[-1]))
        return found

    @cached_property
    def scores(self) -> Array:
        """The scores after all variants; -inf where a pair is forbidden."""
        return np.where(self.masked, self.steps[-1], -np.inf)

    @cached_property
    def allowed(self) -> Array:
        """Where a pair counts."""
        return ~np.isneginf(self.scores)

    @cached_property
    def sink(self) -> Array:
        """(num_heads, 1); -inf if there is none."""
        values: Any = [-np.inf]
        for v in self.all_named("Sinks"):
            values = v.fields["values"]
        return np.broadcast_to(np.asarray(values, float).reshape(-1), self.num_heads)[:, None]

    @cached_property
    def factors(self) -> Array:
        """The factors of dropout."""
        found = np.ones(())
        for v in self.all_named("Dropout"):
            batch = np.arange(int(np.prod(self.batch_shape))).reshape(*self.batch_shape, 1, 1, 1)
            heads, rows = np.arange(self.num_heads)[:, None, None], np.arange(self.q_len)[:, None]
            word = philox((np.arange(self.kv_len), rows, heads, batch), v.fields["seed"])
            found = np.where(word >= v.fields["p"] * 2.0**32, 1 / (1 - v.fields["p"]), 0.0)
        return found

    @cached_property
    def _softmax(self) -> tuple[Array, Array]:
        with np.errstate(all="ignore"):
            peak = np.maximum(self.scores.max(axis=-1, initial=-np.inf), self.sink)
            shift = np.where(np.isneginf(peak), 0.0, peak)
            terms = np.exp(self.scores - shift[..., None])
            total = terms.sum(axis=-1) + np.exp(self.sink - shift)
            # Not exp(s - lse): lse has lost log(total) where scores are large.
            return terms / np.where(total == 0, 1.0, total)[..., None], shift + np.log(total)

    @property
    def weights(self) -> Array:
        """The weights before dropout."""
        return self._softmax[0]

    @property
    def lse(self) -> Array:
        """-inf in a row without keys or sink."""
        return self._softmax[1]

    @cached_property
    def out(self) -> Array:
        """(draws, *batch_shape, num_heads, q_len, v_head_dim)."""
        return (self.weights * self.factors) @ self.value


def summed(array: Array, shape: tuple[int, ...]) -> Array:
    """Summed over the axes that were broadcast from a shape, but for draws."""
    axes = tuple(n for n, size in enumerate(shape) if n and size == 1 != array.shape[n])
    return np.asarray(array.sum(axis=axes, keepdims=True))


def by_head(array: Array) -> Array:
    """`(draws, num_heads)`: the sums of an array of scores."""
    kept = array.sum(axis=(-2, -1))
    return np.asarray(kept.sum(axis=tuple(range(1, kept.ndim - 1))))
