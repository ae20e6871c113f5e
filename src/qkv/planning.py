"""The plan of a problem: its backend, tiles, operations and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import (
    Choice,
    DeviceBackend,
    Refusal,
    backends,
    describe,
    refusals,
)
from qkv.ledger import attention_operations, memory
from qkv.problem.scores import Scores
from qkv.problem.spec import Problem
from qkv.problem.tiles import TileCounts, TileGrid, TileKind

Array = NDArray[Any]

_SIDE = 128
"""Tiles, or squares of tiles, along each side of what is classified at once."""
_TILES = 2**20
"""Tiles that are classified at once where their number is not what takes time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The backend, tiles, operations and bytes of one call, as `qkv.plan` gives them.

    Attributes
    ----------
    problem : str
        The problem in one line.
    backend : str
        The backend that will run it.
    refusals : dict of str to tuple of Refusal
        Why each other backend will not; empty for one that could, if it is asked for.
    block_q, block_kv : int
        Queries and keys of one tile.
    tiles : TileCounts
        Empty tiles are skipped, full ones need no mask, partial ones evaluate it.
    operations : int
        Floating operations of the two products, a multiply and an add counted as two:
        `2 (head_dim + v_head_dim)` for each pair in a tile that is not empty.
    output_bytes, scratch_bytes : int
        Memory of output and lse, and what the backend takes beyond.
    dense_bytes : int
        What the score matrix would take in the type of computation; never allocated unless the
        backend is `reference`.
    notes : tuple of str
        What the backend says of this machine, as that its matrix tiles may not be used.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((1000, 64), np.float32)
    >>> plan = qkv.plan(x, x, x, qkv.Causal(), backend="blocked")
    >>> plan.tiles.empty > 0, plan.dense_bytes
    (True, 4000000)
    """

    problem: str
    backend: str
    refusals: dict[str, tuple[Refusal, ...]]
    block_q: int
    block_kv: int
    tiles: TileCounts
    operations: int
    output_bytes: int
    scratch_bytes: int
    dense_bytes: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        tiles = self.tiles
        counted = f"{tiles.full:,} full, {tiles.partial:,} partial, {tiles.empty:,} skipped"
        taken = f"{memory(self.output_bytes)} of output and {memory(self.scratch_bytes)} of scratch"
        rows = [
            ("problem", self.problem),
            ("backend", self.backend),
            ("tiles", f"{tiles.total:,} of {self.block_q} x {self.block_kv}: {counted}"),
            ("operations", f"{self.operations:,}"),
            ("memory", f"{taken} (the score matrix would take {memory(self.dense_bytes)})"),
        ]
        rows += [("note", text) for text in self.notes]
        for name, reasons in self.refusals.items():
            rows.append((name, "; ".join(map(str, reasons)) or f'could run it: backend="{name}"'))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def make_plan(problem: Problem, choice: Choice, library: str) -> Plan:
    """The plan of a checked problem for the backend that was chosen.

    `library` is that of the caller's arrays, which a backend of that library may take too.
    """
    spec = problem.spec
    backend = choice.backend
    given = replace(spec, library=library)
    block_q, block_kv = backend.blocks(spec)
    grid = Scores(problem, spec.compute_dtype).grid(block_q, block_kv)
    tiles, pairs = _count(grid, spec.batch_size, spec.num_heads)
    rows = spec.batch_size * spec.num_heads * spec.q_len
    itemsize = spec.compute_dtype.itemsize
    return Plan(
        problem=describe(spec),
        backend=backend.name,
        refusals={
            b.name: refusals(b, given if isinstance(b, DeviceBackend) else spec)
            for b in backends()
            if b.name != backend.name
        },
        block_q=block_q,
        block_kv=block_kv,
        tiles=tiles,
        operations=attention_operations(pairs, spec.head_dim, spec.v_head_dim),
        output_bytes=rows * (problem.operands.query.itemsize * spec.v_head_dim + itemsize),
        scratch_bytes=backend.scratch_bytes(spec),
        dense_bytes=rows * spec.kv_len * itemsize,
        notes=notes(spec) if (notes := getattr(backend, "notes", None)) is not None else (),
    )


def _count(grid: TileGrid, batches: int, heads: int) -> tuple[TileCounts, int]:
    """Tiles of each kind and pairs in tiles that are not empty, over all batch rows and heads."""
    counts = dict.fromkeys(TileKind, 0)
    pairs = 0
    per_batch, per_head = ("batch" in grid.depends_on), ("head" in grid.depends_on)
    repeats = (1 if per_batch else batches) * (1 if per_head else heads)
    for batch in range(batches if per_batch else 1):
        for head in range(heads if per_head else 1):
            for kind, tiles, of_tiles in _parts(grid, batch, head):
                counts[kind] += tiles * repeats
                pairs += of_tiles * repeats if kind != TileKind.EMPTY else 0
    return (
        TileCounts(counts[TileKind.EMPTY], counts[TileKind.PARTIAL], counts[TileKind.FULL]),
        pairs,
    )


def _parts(grid: TileGrid, batch: int, head: int) -> Iterator[tuple[TileKind, int, int]]:
    """Kind, number of tiles and number of pairs of parts that make up a grid."""
    if not grid.is_local:
        step = max(1, _TILES // max(grid.kv_blocks, 1))
        for first in range(0, grid.q_blocks, step):
            rows = range(first, min(first + step, grid.q_blocks))
            yield from _parts_of(grid, (batch, head), 1, rows, range(grid.kv_blocks))
        return
    factor = 1
    while max(grid.q_blocks, grid.kv_blocks) > _SIDE * factor:
        factor *= _SIDE
    rows, columns = (range(-(-blocks // factor)) for blocks in (grid.q_blocks, grid.kv_blocks))
    yield from _parts_of(grid, (batch, head), factor, rows, columns)


def _parts_of(
    grid: TileGrid, place: tuple[int, int], factor: int, rows: range, columns: range
) -> Iterator[tuple[TileKind, int, int]]:
    """The same of squares of `factor` tiles a side, of which only partial ones are divided further.

    If all pairs of a square are allowed, or none, the same holds for each of its tiles.
    """
    coarse = replace(grid, block_q=factor * grid.block_q, block_kv=factor * grid.block_kv)
    kinds = coarse.classify(*place, rows.start, rows.stop, columns.start, columns.stop)
    q_sizes = _sizes(rows, coarse.block_q, grid.q_len)
    kv_sizes = _sizes(columns, coarse.block_kv, grid.kv_len)
    for kind in TileKind:
        if kind != TileKind.PARTIAL or factor == 1:
            chosen = kinds == kind
            tiles = -(-q_sizes // grid.block_q) @ chosen @ -(-kv_sizes // grid.block_kv)
            yield kind, int(tiles), int(q_sizes @ chosen @ kv_sizes)
    if factor > 1:
        inside = factor // _SIDE
        q_blocks, kv_blocks = -(-grid.q_blocks // inside), -(-grid.kv_blocks // inside)
        for i, j in np.argwhere(kinds == TileKind.PARTIAL).tolist():
            part = _within(rows[i], q_blocks), _within(columns[j], kv_blocks)
            yield from _parts_of(grid, place, inside, *part)


def _sizes(blocks: range, size: int, length: int) -> Array:
    """How many of `length` rows each of some blocks has."""
    starts = np.arange(blocks.start, blocks.stop, dtype=np.int64) * size
    return np.asarray(np.minimum(starts + size, length) - starts)


def _within(block: int, blocks: int) -> range:
    """The finer blocks of a block, of which there are `blocks` in all."""
    return range(block * _SIDE, min((block + 1) * _SIDE, blocks))
