"""The steps of one attention row, taken from the trace that `qkv.explain` makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from qkv.inspection.traces.steps import Softmax
from qkv.inspection.traces.trace import Trace
from qkv.inspection.traces.trace_fields import TracedHead
from qkv.mechanisms.base.arrays.head_rows import join_heads
from qkv.mechanisms.base.explanations.explanation import (
    ExplainedToken,
    Line,
    Step,
    dot_product,
    number,
    numbers,
)

__all__ = ["attention_steps", "head_lines", "softmax_and_output", "token_lines"]


def attention_steps(trace: Trace, kv_tokens: Sequence[str]) -> list[Step]:
    """Rotation, dot products, scale, score variants, masks, softmax and output of each head.

    Parameters
    ----------
    trace : Trace
        Of one row of every head.
    kv_tokens : sequence of str (kv_len,)
        Names of the keys.
    """
    steps: list[Step] = []
    for head in trace.heads:
        title = f"Head {head.head}. " if len(trace.heads) > 1 else ""
        steps += [
            Step(title + step.title, step.formula, step.lines)
            for step in _steps_of_head(trace, head, kv_tokens)
        ]
    return steps


def token_lines(tokens: Sequence[str], values: Any) -> tuple[Line, ...]:
    """One line for each token with its number or row of numbers."""
    return tuple(
        Line(token, value.tolist()) for token, value in zip(tokens, np.asarray(values), strict=True)
    )


def _steps_of_head(trace: Trace, head: TracedHead, tokens: Sequence[str]) -> list[Step]:
    (row,) = head.rows
    steps: list[Step] = []
    query, key = row.query, head.key
    if row.rotated_query is not None and head.rotated_key is not None:
        lines = Line("q", row.rotated_query.tolist(), f"{numbers(query)} turned")
        keys = tuple(
            Line(token, rotated.tolist(), f"{numbers(given)} turned")
            for token, given, rotated in zip(tokens, key, head.rotated_key, strict=True)
        )
        formula = "each pair of numbers turns by position * frequency"
        steps.append(Step("Rotate", formula, (lines, *keys)))
        query, key = row.rotated_query, head.rotated_key
    steps.append(
        Step(
            "Dot products",
            "q . k",
            tuple(dot_product(t, query, k) for t, k in zip(tokens, key, strict=True)),
        )
    )
    if trace.problem.scale != 1:
        formula = f"s = (q . k) * {number(trace.problem.scale)}"
        steps.append(Step("Scale", formula, token_lines(tokens, row.scaled)))
    steps += [Step("Score", stage.label, token_lines(tokens, stage.scores)) for stage in row.stages]
    seen = row.stages[-1].scores if row.stages else row.scaled
    for mask in row.masks:
        seen = np.where(mask.allowed, seen, -np.inf)
        steps.append(Step("Mask", mask.label, token_lines(tokens, seen)))
    return steps + softmax_and_output(row.softmax, head.value, tokens)


def softmax_and_output(softmax: Softmax, value: Any, tokens: Sequence[str]) -> list[Step]:
    """The softmax of one row, and the values `(kv_len, v_head_dim)` weighted and added."""
    total = number(float(softmax.row_sum))
    weights = [
        Line(token, float(weight), f"{number(float(exp))} / {total}")
        for token, exp, weight in zip(tokens, softmax.exp, softmax.weights, strict=True)
    ]
    # `where` rather than a product with 0, because a forbidden value may be NaN.
    parts = np.where(softmax.weights[:, None] == 0, 0.0, softmax.weights[:, None] * value)
    lines = [
        Line(token, part.tolist(), f"{number(float(weight))} * {numbers(row)}")
        for token, weight, row, part in zip(tokens, softmax.weights, value, parts, strict=True)
    ]
    largest = number(float(softmax.row_max))
    formula = f"w = exp(s - max) / sum, max = {largest}, sum = {total}"
    if softmax.sink_exp is not None:
        formula += f", of which exp(sink - max) = {number(float(softmax.sink_exp))}"
    output = Line("o", parts.sum(axis=0).tolist(), "their sum")
    return [
        Step("Softmax", formula, tuple(weights)),
        Step("Output", "o = sum_j w[j] v[j]", (*lines, output)),
    ]


def head_lines(token: ExplainedToken, query: Any, key: Any, value: Any) -> list[Line]:
    """The query of a token, and all keys and values, of all heads side by side."""
    q, k, v = map(join_heads, (query, key, value))
    lines = [Line(f"q of {token.name}", q[token.index].tolist())]
    for name, rows in (("k", k), ("v", v)):
        labels = [f"{name} of {kv_token}" for kv_token in token.kv_tokens]
        lines += token_lines(labels, rows)
    return lines
