"""Data as plain lists, numbers and strings for JSON, which has no number that is not finite.

Numbers keep all their digits. -inf is None; NaN and +inf are the strings "nan" and "inf".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import inf, isfinite, nan
from typing import Any

import numpy as np

__all__ = ["json_data", "numbers_of_json"]

_NOT_FINITE = {None: -inf, "nan": nan, "inf": inf}


def json_data(value: Any) -> Any:
    """Arrays, dataclasses, mappings and sequences as what `json.dumps(allow_nan=False)` writes.

    Examples
    --------
    >>> json_data({"scores": np.array([1.0, -np.inf, np.nan, np.inf])})
    {'scores': [1.0, None, 'nan', 'inf']}
    """
    if isinstance(value, np.ndarray | np.generic):
        is_finite = value.dtype.kind in "biu" or (
            value.dtype.kind == "f" and bool(np.isfinite(value).all())
        )
        return value.tolist() if is_finite else json_data(value.tolist())
    if is_dataclass(value):
        return {f.name: json_data(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): json_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_data(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None if value == -inf else str(float(value))
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def numbers_of_json(value: Any) -> Any:
    """A number, or lists of numbers, out of JSON that `json_data` wrote; the rest stays as it is.

    Examples
    --------
    >>> numbers_of_json([1.0, None, "nan", "inf"])
    [1.0, -inf, nan, inf]
    """
    if isinstance(value, list):
        return [numbers_of_json(item) for item in value]
    return _NOT_FINITE.get(value, value) if value is None or isinstance(value, str) else value
