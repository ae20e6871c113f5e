"""Query and key of a layer, kept so that its weights can be computed later and elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.call.binding.bound import BoundCall, bind
from qkv.call.binding.flatten import copied
from qkv.call.binding.options import OptionValues
from qkv.call.checked import check_call
from qkv.call.inspected import Inspected, attend_for_inspection
from qkv.inspection.records.variant_data import from_data, to_data
from qkv.inspection.weights.lazy_weights import LazyWeights
from qkv.inspection.weights.replay import Replay

__all__ = ["KeptInputs"]

Array = NDArray[Any]

_OPTIONS = ("scale", "q_offset", "kv_offset")


@dataclass(frozen=True, slots=True, eq=False)
class KeptInputs:
    """What the weights of one layer come from, but for the lse of its rows.

    Nobody can write to its query and key, and its options are copies.

    Attributes
    ----------
    query : array (batch, num_heads, q_len, head_dim)
    key : array (batch, num_kv_heads, kv_len, head_dim)
    variants : tuple
        Without dropout; rows of padding are masked.
    options : mapping
        scale, q_offset and kv_offset.
    """

    query: Array
    key: Array
    variants: tuple[Any, ...]
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("query", "key"):
            view = getattr(self, name).view()
            view.setflags(write=False)
            object.__setattr__(self, name, view)
        object.__setattr__(self, "options", {name: copied(self.options[name]) for name in _OPTIONS})

    def weights(self, lse: Array) -> LazyWeights:
        """The weights, computed where they are sliced.

        Parameters
        ----------
        lse : array (batch, num_heads, q_len)
        """
        batch, num_heads, q_len, _ = self.query.shape
        call = check_call(self._bound())
        shape = (batch, num_heads, q_len, self.key.shape[2])
        if lse.shape != shape[:3]:
            raise ValueError(f"lse has shape {lse.shape}, not {shape[:3]}")
        return LazyWeights(Replay(call.problem, lse), shape)

    def inspected(self) -> Inspected:
        """`qkv.inspect` of them; the output is that of values of zero."""
        return attend_for_inspection(self._bound())

    def _bound(self) -> BoundCall:
        # Weights need no values; one number for each key is the least that there can be.
        value = np.broadcast_to(np.zeros((), self.key.dtype), (*self.key.shape[:3], 1))
        return bind(self.query, self.key, value, self.variants, OptionValues(**self.options))

    def to_data(self, arrays: dict[str, Array], place: str) -> dict[str, Any]:
        """Names and numbers for JSON; arrays are put into `arrays`."""
        arrays[f"{place}.q"], arrays[f"{place}.k"] = self.query, self.key
        return {
            "variants": to_data(self.variants, arrays, f"{place}.variants"),
            **{name: to_data(self.options[name], arrays, f"{place}.{name}") for name in _OPTIONS},
        }

    @classmethod
    def from_data(cls, data: Any, arrays: Mapping[str, Array], place: str) -> KeptInputs:
        """What `to_data` was called on."""
        query, key = arrays[f"{place}.q"], arrays[f"{place}.k"]
        if query.ndim != 4 or key.ndim != 4 or 0 in key.shape:
            raise ValueError(f"{place} has a query or a key that has not four dimensions")
        options = {name: from_data(data[name], arrays) for name in _OPTIONS}
        variants = from_data(data["variants"], arrays)
        if not isinstance(variants, tuple):
            raise ValueError(f"{place} has no list of variants")
        return cls(query, key, variants, options)
