"""A problem as plain data: arrays where they lie in memory, and variants by their names.

The library and the oracle are both given this, so that neither reads the other's objects. Several
draws of values share one problem: shapes, strides, offsets and kinds of variants are the same, and
arrays have an axis of draws before all others. As JSON it is whole, and needs no generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .draw.memory import in_strides

Array = NDArray[Any]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class Variant(NamedTuple):
    """A variant by the name of its class, with what its fields hold.

    "array" is a bare array. Where `varies`, the only array has an axis of draws first. Fields may
    hold variants, as those of joined masks do.
    """

    name: str
    fields: Mapping[str, Any] = {}
    varies: bool = False

    def of_draw(self, draw: int) -> Variant:
        """The variant as it stands in one draw."""
        if not self.varies:
            return self
        fields = {k: v[draw] if isinstance(v, np.ndarray) else v for k, v in self.fields.items()}
        return Variant(self.name, fields)


@dataclass(frozen=True, eq=False)
class Problem:
    """One layout of one structure, with values for a number of draws.

    Attributes
    ----------
    purpose : str
        A name of `checks.CHECKS`.
    query, key, value : array (draws, ...)
        In the layout of the call. While decoding, key and value are the whole cache, one draw.
    kv_lens : tuple of int
        While decoding, the number of keys of each draw.
    forced : mapping
        "isa", "masks read" and "parts": which kernels run, beyond what the library would choose.
    poison : float
        What is written over keys and values that no query may see: NaN, infinity, or 0 for nothing.
    seed : int
        Of cotangents and tangents.
    """

    purpose: str
    dtype: str
    query: Array
    key: Array
    value: Array
    variants: tuple[Variant, ...] = ()
    layout: str = "bhld"
    scale: float | None = None
    q_offset: Any = None
    kv_offset: Any = 0
    kv_lens: tuple[int, ...] = ()
    forced: Mapping[str, Any] = field(default_factory=dict)
    poison: float = 0.0
    seed: int = 0

    @property
    def draws(self) -> int:
        """How many calls there are."""
        return len(self.query)

    def only(self, draws: Sequence[int]) -> Problem:
        """Some of the draws, in this order."""
        picked = list(draws)
        variants = [
            Variant(v.name, {k: taken(f, picked) for k, f in v.fields.items()}, True)
            if v.varies
            else v
            for v in self.variants
        ]
        query = taken(self.query, picked)
        if self.kv_lens:
            lens = tuple(self.kv_lens[draw] for draw in picked)
            return replace(self, query=query, variants=tuple(variants), kv_lens=lens)
        key, value = taken(self.key, picked), taken(self.value, picked)
        return replace(self, query=query, key=key, value=value, variants=tuple(variants))

    def to_json(self) -> dict[str, Any]:
        """Lists, numbers and words."""
        return {name: encoded(value) for name, value in vars(self).items()}


def from_json(stored: Mapping[str, Any]) -> Problem:
    """The problem of `Problem.to_json`."""
    return Problem(**{name: decoded(value) for name, value in stored.items()})


def taken(value: Any, draws: Sequence[int]) -> Any:
    """Some draws of an array, with the strides that each had."""
    if not isinstance(value, np.ndarray):
        return value
    return in_strides(value[list(draws)], value.strides[1:])


def encoded(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biu":
            # The shortest numbers that are these in the array's own type.
            numbers = [float(str(x)) if np.isfinite(x) else str(x) for x in value.ravel()]
        else:
            numbers = value.ravel().tolist()
        return {
            "dtype": value.dtype.name, "shape": value.shape, "strides": value.strides,
            "values": numbers,
        }  # fmt: skip
    if isinstance(value, Variant):
        fields = {name: encoded(field) for name, field in value.fields.items()}
        return {"variant": value.name, "fields": fields, "varies": value.varies}
    if isinstance(value, Mapping):
        return {name: encoded(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
        return [encoded(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return {"float": str(value)}
    return value


def decoded(value: Any) -> Any:
    """The value that `encoded` was given; lists become tuples."""
    if isinstance(value, list):
        return tuple(map(decoded, value))
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "variant" in value:
        fields = {name: decoded(field) for name, field in value["fields"].items()}
        return Variant(value["variant"], fields, value["varies"])
    if "strides" in value:
        dtype = DTYPES.get(value["dtype"]) or np.dtype(value["dtype"])
        wide = np.array([float(x) if dtype.kind not in "biu" else x for x in value["values"]])
        array = wide.astype(dtype).reshape(value["shape"])
        strides = tuple(value["strides"])
        return in_strides(array, strides[1:], strides[0]) if array.ndim else array
    return {name: decoded(entry) for name, entry in value.items()}
