"""A problem as calls of the library."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import qkv

from .draw.mods import as_function
from .oracle import Oracle
from .problem import Problem, Variant, taken

Array = NDArray[Any]

__all__ = ["Call", "calls", "keywords", "spoiled"]


class Call(NamedTuple):
    """The arguments of one draw; `variants` are in the order of the problem's."""

    query: Any
    key: Any
    value: Any
    variants: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments as `qkv.attention` takes them."""
        return (self.query, self.key, self.value, *self.variants)


def keywords(problem: Problem) -> dict[str, Any]:
    """The options of every call."""
    return {
        "scale": problem.scale, "q_offset": problem.q_offset, "kv_offset": problem.kv_offset,
        "layout": problem.layout, "backend": "cpu",
    }  # fmt: skip


def calls(problem: Problem) -> Iterator[Call]:
    """One call after the other; while decoding, the cache gets its rows meanwhile."""
    same = [None if v.varies else made(v) for v in problem.variants]
    cache = [np.full_like(taken(a, [0]), np.nan)[0] for a in (problem.key, problem.value)]
    axis = -3 if problem.layout == "blhd" else -2
    for draw, query in enumerate(problem.query):
        variants = tuple(
            made(v.of_draw(draw)) if known is None else known
            for v, known in zip(problem.variants, same, strict=True)
        )
        if problem.kv_lens:
            rows = (..., slice(0, problem.kv_lens[draw]), *(slice(None),) * (-axis - 1))
            for place, whole in zip(cache, (problem.key, problem.value), strict=True):
                place[rows] = whole[0][rows]
            yield Call(query, cache[0][rows], cache[1][rows], variants)
        else:
            yield Call(query, problem.key[draw], problem.value[draw], variants)


def made(v: Variant) -> Any:
    """The library's object for a variant."""
    f = v.fields
    if v.name == "array":
        return f["array"]
    if v.name == "ScoreMod":
        return qkv.ScoreMod(as_function(f["tree"], f["constants"]))
    if v.name in ("AnyOf", "AllOf"):
        return reduce(or_ if v.name == "AnyOf" else and_, map(made, f["masks"]))
    if v.name == "Not":
        return ~made(f["mask"])
    return getattr(qkv, v.name)(**f)


def spoiled(problem: Problem, oracle: Oracle) -> Problem:
    """The problem with what it says written over keys and values that no query may see."""
    if problem.poison == 0 or problem.kv_lens:
        return problem
    arrays = []
    for array in (problem.key, problem.value):
        if any(s == 0 and n > 1 for s, n in zip(array.strides, array.shape, strict=True)):
            arrays.append(array)  # Rows that share memory cannot be spoiled one by one.
            continue
        array = taken(array, range(len(array)))
        rows = array.swapaxes(-3, -2) if problem.layout == "blhd" else array
        rows[~seen(oracle).reshape(rows.shape[:-1])] = problem.poison
        arrays.append(array)
    return Problem(**{**vars(problem), "key": arrays[0], "value": arrays[1]})


def seen(oracle: Oracle) -> Array:
    """Whether any query sees a key, in the shape of the oracle's keys."""
    by_head = oracle.allowed.any(axis=-2)
    shape = oracle.shapes[1]
    groups = by_head.reshape(*by_head.shape[:-2], shape[-3], oracle.group_size, by_head.shape[-1])
    found = groups.any(axis=-2)
    axes = tuple(n for n, size in enumerate(shape[:-3]) if n and size == 1 != found.shape[n])
    return np.asarray(found.any(axis=axes, keepdims=True))
