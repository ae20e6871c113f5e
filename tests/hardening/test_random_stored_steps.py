"""Random decoding steps over keys and values in pages and as int8, against the oracle of `fuzz`.

Values are small whole numbers times powers of two, which all types hold exactly, so that storage
changes no number. Steps of one problem are alike, and prepared from the third on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from fuzz.calls import calls, keywords
from fuzz.checks import outputs
from fuzz.draw.structure import random_problem
from fuzz.oracle import Oracle
from fuzz.problem import DTYPES, Problem
from numpy.typing import NDArray

import qkv
from qkv.call.repeated.cache import CALLS

Array = NDArray[Any]

KINDS = ("array", "int8", "pages", "int8 pages")
PROBLEMS = 80
_ALONG_KEYS = {"array", "Mask", "Bias", "BlockSparse", "Segments", "RandomBlocks", "KeyLengths"}
"""Variants that say something of each key row, so that there must be as many."""


def stored_problem(seed: int, number: int) -> tuple[Problem, list[tuple[Array, Array]]]:
    """A problem of decoding, and its keys and values as whole numbers and scales."""
    drawn = (random_problem(seed, structure, number, draws=8) for structure in count(40 * number))
    layout = "blhd" if number % 5 == 4 else "bhld"
    problem = next(p for p in drawn if p.layout == layout and may_be_prepared(p))
    rng = np.random.default_rng((seed, number))
    parts = []
    for array in (problem.key, problem.value):
        numbers = rng.integers(-127, 128, array.shape).astype(np.int8)
        parts.append((numbers, np.ldexp(1.0, rng.integers(-8, -4, array.shape[:-1]))))
    dtype = DTYPES[problem.dtype]
    key, value = ((n * s[..., None]).astype(dtype) for n, s in parts)
    return replace(problem, key=key, value=value, poison=0.0), parts


def may_be_prepared(problem: Problem) -> bool:
    """Whether it is of decoding and not empty, with one batch dimension at most."""
    *_, q_len, _ = shape = problem.query.shape
    is_step = problem.purpose == "decoding" and q_len < 4
    return is_step and all(shape) and len(shape) <= 5 and len(problem.kv_lens) == problem.draws


def rows_of(problem: Problem, part: tuple[Array, Array], draw: int) -> tuple[Array, Array]:
    """Numbers and scales of the keys of one draw, with heads before rows."""
    numbers, scales = part[0][0], part[1][0].astype(np.float32)
    if problem.layout == "blhd":
        numbers, scales = numbers.swapaxes(-3, -2), scales.swapaxes(-2, -1)
    length = problem.kv_lens[draw]
    return numbers[..., :length, :], scales[..., :length]


def stored(problem: Problem, kind: str, numbers: Array, scales: Array, size: int) -> Any:
    """The rows in this kind of storage and the layout of the call; pages have so many rows."""
    turned = problem.layout == "blhd"
    dtype = DTYPES[problem.dtype]

    def arranged(array: Array, axis: int) -> Array:
        return array.swapaxes(axis, axis + 1) if turned else array

    if "pages" not in kind:
        if kind == "int8":
            return qkv.Quantized(arranged(numbers, -3), arranged(scales, -2))
        return arranged((numbers * scales[..., None]).astype(dtype), -3)
    *batch, heads, length, dim = numbers.shape
    used = int(np.prod(batch, initial=1)) * -(-length // size)
    table = np.random.default_rng(used).permutation(used + 2)[:used].reshape(*batch, -1)
    pages = np.zeros((used + 2, heads, size, dim), np.int8)
    of_pages = np.zeros((used + 2, heads, size), np.float32)
    for index in np.ndindex(*table.shape):
        rows = slice(index[-1] * size, (index[-1] + 1) * size)
        part, own = numbers[index[:-1]][:, rows], scales[index[:-1]][:, rows]
        pages[table[index], :, : part.shape[1]] = part
        of_pages[table[index], :, : own.shape[1]] = own
    if kind == "int8 pages":
        return qkv.Paged(qkv.Quantized(arranged(pages, -3), arranged(of_pages, -2)), table)
    return qkv.Paged(arranged((pages * of_pages[..., None]).astype(dtype), -3), table)


def results(problem: Problem, parts: Any, kinds: tuple[str, str]) -> Iterator[Any]:
    """Output and lse of each draw."""
    in_pages = any("pages" in kind for kind in kinds)
    names = {variant.name for variant in problem.variants}
    size = 1 if names & _ALONG_KEYS or not all("pages" in kind for kind in kinds) else 3
    for draw, call in enumerate(calls(problem)):
        rows = [rows_of(problem, part, draw) for part in parts]
        key, value = (stored(problem, k, *r, size) for k, r in zip(kinds, rows, strict=True))
        lengths = [qkv.KeyLengths(problem.kv_lens[draw])] if in_pages and size > 1 else []
        yield qkv.attention(
            call.query, key, value, *call.variants, *lengths, **keywords(problem), return_lse=True
        )


@pytest.mark.sampled("number", range(PROBLEMS), one_in=4)
def test_random_steps(number: int) -> None:
    problem, parts = stored_problem(5, number)
    oracle = Oracle(problem)
    of_key = KINDS[1 + number % 3]
    kinds = of_key, of_key if number % 4 else KINDS[number // 4 % 4]
    found = list(results(problem, parts, kinds))
    outputs(oracle, found)
    # A call that is prepared has the bits of a first one.
    CALLS.clear()
    (last,) = results(problem.only([problem.draws - 1]), parts, kinds)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(last, found[-1], strict=True))
