"""Calls of the backend `cpu`, held against float64 within the error bound."""

from typing import Any

import numpy as np

import qkv
from qkv.testing import bounds, truth


def run(*arguments: Any, **keywords: Any) -> Any:
    """Output and lse."""
    return qkv.attention(*arguments, backend="cpu", return_lse=True, **keywords)


def require_right(arrays: Any, *variants: Any, **keywords: Any) -> None:
    """Output and lse of query, key and value are within the error bound."""
    out, lse = run(*arrays, *variants, **keywords)
    expected = truth(*arrays, variants, **keywords)
    limit = bounds(expected, arrays[0].dtype)
    assert np.abs(out.astype(float) - expected.out).max() <= limit.out
    assert np.abs(lse - expected.lse).max() <= limit.lse
