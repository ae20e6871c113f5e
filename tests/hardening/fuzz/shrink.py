"""Problems that fail, made smaller: fewer draws and variants, shorter arrays, plainer memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import check
from .oracle import Oracle
from .problem import Problem, Variant, from_json

Array = NDArray[Any]

KEPT = Path(__file__).with_name("kept")


def kept() -> list[Path]:
    """The files of problems that once failed."""
    return sorted(KEPT.glob("*.json"))


def read(path: Path) -> Problem:
    """The problem of a file."""
    return from_json(json.loads(path.read_text())["problem"])


def keep(name: str, problem: Problem, error: BaseException, folder: Path = KEPT) -> Path:
    """Write a problem where `test_fuzz.py` finds it, with what was wrong."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    found = {"found": repr(error), "problem": problem.to_json()}
    path.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    return path


def failure(problem: Problem) -> BaseException | None:
    """What is raised for a problem."""
    try:
        check(problem)
    except Exception as error:
        return error
    return None


def shrunk(
    problem: Problem,
    error: BaseException,
    seconds: float = 30.0,
    failing: Callable[[Problem], BaseException | None] = failure,
) -> tuple[Problem, BaseException]:
    """A smaller problem that fails in the same way, and its error.

    Each change is kept if the problem still raises an error of the same type; all are tried again
    until none helps, or time is up.
    """
    end, again = time.monotonic() + seconds, True
    while again:
        again = False
        for smaller in simpler(problem):
            if time.monotonic() > end:
                return problem, error
            try:
                found = failing(smaller) if is_meaningful(smaller) else None
            except (ValueError, IndexError):
                continue  # No problem at all: arrays no longer fit.
            if type(found) is type(error):
                problem, error, again = smaller, found, True
                break
    return problem, error


def is_meaningful(problem: Problem) -> bool:
    """Whether the oracle finds an answer."""
    try:
        return bool(Oracle(problem).out.size) or problem.query.size == 0
    except (ValueError, IndexError, ZeroDivisionError):
        return False


def simpler(problem: Problem) -> Iterator[Problem]:
    """Problems that are a little smaller, the smallest first."""
    n = problem.draws
    if n > 1:
        for draws in ([0], [n - 1], range(n // 2), range(n // 2, n), range(1, n), range(n - 1)):
            if len(draws) < n:
                yield problem.only(draws)
    variants = problem.variants
    for i, v in enumerate(variants):
        parts = [(part,) for part in v.fields.get("masks", ())]
        pairs = v.fields.get("rotary_dim", 0) // 4
        if pairs:
            short = {"rotary_dim": 2 * pairs, "inv_freq": np.ones(pairs)}
            parts.append((Variant(v.name, {**v.fields, **short}),))
        for fewer in ((), *parts):
            yield replace(problem, variants=(*variants[:i], *fewer, *variants[i + 1 :]))
    for axis in ("q_len", "kv_len", "head_dim", "v_head_dim", "num_heads"):
        yield from cut(problem, axis)
    longest = max(problem.kv_lens, default=0)
    if longest > n + 1:
        shorter = tuple(max(2, lens // 2) for lens in problem.kv_lens)
        yield replace(problem, kv_lens=shorter)
    length = -3 if problem.layout == "blhd" else -2
    if 0 < longest < problem.key.shape[length]:
        rows = (..., slice(0, longest), *(slice(None),) * (-length - 1))
        yield replace(problem, key=problem.key[rows], value=problem.value[rows])
    plain: Mapping[str, Any] = {
        "forced": {}, "poison": 0.0, "scale": None, "kv_offset": 0, "layout": "bhld",
    }  # fmt: skip
    for name, value in plain.items():
        if not np.array_equal(getattr(problem, name), value):
            if name == "layout":
                swapped = (a.swapaxes(-3, -2) for a in (problem.query, problem.key, problem.value))
                query, key, value_ = swapped
                yield replace(problem, layout="bhld", query=query, key=key, value=value_)
            else:
                yield replace(problem, **{name: value})
    if not isinstance(problem.q_offset, str | int):
        yield replace(problem, q_offset=int(problem.q_offset.flat[0]))
    for name in ("query", "key", "value"):
        array = getattr(problem, name)
        if not array.flags.c_contiguous:
            yield replace(problem, **{name: np.ascontiguousarray(array)})
        short = array.astype(float).round(1).astype(array.dtype)
        if not np.array_equal(short, array):
            yield replace(problem, **{name: short})


def cut(problem: Problem, axis: str) -> Iterator[Problem]:
    """Problems with half of an axis, or one entry less."""
    heads = -2 if problem.layout == "blhd" else -3
    length = -5 - heads
    where = {
        "q_len": (("query", length),), "kv_len": (("key", length), ("value", length)),
        "head_dim": (("query", -1), ("key", -1)), "v_head_dim": (("value", -1),),
        "num_heads": (("query", heads), ("key", heads), ("value", heads)),
    }[axis]  # fmt: skip
    size = getattr(problem, where[0][0]).shape[where[0][1]]
    kv_heads = problem.key.shape[heads]
    keeps = [range(size // 2), range(size // 2, size), range(1, size), range(size - 1)]
    if axis == "num_heads":  # One of the key's heads with its group.
        keeps = [range(size // kv_heads)] if kv_heads > 1 else []
    for kept_rows in keeps:
        if len(kept_rows) in (0, size) or (problem.kv_lens and axis == "kv_len"):
            continue
        arrays = {}
        for name, along in where:
            array = getattr(problem, name)
            rows = range(1) if axis == "num_heads" and name != "query" else kept_rows
            arrays[name] = array[
                tuple(
                    slice(rows.start, rows.stop) if n == along % array.ndim else slice(None)
                    for n in range(array.ndim)
                )
            ]
        variants = tuple(cut_variant(v, axis, size, kept_rows) for v in problem.variants)
        yield replace(problem, **arrays, variants=variants)


_AXES = {"num_heads": -3, "q_len": -2, "kv_len": -1}


def cut_variant(v: Variant, axis: str, size: int, kept_rows: range) -> Variant:
    """A variant whose arrays lose the rows that operands lose."""
    rows = slice(kept_rows.start, kept_rows.stop)

    def of_field(name: str, field: Any) -> Any:
        if isinstance(field, Variant):
            return cut_variant(field, axis, size, kept_rows)
        if isinstance(field, tuple) and name == "masks":
            return tuple(cut_variant(each, axis, size, kept_rows) for each in field)
        if not isinstance(field, np.ndarray):
            return field
        if name == "kv_lens" and axis == "kv_len":
            return np.minimum(field, len(kept_rows))
        if (name, axis) in (("q_ids", "q_len"), ("kv_ids", "kv_len"), ("table", "num_heads")):
            return field[..., rows]
        if name in ("slopes", "values") and axis == "num_heads" and field.ndim:
            return field[rows]
        along = _AXES.get(axis, 0)
        has_axis = along and field.ndim - v.varies >= -along and field.shape[along] == size > 1
        if name == "array" and has_axis:
            return field[(..., rows, *(slice(None),) * (-along - 1))]
        if name == "mask" and axis == "num_heads" and field.ndim >= 3 and field.shape[-3] == size:
            return field[..., rows, :, :]
        return field

    return Variant(v.name, {name: of_field(name, f) for name, f in v.fields.items()}, v.varies)
