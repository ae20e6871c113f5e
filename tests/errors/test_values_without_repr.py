"""A value that cannot be shown is refused all the same: its class stands in the message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.arguments.declarations import shown
from qkv.errors import QkvError

X = np.eye(3)


class Silent:
    """Has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__


CALLS: dict[str, Callable[[Any], Any]] = {
    "num_threads": qkv.set_num_threads,
    "q_index": lambda given: qkv.explain(X, X, X, q_index=given),
    "block_q": lambda given: qkv.BlockSparse(X > 0, given, 1),
    "stride": qkv.Strided,
    "one side": qkv.SlidingWindow,
    "left": lambda given: qkv.SlidingWindow(given, 0),
    "no seed": lambda given: qkv.Dropout(given),  # type: ignore[call-arg]  # a user's mistake
    "layout of RoPE": lambda given: qkv.RoPE(layout=given),
    "base": lambda given: qkv.RoPE(base=given),
    "random blocks": lambda given: qkv.RandomBlocks(given, 1, 0),
    "embed_dim": qkv.SinusoidalPositions,
    "variant": lambda given: qkv.attention(X, X, X, given),
    "q_offset": lambda given: qkv.attention(X, X, X, q_offset=given),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_has_no_text(name: str) -> None:
    with pytest.raises(QkvError, match="Silent"):
        CALLS[name](Silent())


def test_as_many_characters_as_asked_for() -> None:
    assert [len(shown("a" * 99)), shown("a" * 99, 5), shown(Silent(), 5)] == [
        60,
        "'aaaa",
        "(Silent)",
    ]
