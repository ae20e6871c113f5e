"""The trace of attention as data: every number between query, key, value and output.

`docs/trace.md` describes it, `trace.schema.json` is its schema; both count as public. A change that
a reader could notice raises `VERSION`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qkv.arguments.declarations import Indent, Size, Whole, checked, shown
from qkv.errors import ArgumentError
from qkv.files.json_numbers import json_data
from qkv.inspection.rendering.counts import counted
from qkv.inspection.rendering.pages import page_of
from qkv.inspection.summaries import in_html
from qkv.inspection.traces.trace_data import built, read_only
from qkv.inspection.traces.trace_fields import TracedHead, TracedLedger, TracedProblem, TraceFields
from qkv.inspection.traces.trace_shapes import fitted
from qkv.inspection.traces.trace_text import render

SCHEMA, VERSION = "qkv-trace", 2

_MOST_ROWS = 16
"""Rows whose text a notebook shows."""
_MOST_KEYS, _TOP = 32, 12
"""The most keys that are all printed unless a number is asked for, and how many of more are."""


def keys_to_read(kv_len: int) -> int | None:
    """How many keys of each row are printed if nobody says a number; None is all."""
    return _TOP if kv_len > _MOST_KEYS else None


@checked
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trace(TraceFields):
    """Attention of some rows with every intermediate number, in float64, as `qkv.explain` gives it.

    Nobody can write to its arrays, so that its numbers go on fitting together.

    Attributes
    ----------
    problem : TracedProblem
        Sizes, dtype, scale, and the variants in words.
    tokens, kv_tokens : tuple of str or None
        Names of the query rows and of the key rows, where they were given.
    heads : tuple of TracedHead
        The traced rows of each query head.
    gradient : TracedGradients or None
        dQ, dK and dV over all rows, with `grad=True`.
    mechanism : TracedMechanism or None
        What was traced, if it has a name.
    projections : Projections or None
        Where the rows come from, if that was given.
    ledger : TracedLedger
        Operations of the traced pairs.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(2)
    >>> trace = qkv.explain(x, x, x, q_index=1)
    >>> trace.heads[0].rows[0].softmax.weights.round(3)
    array([0.33, 0.67])
    """

    def __post_init__(self) -> None:
        read_only((self.heads, self.gradient, self.projections))

    def __repr__(self) -> str:
        rows = sum(len(head.rows) for head in self.heads)
        return (
            f"Trace({counted(rows, 'row')} of {counted(len(self.heads), 'head')}, "
            f"kv_len={self.problem.kv_len})"
        )

    def __str__(self) -> str:
        return self.text(top=keys_to_read(self.problem.kv_len))

    def _repr_html_(self) -> str:
        few = sum(len(head.rows) for head in self.heads) <= _MOST_ROWS
        return in_html(str(self) if few else repr(self))

    def text(self, width: Size = 100, top: Whole | None = None) -> str:
        """The trace to read: plain text, long lines of products folded at `width` columns.

        With `top`, only the keys with most weight of each row are printed, so many of them, and of
        the step back as many rows of each gradient; the sums are still those over all keys. `print`
        and notebooks show 12 if there are more than 32.
        """
        return render(self, width, top)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, as `trace.schema.json` says.

        -inf is None; NaN and +inf are the strings "nan" and "inf".
        """
        return {"schema": SCHEMA, "version": VERSION, **json_data(self)}

    def to_json(self, indent: Indent | None = None) -> str:
        """`to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trace:
        """The trace that `to_dict` gave, of this version of the schema or an earlier one.

        Raises
        ------
        ArgumentError
            It is none; the message names the first field that is wrong.
        """
        try:
            header = data["schema"], data["version"]
            fields = {name: data[name] for name in data if name not in ("schema", "version")}
        except (TypeError, LookupError):
            header, fields = ("nothing", 0), {}
        if header[0] != SCHEMA or header[1] not in range(1, VERSION + 1):
            raise ArgumentError(
                f"this does not read schema {shown(header[0])}, version {shown(header[1], 20)}.",
                [("reads", f"{SCHEMA}, versions 1 to {VERSION}")],
                "Pass what Trace.to_json wrote.",
            )
        try:
            return fitted(built(cls, fields if header[1] == VERSION else _since_1(fields)))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ArgumentError(
                f"this is not a trace: {error!s:.200}.", action="Pass what Trace.to_json wrote."
            ) from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Trace:
        """The trace that `to_json` wrote, of this version of the schema or an earlier one.

        Raises
        ------
        ArgumentError
            The text is not JSON, or no trace.

        Examples
        --------
        >>> import numpy as np, qkv
        >>> x = np.eye(2)
        >>> trace = qkv.Trace.from_json(qkv.explain(x, x, x, q_index=1).to_json())
        >>> trace.heads[0].rows[0].softmax.weights.round(3)
        array([0.33, 0.67])
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(
                f"the text is not JSON: {error!s:.200}.", action="Pass what Trace.to_json wrote."
            ) from error
        return cls.from_dict(data)

    def to_html(self) -> str:
        """The trace as a page of the lab: one HTML file that works from disk, with no network.

        Returns
        -------
        str
            Everything is inside; see `qkv.lab.to_html`.
        """
        return page_of(self)


def _since_1(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of version 1 with those of version 2, of which only the counts can be known."""
    heads = [
        {**head, "rows": [{"tiles": None, **row} for row in head["rows"]]}
        for head in fields["heads"]
    ]
    problem = built(TracedProblem, fields["problem"])
    traced = [built(TracedHead, head) for head in heads]
    ledger = TracedLedger.of(traced, problem.head_dim, problem.v_head_dim)
    return {
        **fields,
        "heads": heads,
        "mechanism": None,
        "projections": None,
        "ledger": json_data(ledger),
    }
