"""The calculation of one token as steps with numbers, to print and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkv.arguments.declarations import Indent, checked
from qkv.files.json_numbers import json_data
from qkv.inspection.rendering.tokens import printable
from qkv.inspection.summaries import in_html

__all__ = ["ExplainedToken", "Explanation", "Line", "Step", "dot_product", "number", "numbers"]

SCHEMA, VERSION = "qkv-mechanism-explanation", 1


@dataclass(frozen=True, slots=True)
class Line:
    """One number, or one row of numbers, with the arithmetic that gives it.

    Attributes
    ----------
    label : str
        What the number belongs to: a token, or the name of a quantity.
    value : float or sequence of float
        The result.
    work : str
        The arithmetic, such as `1*0 + 0*1`; empty if the formula of the step says enough.
    """

    label: str
    value: Any
    work: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a calculation.

    Attributes
    ----------
    title : str
        What the step computes.
    formula : str
        The same in symbols.
    lines : tuple of Line
        The numbers.
    """

    title: str
    formula: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ExplainedToken:
    """The token whose output is explained, in its sequence.

    Attributes
    ----------
    query, key, value : array (n, width), (kv_len, kv_dim), (kv_len, kv_dim)
        What queries, keys and values are made of, as NumPy arrays.
    index : int
        The row of query.
    tokens, kv_tokens : tuple of str
        Names of the rows of query and of key.
    """

    query: Any
    key: Any
    value: Any
    index: int
    tokens: tuple[str, ...]
    kv_tokens: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the token."""
        return self.tokens[self.index]


@checked
@dataclass(frozen=True, slots=True)
class Explanation:
    """How one token's output comes about, step by step.

    `str()` of it is text, `to_dict()` and `to_json()` are data.

    Attributes
    ----------
    mechanism, formula, paper : str
        As the class of the mechanism says them.
    token : str
        The token whose output is calculated.
    steps : tuple of Step

    Examples
    --------
    >>> print(Explanation("sum", "o = a + b", "none", "The", (
    ...     Step("Add", "a + b", (Line("o", 3.0, "1 + 2"),)),)))
    sum: o = a + b
    The output of 'The', step by step.
    <BLANKLINE>
    1. Add: a + b
       o  1 + 2 = 3.0000
    """

    mechanism: str
    formula: str
    paper: str
    token: str
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        head = f"{self.mechanism}: {self.formula}"
        head += f"\nThe output of '{printable(self.token)}', step by step."
        return "\n\n".join([head, *(_text(i, step) for i, step in enumerate(self.steps, start=1))])

    def _repr_html_(self) -> str:
        return in_html(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings; -inf is None, NaN and inf are strings."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "mechanism": self.mechanism,
            "formula": self.formula,
            "paper": self.paper,
            "token": self.token,
            "steps": [
                {
                    "title": step.title,
                    "formula": step.formula,
                    "lines": [
                        {
                            "label": line.label,
                            "work": line.work,
                            "value": json_data(np.asarray(line.value, float)),
                        }
                        for line in step.lines
                    ],
                }
                for step in self.steps
            ],
        }

    def to_json(self, indent: Indent | None = None) -> str:
        """`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)


def dot_product(label: str, a: Any, b: Any) -> Line:
    """The line of `sum_i a[i] * b[i]`, with its products written out.

    Parameters
    ----------
    label : str
    a, b : sequences of float of one length, or arrays (d,)

    Examples
    --------
    >>> dot_product("cat", [1, 0], [2, 3])
    Line(label='cat', value=2.0, work='1*2 + 0*3')
    """
    work = " + ".join(f"{number(x)}*{number(y)}" for x, y in zip(a, b, strict=True))
    return Line(label, float(np.dot(np.asarray(a, float), np.asarray(b, float))), work)


def number(value: float) -> str:
    """A number in at most four decimals, as it stands inside a calculation.

    Examples
    --------
    >>> number(0.5), number(2.0), number(1 / 3)
    ('0.5', '2', '0.3333')
    """
    text = f"{value:.4f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def numbers(values: Any) -> str:
    """A row of numbers, or rows of them, in brackets.

    Examples
    --------
    >>> numbers([1.0, 0.25])
    '[1, 0.25]'
    """
    array = np.asarray(values)
    if array.ndim == 0:
        return f"{float(array):.4f}"
    if array.ndim == 1:
        return "[" + ", ".join(number(float(value)) for value in array) + "]"
    return "[" + ", ".join(numbers(row) for row in array) + "]"


def _text(position: int, step: Step) -> str:
    labels = [printable(line.label) for line in step.lines]
    width = max(map(len, labels), default=0)
    worked = max((len(line.work) for line in step.lines), default=0)
    rows = [f"{position}. {step.title}: {step.formula}"]
    for label, line in zip(labels, step.lines, strict=True):
        work = f"{line.work:<{worked}} = " if worked else ""
        rows.append(f"   {label:<{width}}  {work}{numbers(line.value)}")
    return "\n".join(rows)
