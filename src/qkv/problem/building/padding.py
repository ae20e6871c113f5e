"""What to pass for a padding mask (batch, kv_len), which does not broadcast to the scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["padding_index"]


def padding_index(scores: tuple[int, ...], array: NDArray[Any], name: str) -> tuple[str, str]:
    """The index that makes it broadcast, and `KeyLengths` where the real keys come first.

    Both are empty for arrays of another shape, and for those that broadcast as they are.
    """
    *batch, _, q_len, kv_len = scores
    if not batch or array.shape != (*batch, kv_len):
        return "", ""
    if len(batch) == 1 and batch[0] in (1, q_len):
        return "", ""
    index = "[:, None, None, :]" if len(batch) == 1 else "[..., None, None, :]"
    if array.dtype.kind not in "biu" or (array[..., 1:] > array[..., :-1]).any():
        return index, ""
    is_mask = bool(np.isin(array, (0, 1)).all())
    return index, f"qkv.KeyLengths({name}.sum(-1))" if is_mask else ""
