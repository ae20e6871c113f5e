"""Which tiles a block goes over: full ones first, then those that evaluate the mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qkv.backends.torch.triton.tables import Contents, contents, on_device
from qkv.problem.language.expressions import Node
from qkv.problem.spec import Problem
from qkv.problem.tiles import TileGrid, TileKind

__all__ = ["Schedule", "schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tiles of each block, on a device.

    Attributes
    ----------
    counts : Tensor
        int32 `(1 or batch, 1 or heads, blocks, 2)`: how many are full, and how many partial.
    tiles : Tensor
        int32 `(1 or batch, 1 or heads, blocks, tiles)`: the full ones, the partial ones, the rest.
    strides : tuple of int
        Blocks from one batch row to the next, and from one head to the next; 0 if they share.
    """

    counts: Tensor
    tiles: Tensor
    strides: tuple[int, int]


def schedule(
    problem: Problem,
    block_q: int,
    block_kv: int,
    device: torch.device,
    *,
    packed_heads: int = 1,
    of_keys: bool = False,
) -> Schedule:
    """The tiles of each block of queries, or with `of_keys` of each block of keys.

    A block of `packed_heads` heads takes what one of them needs. Tiles at the end, which have rows
    that do not exist, are partial ones.
    """
    spec = problem.spec
    form = _Form(
        spec.mask, spec.q_len, spec.kv_len, block_q, block_kv, packed_heads, of_keys,
        spec.batch_size if "batch" in spec.mask.variables else 1,
        spec.num_heads if "head" in spec.mask.variables else 1,
        device,
    )  # fmt: skip
    tables = problem.operands.tables
    small = contents(tables, spec.mask.tables)
    return _made(form, tables) if small is None else _kept(form, small)


@dataclass(frozen=True, slots=True)
class _Form:
    """What the tiles depend on, beside the tables of the mask."""

    mask: Node
    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    packed_heads: int
    of_keys: bool
    batches: int
    heads: int
    device: torch.device


@lru_cache(maxsize=32)
def _kept(form: _Form, tables: Contents) -> Schedule:
    return _made(form, tables.arrays())


def _made(form: _Form, tables: Mapping[str, NDArray[Any]]) -> Schedule:
    grid = TileGrid(form.mask, tables, form.q_len, form.kv_len, form.block_q, form.block_kv)
    kinds = np.array(
        [[grid.classify(b, h) for h in range(form.heads)] for b in range(form.batches)]
    )
    if form.heads > 1 and form.packed_heads > 1:
        shape = form.batches, form.heads // form.packed_heads, form.packed_heads
        packed = kinds.reshape(*shape, *kinds.shape[2:])
        same = (packed == packed[:, :, :1]).all(2)
        kinds = np.where(same, packed[:, :, 0], np.uint8(TileKind.PARTIAL))
    if form.kv_len % form.block_kv:
        _make_partial(kinds[..., -1])
    if form.of_keys:
        if form.q_len % form.block_q:
            _make_partial(kinds[..., -1, :])
        kinds = kinds.swapaxes(-1, -2)
    order = np.array([2, 1, 0], np.uint8)[kinds]  # Full, partial, empty.
    tiles = np.argsort(order, -1, kind="stable").astype(np.int32)
    counts = np.stack([(kinds == TileKind.FULL).sum(-1), (kinds == TileKind.PARTIAL).sum(-1)], -1)
    blocks = kinds.shape[2]
    strides = (
        kinds.shape[1] * blocks if kinds.shape[0] > 1 else 0,
        blocks if kinds.shape[1] > 1 else 0,
    )
    counted = on_device(torch.from_numpy(counts.astype(np.int32)), form.device)
    return Schedule(counted, on_device(torch.from_numpy(tiles), form.device), strides)


def _make_partial(kinds: NDArray[Any]) -> None:
    kinds[kinds == TileKind.FULL] = TileKind.PARTIAL
