"""The code panel: readable source, and what each line computes for a token."""

from __future__ import annotations

import inspect
import json
from importlib import resources
from typing import Any

import numpy as np

from qkv.inspection.trace import Trace
from qkv.inspection.trace_fields import TracedRow
from qkv.mechanisms import MECHANISMS
from qkv.mechanisms.registry import mechanism_class

__all__ = ["code_lines"]

PLAIN = "scaled-dot-product"
"""The mechanism whose code is shown as a function, with values."""


def code_lines(mechanism: str, trace: Trace) -> dict[str, Any]:
    """Source for NumPy and torch, and for each line its values, row by row.

    Parameters
    ----------
    mechanism : str
        Command-line name. Other mechanisms than "scaled-dot-product" show the source of their
        class, which takes arrays of both libraries, without values.
    trace : Trace
        Of one head, all rows; where the values come from.
    """
    if mechanism != PLAIN:
        lines = inspect.getsource(mechanism_class(mechanism)).splitlines()
        empty: dict[str, Any] = {"values": {}, "notes": {}, "shows": []}
        return {"mechanism": mechanism, "numpy": lines, "torch": lines, **empty}
    file = resources.files("qkv.lab").joinpath("code.json")
    given = json.loads(file.read_text(encoding="utf-8"))
    rows = trace.heads[0].rows
    values = {
        str(line): [_value(name, row) for row in rows] for line, name in enumerate(given["shows"])
    }
    notes = {str(line): note for line, note in enumerate(given["notes"])}
    return {
        "mechanism": mechanism,
        "numpy": given["numpy"],
        "torch": given["torch"],
        "shows": given["shows"],
        "values": values,
        "notes": notes,
        "mechanisms": list(MECHANISMS),
    }


def _value(name: str, row: TracedRow) -> str:
    if name == "d_k":
        return str(len(row.query))
    found = getattr(row if hasattr(row, name) else row.softmax, name)
    numbers = np.atleast_1d(np.asarray(found)).tolist()
    return ", ".join(f"{number:.4f}" for number in numbers)
