"""Tokens that a model does not know: all have one id, and are not the same token for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked_integer, is_integer
from qkv.arrays import is_array
from qkv.arrays.views import view
from qkv.errors import DTypeError, ShapeError

__all__ = ["ids_of", "sentences_of_unknown", "unknown_id_of", "without_unknown"]

_UNKNOWN = -1
"""The id of an unknown token, for `head_scores`."""


def unknown_id_of(tokenizer: Any) -> int | None:
    """The id that a tokenizer of transformers gives to what it does not know.

    None if it has no such id, or one that also begins or ends texts: a byte-level tokenizer knows
    everything, and GPT-2's names its end of texts there.
    """
    unknown_id = getattr(tokenizer, "unk_token_id", None)
    ends = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos")]
    return unknown_id if is_integer(unknown_id) and unknown_id not in ends else None


def ids_of(tokens: Any) -> NDArray[Any]:
    """Token ids as an array.

    Raises
    ------
    ShapeError
        They are rows of different lengths.
    DTypeError
        They are not numbers.
    """
    try:
        ids = view(tokens, "tokens") if is_array(tokens) else np.asarray(tokens)
    except ValueError as error:
        raise ShapeError(
            "the rows of tokens differ in length.",
            action="Pad them, and pass real=, which is False where a row is padding.",
        ) from error
    if ids.dtype.kind not in "biuf":
        raise DTypeError(
            f"tokens has dtype {ids.dtype}, and no ids.",
            action="Pass the integers that the model reads; record.texts names tokens.",
        )
    return ids


def without_unknown(tokens: Any, unknown_id: int | None) -> NDArray[Any] | None:
    """Token ids as `head_scores` takes them: those of unknown tokens are negative.

    Raises
    ------
    ArgumentError
        `unknown_id` is no number, such as the text of the unknown token.
    """
    if tokens is None:
        return None
    ids = ids_of(tokens)
    if unknown_id is None:
        return ids
    unknown_id = checked_integer("unknown_id", unknown_id)
    if ids.dtype.kind == "u":  # Without a sign there are no negative ids.
        ids = ids.astype(np.int64)
    return np.where(ids == unknown_id, _UNKNOWN, ids)


def sentences_of_unknown(
    tokens: NDArray[Any] | None, unknown_id: int | None, counted: Sequence[NDArray[Any]]
) -> list[str]:
    """How many tokens (batch, length) are unknown, if any are.

    `counted` says which queries of each layer are real; padding is not part of the text.
    """
    if tokens is None or unknown_id is None:
        return []
    real = next((of for of in counted if of.shape == tokens.shape), np.ones(tokens.shape, bool))
    unknown, count = int((tokens == unknown_id)[real].sum()), int(real.sum())
    if not unknown:
        return []
    are = "is" if unknown == 1 else "are"
    return [
        f"{unknown} of {count} tokens {are} unknown to this model, which cannot tell them apart."
    ]
