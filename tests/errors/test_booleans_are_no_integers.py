"""True and False are integers of Python; where a number is asked for they are mistakes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.arguments.declarations import checked
from qkv.cache import PageAllocator
from qkv.errors import ArgumentError
from qkv.hf.positions import positions_of
from qkv.inspection.heads.unknown_tokens import unknown_id_of
from qkv.inspection.models.keep import require_keep

X = np.random.default_rng(0).normal(size=(2, 4, 3))
BLOCKS, TABLE = np.ones((4, 4), bool), np.zeros((2, 2))
FLAGS = [True, False, np.True_, np.False_]


def weights() -> Any:
    return qkv.inspect(X, X, X).weights


def released(flag: Any) -> None:
    """Page 1 is held twice, and 1 == True."""
    pages = PageAllocator(3)
    pages.share(pages.take(3))
    pages.release([1, flag])


ASKED: dict[str, Callable[[Any], Any]] = {
    "block_q": lambda flag: qkv.BlockSparse(BLOCKS, flag, 1),
    "block_kv": lambda flag: qkv.BlockSparse(BLOCKS, 1, flag),
    "stride": lambda flag: qkv.Strided(flag),
    "left": lambda flag: qkv.SlidingWindow(flag, 0),
    "max_distance": lambda flag: qkv.RelativeBias(TABLE, False, flag),
    "rotary_dim": lambda flag: qkv.RoPE(rotary_dim=flag),
    "seed": lambda flag: qkv.Dropout(0.1, flag),
    "embed_dim": lambda flag: qkv.SinusoidalPositions(flag),
    "num_threads": lambda flag: qkv.set_num_threads(flag),
    "q_index": lambda flag: qkv.explain(X, X, X, q_index=flag),
    "explain block_kv": lambda flag: qkv.explain(X, X, X, block_kv=flag),
    "k": lambda flag: qkv.inspect(X, X, X).top(flag),
    "axis": lambda flag: weights().sum(flag),
    "axis of several": lambda flag: weights().sum((0, flag)),
    "keep": lambda flag: require_keep([flag]),
    "page": released,
}


@pytest.mark.parametrize("flag", FLAGS, ids=repr)
@pytest.mark.parametrize("name", ASKED)
def test_a_boolean_is_refused(name: str, flag: Any) -> None:
    with pytest.raises(ArgumentError, match=r"True|False"):
        ASKED[name](flag)


@pytest.mark.parametrize("name", ["num_threads", "q_index"])
def test_a_boolean_tensor_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"tensor\(True\)"):
        ASKED[name](torch.tensor(True))


def test_an_integer_or_something_else() -> None:
    @checked
    def of(given: int | str) -> Any:
        return given

    assert [of(3), of(np.int8(3)), of("3")] == [3, 3, "3"]  # type: ignore[arg-type]
    for flag in FLAGS:
        with pytest.raises(ArgumentError, match="is not a int or str"):
            of(flag)


def test_what_a_model_says_of_itself() -> None:
    assert positions_of(SimpleNamespace(max_position_embeddings=True)) is None
    assert unknown_id_of(SimpleNamespace(unk_token_id=True)) is None
