"""Self-attention: queries, keys and values are projections of one sequence."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Line, Step, number
from qkv.mechanisms.base.projected import Options, ProjectedAttention

__all__ = ["Self"]


class Self(ProjectedAttention):
    """`softmax(Q K^T / sqrt(head_dim)) V` with `Q = X W_Q`, `K = X W_K`, `V = X W_V`.

    Every token asks (its query), is asked (its key) and answers (its value), each by a projection
    of its own row. Without positions, permuting the tokens permutes the outputs alike.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width of x, and heads.
    **options
        As for `ProjectedAttention`; without an output projection unless `out_proj=True`.

    Notes
    -----
    `W_Q` is the transpose of `weights["q_proj.weight"]`, which is stored as torch does. Source:
    Cheng et al., "Long Short-Term Memory-Networks for Machine Reading" (2016); Vaswani et al.
    (2017), section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Self
    >>> Self(8, head_dim=4)(np.ones((5, 8))).shape
    (5, 4)
    """

    name = "self"
    paper = "Cheng et al., LSTM-Networks for Machine Reading (2016); Vaswani et al. (2017)"
    formula = "softmax(Q K^T / sqrt(d)) V, Q = X W_Q, K = X W_K, V = X W_V"
    one_sequence_only = True
    default_options: ClassVar[Options] = {"out_proj": False}

    def steps_before(self, token: ExplainedToken, query: Any, key: Any, value: Any) -> list[Step]:
        """The projections of one token with their products; then keys and values of all."""
        x, name = token.query[token.index], token.name
        steps = [Step("Input", "x, a row of X", (Line(f"x of {name}", x.tolist()),))]
        for side in "qkv":
            columns = np.asarray(self.weights[f"{side}_proj.weight"], np.float64)
            bias = self.weights.get(f"{side}_proj.bias")
            lines = [
                Line(f"{side}[{i}]", *_product(x, column, None if bias is None else bias[i]))
                for i, column in enumerate(columns)
            ]
            formula = f"{side} = x W_{side.upper()}, without terms that are 0"
            steps.append(Step(f"Project {name}", formula, tuple(lines)))
        return steps + super().steps_before(token, query, key, value)


def _product(x: Any, column: Any, bias: Any) -> tuple[float, str]:
    terms = [
        f"{number(float(a))}*{number(float(w))}" for a, w in zip(x, column, strict=True) if a and w
    ]
    total = float(np.dot(x, column))
    if bias is not None:
        total += float(bias)
        terms.append(number(float(bias)))
    return total, " + ".join(terms) or "0"
