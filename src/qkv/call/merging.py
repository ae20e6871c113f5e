"""Join partial results as public functions give them: of any library, in either layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from qkv._dynamo import ends_graph
from qkv.arguments.readable_checks import array_shape
from qkv.arrays import ArrayLibrary, is_array, library_of, namespace
from qkv.arrays.views import view
from qkv.errors import DTypeError, ShapeError, UnsupportedError
from qkv.partial import Partial, merge
from qkv.problem.building.builder import FLOATS
from qkv.problem.building.check import Layout

__all__ = ["merge_parts"]


def merge_parts(
    parts: Sequence[tuple[Any, Any]], layout: Layout, xp: Any = None
) -> tuple[Any, Any]:
    """See `qkv.merge`; there is a part. `xp` is the module of functions to compute with, if one is
    prescribed."""
    first = parts[0][0]
    library = library_of(first, "out")
    if xp is None:
        is_tracked = any(library.is_tracked(a) for a in (*chain(*parts),) if is_array(a))
        on_cpu = getattr(getattr(first, "device", None), "type", "cpu") == "cpu"
        # NumPy gives every library the same bits; others are needed only for gradients or devices.
        xp = namespace(first, "out") if is_tracked or not on_cpu else np
    is_blhd = layout == "blhd" and len(np.shape(first)) > 2
    partials: list[Partial] = []
    for out, lse in parts:
        for name, given in (("out", out), ("lse", lse)):
            array_shape(name, given)  # raises where there is none, as that of a nested tensor
            _require_floats(name, given)
        array, lse_array = _beside(library, out, "out"), _beside(library, lse, "lse")
        if xp is np:
            array, lse_array = view(array, "out"), view(lse_array, "lse")
        array = array.swapaxes(-3, -2) if is_blhd else array
        expected = partials[0].out.shape if partials else array.shape
        if lse_array.shape != array.shape[:-1] or array.shape != expected:
            raise ShapeError(
                f"out has shape {tuple(array.shape)} and lse {tuple(lse_array.shape)}; they do not "
                "fit each other or the first part.",
                [(f"part {i}", f"out {np.shape(o)}, lse {np.shape(s)}")
                 for i, (o, s) in enumerate(parts)],
                "Merge parts of the same queries, each with its own lse.",
            )  # fmt: skip
        compute_dtype = xp.float64 if array.dtype == xp.float64 else xp.float32
        partials.append(Partial(_cast(array, compute_dtype), _cast(lse_array, compute_dtype)))
    merged = merge(partials, xp)
    out = _cast(merged.out, view(first, "out").dtype if xp is np else first.dtype)
    out = out.swapaxes(-3, -2) if is_blhd else out
    if xp is not np:
        return out, merged.lse
    return library.restore(np.ascontiguousarray(out)), library.restore(merged.lse)


def _beside(library: ArrayLibrary, given: Any, name: str) -> Any:
    """An array of a part for the library of the first part, a NumPy view if it is of another."""
    own = library_of(given, name)  # raises if it is no array
    if own.name == library.name:
        return given
    if own.is_tracked(given):
        raise UnsupportedError(
            f"{own.name} differentiates or traces {name} of a part, and the first part, like the "
            f"result, is of {library.name}, which {own.name} cannot follow.",
            action=f"Pass the first part as arrays of {own.name}.",
        )
    return view(given, name)


def _require_floats(name: str, given: Any) -> None:
    """Refuse integers, to which the merged output would be truncated."""
    dtype = getattr(given, "dtype", None)
    text = getattr(dtype, "name", "") or f"{dtype}".removeprefix("torch.")
    if dtype is not None and text not in FLOATS:
        raise DTypeError(
            f"{name} of a part has dtype {text}; attention returns {', '.join(FLOATS)}.",
            action="Pass what attention returns with return_lse=True.",
        )


def _cast(array: Any, dtype: Any) -> Any:
    """An array of any library in another type."""
    return array.astype(dtype) if hasattr(array, "astype") else array.to(dtype)


ends_graph(merge_parts, "qkv.merge of NumPy arrays")
