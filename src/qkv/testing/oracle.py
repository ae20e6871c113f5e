"""The answer to a case from the definition: whole matrices, float64, one head at a time.

Nothing here reads the expressions or the checks that the program uses: positions, broadcasting,
grouping and masks are worked out again, each variant by its `naive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.dense import Dense

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Truth:
    """Dense results in float64: out, lse, weights before dropout, and scores (-inf: forbidden)."""

    out: Array
    lse: Array
    weights: Array
    scores: Array


def truth(
    query: Array,
    key: Array,
    value: Array,
    variants: Sequence[Any],
    *,
    scale: float | None = None,
    q_offset: Any = None,
    kv_offset: Any = 0,
) -> Truth:
    """Attention as `semantics.md` writes it, for arrays (..., heads, length, dim)."""
    q, k, v = (np.asarray(a, np.float64) for a in (query, key, value))
    batch_shape = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (np.broadcast_to(a, (*batch_shape, *a.shape[-3:])) for a in (q, k, v))
    heads, q_len, kv_len = q.shape[-3], q.shape[-2], k.shape[-2]
    group = heads // k.shape[-3]
    out = np.zeros((*batch_shape, heads, q_len, v.shape[-1]))
    lse = np.full(out.shape[:-1], -np.inf)
    weights = np.zeros((*out.shape[:-1], kv_len))
    scores = np.full(weights.shape, -np.inf)
    for batch, index in enumerate(np.ndindex(*batch_shape)):
        start, align = _start(variants, q_offset, index, batch_shape, q_len, kv_len)
        kv_start = int(np.broadcast_to(kv_offset, batch_shape)[index])
        for head in range(heads):
            dense = Dense(
                query=q[(*index, head)],
                key=k[(*index, head // group)],
                value=v[(*index, head // group)],
                scale=q.shape[-1] ** -0.5 if scale is None else scale,
                batch=batch,
                batch_index=index,
                head=head,
                num_heads=heads,
                q_pos=start + np.arange(q_len),
                kv_pos=kv_start + np.arange(kv_len),
                align=align,
            )
            where = (*index, head)
            out[where], lse[where], weights[where], scores[where] = _one_head(dense, variants)
    return Truth(out, lse, weights, scores)


def _one_head(dense: Dense, variants: Sequence[Any]) -> tuple[Array, Array, Array, Array]:
    # Segments first: positions restart before anything reads them.
    for variant in sorted(variants, key=lambda v: type(v).__name__ == "RoPE"):
        if hasattr(variant, "naive_rows"):
            variant.naive_rows(dense)
    with np.errstate(all="ignore"):
        for i in range(len(dense.query)):
            for j in range(len(dense.key)):
                dense.scores[i, j] = dense.scale * np.sum(dense.query[i] * dense.key[j])
        for variant in variants:
            variant.naive(dense)
    scores = np.where(dense.allowed, dense.scores, -np.inf)
    out = np.zeros((len(dense.query), dense.value.shape[1]))
    lse = np.full(len(dense.query), -np.inf)
    weights = np.zeros(scores.shape)
    with np.errstate(all="ignore"):
        for i, row in enumerate(scores):
            seen = np.flatnonzero(dense.allowed[i])
            terms = np.append(row[seen], dense.sink)
            peak = terms.max()
            if np.isneginf(peak):
                continue
            lse[i] = peak + np.log(np.sum(np.exp(terms - peak)))
            for j in seen.tolist():
                weights[i, j] = np.exp(row[j] - lse[i])
                out[i] += weights[i, j] * dense.factors[i, j] * dense.value[j]
    return out, lse, weights, scores


def _start(
    variants: Sequence[Any],
    q_offset: Any,
    index: tuple[int, ...],
    batch_shape: tuple[int, ...],
    q_len: int,
    kv_len: int,
) -> tuple[int, str | None]:
    """Position of query row 0, and the word if the statement was one."""
    said = q_offset
    for variant in variants:
        if getattr(variant, "align", None) is not None:
            said = variant.align
    if said is None or (isinstance(said, str) and said == "start"):
        return 0, said
    if isinstance(said, str):
        for variant in variants:
            if hasattr(variant, "kv_lens"):
                return int(np.broadcast_to(variant.kv_lens, batch_shape)[index]) - q_len, said
        return kv_len - q_len, said
    return int(np.broadcast_to(said, batch_shape)[index]), None
