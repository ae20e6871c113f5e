"""The variant that a bare array means."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.variants.masks.dense_mask import Mask
from qkv.variants.scores.bias import bias_from_array

__all__ = ["as_variant"]


def as_variant(variant: Any) -> Any:
    """A bare boolean array is a mask, any other array a bias (which refuses integers)."""
    if hasattr(variant, "lower") or not isinstance(variant, np.ndarray):
        return variant
    return Mask(variant) if variant.dtype.kind == "b" else bias_from_array(variant)
