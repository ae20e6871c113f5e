"""The answer to a case from the definition: whole matrices, float64, one head at a time.

Nothing here reads the expressions or the checks that the program uses: positions, broadcasting,
grouping and masks are worked out again, each variant by its `naive`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.dense import Dense
from qkv.variants import Bias, Mask

Array = NDArray[Any]

__all__ = ["Truth", "truth"]


@dataclass(frozen=True, slots=True)
class Truth:
    """Dense results in float64: `out = (weights * factors) @ value`.

    Attributes
    ----------
    out : (..., num_heads, q_len, v_head_dim)
    lse : (..., num_heads, q_len)
    weights : (..., num_heads, q_len, kv_len)
        Before dropout.
    scores : (..., num_heads, q_len, kv_len)
        After all mods; -inf where a pair is forbidden.
    heads : tuple of Dense
        The matrices of each batch row and query head, in order.
    variants : tuple
        The variants of the call, bare arrays as `Mask` or `Bias`.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> from qkv.testing import truth
    >>> x = np.eye(2)[None]
    >>> truth(x, x, x, [qkv.Causal()]).allowed[0]
    array([[ True, False],
           [ True,  True]])
    """

    out: Array
    lse: Array
    weights: Array
    scores: Array
    heads: tuple[Dense, ...]
    variants: tuple[Any, ...]

    @property
    def allowed(self) -> Array:
        """Whether all masks allow each pair."""
        shape = self.scores.shape
        return np.array([dense.allowed for dense in self.heads], bool).reshape(shape)

    @property
    def factors(self) -> Array:
        """The dropout factors of the weights."""
        shape = self.scores.shape
        return np.array([dense.factors for dense in self.heads], float).reshape(shape)


def truth(
    query: Array,
    key: Array,
    value: Array,
    variants: Sequence[Any] = (),
    *,
    scale: float | None = None,
    q_offset: Any = None,
    kv_offset: Any = 0,
) -> Truth:
    """Attention by the definition, dense, in float64, one row of queries at a time.

        out[i] = sum_j w[i, j] v[j],   w[i, j] = exp(s[i, j] - lse[i])

    Parameters
    ----------
    query, key, value : array (..., heads, length, dim)
        Leading dimensions broadcast; read as float64. `layout="blhd"` is the caller's to undo.
    variants : sequence
        Objects with `naive`, or bare arrays.
    scale, q_offset, kv_offset
        As in `qkv.attention`. Nothing is refused: an alignment that was not stated is "start".

    Returns
    -------
    Truth

    Examples
    --------
    >>> import numpy as np
    >>> import qkv
    >>> x = np.eye(2)[None]
    >>> truth(x, x, x, [qkv.Causal()]).weights[0].round(3)
    array([[1.  , 0.  ],
           [0.33, 0.67]])
    """
    q, k, v = (np.asarray(a, np.float64) for a in (query, key, value))
    all_variants = tuple(_as_variant(variant) for variant in variants)
    batch_shape = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(a, (*batch_shape, *a.shape[-3:])) for a in (q, k, v))
    num_heads, q_len, kv_len = q.shape[-3], q.shape[-2], k.shape[-2]
    group_size = num_heads // max(k.shape[-3], 1)
    out = np.zeros((*batch_shape, num_heads, q_len, v.shape[-1]))
    lse = np.full(out.shape[:-1], -np.inf)
    weights = np.zeros((*out.shape[:-1], kv_len))
    scores = np.full(weights.shape, -np.inf)
    heads: list[Dense] = []
    for batch, index in enumerate(np.ndindex(*batch_shape)):
        start, align = _first_position(all_variants, q_offset, index, batch_shape, q_len, kv_len)
        kv_start = int(np.broadcast_to(kv_offset, batch_shape)[index])
        for head in range(num_heads):
            dense = Dense(
                query=q[(*index, head)],
                key=k[(*index, head // group_size)],
                value=v[(*index, head // group_size)],
                scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
                batch=batch,
                batch_index=index,
                head=head,
                num_heads=num_heads,
                q_pos=start + np.arange(q_len),
                kv_pos=kv_start + np.arange(kv_len),
                align=align,
            )
            _apply(dense, all_variants)
            where = (*index, head)
            scores[where] = np.where(dense.allowed, dense.scores, -np.inf)
            out[where], lse[where], weights[where] = _softmax(dense)
            heads.append(dense)
    return Truth(out, lse, weights, scores, tuple(heads), all_variants)


def _as_variant(variant: Any) -> Any:
    if isinstance(variant, np.ndarray):
        return Mask(variant) if variant.dtype == bool else Bias(variant)
    return variant


def _apply(dense: Dense, variants: Sequence[Any]) -> None:
    """Fill in scores, allowed pairs and factors."""
    # RoPE comes last, because segments restart the positions that it reads.
    for variant in sorted(variants, key=lambda v: type(v).__name__ == "RoPE"):
        if hasattr(variant, "naive_rows"):
            variant.naive_rows(dense)
    with np.errstate(all="ignore"):
        dense.scores = dense.products()
        for variant in variants:
            variant.naive(dense)


def _softmax(dense: Dense) -> tuple[Array, Array, Array]:
    """Output, lse and weights of one head, over the allowed keys of each row alone."""
    q_len, kv_len = dense.scores.shape
    out = np.zeros((q_len, dense.value.shape[1]))
    lse = np.full(q_len, -np.inf)
    weights = np.zeros((q_len, kv_len))
    with np.errstate(all="ignore"):
        for i in range(q_len):
            seen = np.flatnonzero(dense.allowed[i])
            terms = np.append(dense.scores[i, seen], dense.sink)
            peak = terms.max()
            if np.isneginf(peak):
                continue
            total = np.sum(np.exp(terms - peak))
            lse[i] = peak + np.log(total)
            # Not exp(s - lse), because lse has lost log(total) where scores are as large as -1e30.
            weights[i, seen] = np.exp(terms[:-1] - peak) / total
            dropped_weights = weights[i, seen] * dense.factors[i, seen]
            out[i] = np.sum(dropped_weights[:, None] * dense.value[seen], axis=0)
    return out, lse, weights


def _flattened(variants: Sequence[Any]) -> Iterator[Any]:
    """Variants, and those inside masks joined with |, & and ~."""
    for variant in variants:
        yield variant
        yield from _flattened(getattr(variant, "masks", ()))
        if hasattr(variant, "mask") and hasattr(variant.mask, "naive"):
            yield from _flattened((variant.mask,))


def _first_position(
    variants: Sequence[Any],
    q_offset: Any,
    index: tuple[int, ...],
    batch_shape: tuple[int, ...],
    q_len: int,
    kv_len: int,
) -> tuple[int, str | None]:
    """Position of query row 0, and the word if the statement was one."""
    requested = q_offset
    for variant in _flattened(variants):
        if getattr(variant, "align", None) is not None:
            requested = variant.align
    if requested is None:
        return 0, None
    if isinstance(requested, str):
        if requested == "start":
            return 0, requested
        lengths = [
            int(np.broadcast_to(variant.kv_lens, batch_shape)[index])
            for variant in _flattened(variants)
            if hasattr(variant, "kv_lens")
        ]
        return min([kv_len, *lengths]) - q_len, requested
    return int(np.broadcast_to(requested, batch_shape)[index]), None
