"""Attention of a few tokens counted by hand: one step after another, with a growing ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qkv.inspection.traces.trace import Trace
from qkv.inspection.traces.trace_fields import TracedRow
from qkv.mechanisms.base.explanations.explanation import number

__all__ = ["CountedStep", "walkthrough"]


@dataclass(frozen=True, slots=True)
class CountedStep:
    """One step of the calculation by hand, and what it costs.

    Attributes
    ----------
    query : int
        The query that it belongs to.
    key : int or None
        The key of a dot product.
    kind : str
        dot, scale, max, shift, exp, sum, divide or output.
    title, work : str
        What is computed, and the arithmetic with its numbers.
    values : sequence of float
        The results.
    operations : dict of str to int
        Scalar operations, named as in `qkv.ledger.ledger`.
    """

    query: int
    key: int | None
    kind: str
    title: str
    work: str
    values: Sequence[float | None]
    operations: dict[str, int]


def walkthrough(trace: Trace) -> list[dict[str, Any]]:
    """The steps of all rows of the first head of a trace, numbered, each with the sums so far.

    For n keys a row has n dot products and seven more steps: three tokens take thirty.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(3)
    >>> steps = walkthrough(qkv.explain(x, x, x))
    >>> len(steps), steps[-1]["total"]
    (30, 138)
    """
    head = trace.heads[0]
    names = trace.tokens or tuple(f"row {row.q_index}" for row in head.rows)
    keys = trace.kv_tokens or tuple(f"key {j}" for j in range(trace.problem.kv_len))
    sums: dict[str, int] = {}
    steps: list[dict[str, Any]] = []
    for row in head.rows:
        for step in _row(row, head.key.tolist(), head.value.tolist(), names[row.q_index], keys):
            for name, count in step.operations.items():
                sums[name] = sums.get(name, 0) + count
            steps.append(
                {
                    "number": len(steps) + 1,
                    "query": step.query,
                    "key": step.key,
                    "kind": step.kind,
                    "title": step.title,
                    "work": step.work,
                    "values": list(step.values),
                    "operations": step.operations,
                    "ledger": dict(sums),
                    "total": sum(sums.values()),
                }
            )
    return steps


def _row(
    row: TracedRow,
    key: list[list[float]],
    value: list[list[float]],
    token: str,
    keys: Sequence[str],
) -> Iterator[CountedStep]:
    i, query, softmax = row.q_index, row.query.tolist(), row.softmax
    n, d_v = len(keys), len(value[0])
    raw, scaled = row.raw.tolist(), row.scaled.tolist()
    for j, name in enumerate(keys):
        terms = " + ".join(f"{number(a)}*{number(b)}" for a, b in zip(query, key[j], strict=True))
        d = len(query)
        yield CountedStep(
            i, j, "dot", f"q[{token}] . k[{name}]", f"{terms} = {number(raw[j])}", [raw[j]],
            {"qk_multiply": d, "qk_add": d - 1},
        )  # fmt: skip
    divisor = len(query) ** 0.5
    weights = softmax.weights.tolist()
    top, total = float(softmax.row_max), float(softmax.row_sum)
    shifted, exps = softmax.shifted.tolist(), softmax.exp.tolist()
    divided = ", ".join(f"{number(s)}/{number(divisor)}" for s in raw)
    moved = ", ".join(f"{number(s)} - {number(top)}" for s in scaled)
    raised = ", ".join(f"exp({number(s)})" for s in shifted)
    shared = ", ".join(f"{number(e)}/{number(total)}" for e in exps)
    said = ", ".join(map(number, scaled))
    mixed = " + ".join(f"{number(w)} v[{name}]" for w, name in zip(weights, keys, strict=True))
    seven: tuple[tuple[str, str, str, list[float], dict[str, int]], ...] = (
        ("scale", "divide by sqrt(d)", divided, scaled, {"scale_divide": n}),
        ("max", "largest score", f"max({said})", [top], {"softmax_compare": n - 1}),
        ("shift", "subtract the largest", moved, shifted, {"softmax_subtract": n}),
        ("exp", "exponentials", raised, exps, {"softmax_exp": n}),
        ("sum", "their sum", " + ".join(map(number, exps)), [total], {"softmax_add": n - 1}),
        ("divide", "weights", shared, weights, {"softmax_divide": n}),
        (
            "output", "weighted sum of values", mixed, row.output.tolist(),
            {"av_multiply": n * d_v, "av_add": (n - 1) * d_v},
        ),
    )  # fmt: skip
    for kind, title, work, values, operations in seven:
        yield CountedStep(i, None, kind, f"{token}: {title}", work, values, operations)
