"""Small examples that the panels compute with: rows of query, key and value, and their tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError
from qkv.files.json_numbers import json_data
from qkv.inspection.traces.trace import Trace
from qkv.inspection.traces.trace_fields import Projections
from qkv.samples import shared_example

__all__ = ["LONGEST", "Example", "examples", "small_example", "traced_example"]

Array = NDArray[Any]

LONGEST = 64
"""The most rows of an example that is shown number by number."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One head on a few tokens, in float64.

    Attributes
    ----------
    name : str
        As requests name it.
    title : str
        For the reader.
    tokens : tuple of str (n,)
    query, key : array (n, head_dim)
    value : array (n, v_head_dim)
    projections : Projections or None
        Where the rows come from, if that is known.
    trace : Trace or None
        Its trace, if it was traced elsewhere; the page then shows this and computes nothing.
    """

    name: str
    title: str
    tokens: tuple[str, ...]
    query: Array
    key: Array
    value: Array
    projections: Projections | None = None
    trace: Trace | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and strings."""
        fields: dict[str, Any] = {
            "name": self.name,
            "title": self.title,
            "tokens": list(self.tokens),
            "query": json_data(self.query),
            "key": json_data(self.key),
            "value": json_data(self.value),
            "scale": self.query.shape[1] ** -0.5,
        }
        if self.projections is not None:
            fields |= {
                name: json_data(getattr(self.projections, name))
                for name in ("x", "w_q", "w_k", "w_v")
            }
        if self.trace is not None:
            fields["trace"] = self.trace.to_dict()
        return fields


def examples() -> tuple[Example, ...]:
    """The shared example of five tokens, and three tokens with their projections.

    Examples
    --------
    >>> [example.name for example in examples()]
    ['shared', 'three']
    """
    shared = shared_example()
    return (
        Example("shared", "Five tokens", shared.tokens, shared.q, shared.k, shared.v),
        _three_tokens(),
    )


def _three_tokens() -> Example:
    file = resources.files("qkv.lab.small_examples").joinpath("examples.json")
    given = json.loads(file.read_text(encoding="utf-8"))
    x, w_q, w_k, w_v = (np.array(given[name], np.float64) for name in ("x", "w_q", "w_k", "w_v"))
    projections = Projections(x, w_q, w_k, w_v)
    return Example(
        "three", "Three tokens", tuple(given["tokens"]), *projections.heads(), projections
    )


def traced_example(trace: Trace) -> Example:
    """The first head of a trace, with the rows that were traced."""
    problem = trace.problem
    if not trace.heads or not trace.heads[0].rows or not problem.kv_len:
        raise ArgumentError(
            "the trace has no row to show.",
            [("q_len", str(problem.q_len)), ("kv_len", str(problem.kv_len))],
            "Trace at least one row of query that has a key.",
        )
    head = trace.heads[0]
    tokens = trace.tokens or tuple(map(str, range(problem.q_len)))
    query = np.stack([row.query for row in head.rows])
    return Example("trace", "The trace", tokens, query, head.key, head.value, trace=trace)


def small_example(
    name: str, title: str, arrays: Sequence[Array], tokens: Sequence[str] | None
) -> Example | None:
    """The first head of arrays `(..., length, dim)` as an example; None if it is too long."""
    query, key, value = (array.reshape(-1, *array.shape[-2:])[0] for array in arrays)
    if len(query) != len(key) or len(key) > LONGEST:
        return None
    names = tuple(tokens) if tokens is not None else tuple(map(str, range(len(key))))
    q, k, v = (np.asarray(array, np.float64) for array in (query, key, value))
    return Example(name, title, names, q, k, v)
