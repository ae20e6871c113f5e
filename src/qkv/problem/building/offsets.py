"""Where the rows of query and key stand: offsets, alignments, and the positions that follow."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import is_integer, shown
from qkv.arguments.readable_checks import as_array
from qkv.errors import AmbiguityError, ArgumentError
from qkv.problem.building.builder import INDEX_LIMIT, Align, Builder
from qkv.problem.language.expressions import Node, Var
from qkv.problem.language.symbols import Expr
from qkv.problem.spec import Positions

__all__ = ["positions_of"]

Array = NDArray[Any]


def positions_of(
    builder: Builder, q_offset: Any, kv_offset: Any
) -> tuple[Positions, dict[str, Node]]:
    """Positions of all rows, and what `q_pos` and `kv_pos` stand for in expressions."""
    shape, restart = builder.shape, builder.restart
    requested = _requested_offset(builder, q_offset)
    align: Align | None = _alignment(requested)
    kv_shift = _offset(kv_offset, "kv_offset", builder)
    q_rank: Array | int
    kv_rank: Array | int
    q_rank, kv_rank = (restart.q_rank, restart.kv_rank) if restart else (shape.q_len, shape.kv_len)
    q_shift: Array
    if requested is None:
        _refuse_ambiguous(builder)
        requested = "start"
    if isinstance(requested, str) and requested == "start":
        q_shift = np.zeros(1, np.int64)
    elif isinstance(requested, str) and restart:
        q_rank, q_shift = restart.q_rank + restart.end_shift, np.zeros(1, np.int64)
    elif isinstance(requested, str):
        kv_lens = builder.kv_lens if builder.kv_lens is not None else np.array([shape.kv_len])
        q_shift = kv_lens - shape.q_len
    else:
        q_shift = requested
    is_shifted = not (isinstance(requested, str) and requested == "start")
    q_pos = _position_node(builder, "q_index", q_rank, q_shift, is_shifted, "q_offset")
    kv_pos = _position_node(
        builder, "kv_index", kv_rank, kv_shift, bool(np.any(kv_shift)), "kv_offset"
    )
    positions = Positions(q_rank, kv_rank, q_shift, kv_shift, align)
    return positions, {"q_pos": q_pos, "kv_pos": kv_pos}


def _offset(value: Any, name: str, builder: Builder) -> Array:
    """One integer offset for each batch row, or a single one."""
    array = as_array(name, value)
    beyond = is_integer(value) and abs(value) > INDEX_LIMIT
    if array.dtype.kind not in "iu" and not beyond:
        words = ", 'start' or 'end'" if name == "q_offset" else ""
        raise ArgumentError(
            f"{name}={shown(value)} is not a whole number.",
            action=f"Pass an integer, an integer array over the leading dimensions{words}.",
        )
    if beyond or (array.size and (array.min() < -INDEX_LIMIT or array.max() > INDEX_LIMIT)):
        raise ArgumentError(f"{name} reaches beyond {INDEX_LIMIT}.", action="Use smaller offsets.")
    rows = builder.batch_rows(array.astype(np.int64), name, 0)
    return rows if array.ndim else np.atleast_1d(array.astype(np.int64))


def _alignment(requested: Any) -> Align | None:
    if not isinstance(requested, str):
        return None
    return "start" if requested == "start" else "end"


def _position_node(
    builder: Builder, index: str, rank: Array | int, shift: Array, is_shifted: bool, label: str
) -> Node:
    position: Expr = Expr(Var(index))
    if not isinstance(rank, int):
        row = builder.batch if len(rank) > 1 else 0
        position = builder.table(rank, f"{label} ranks")[row, position]
    if is_shifted:
        is_single = len(shift) == 1
        offsets = builder.table(shift[0] if is_single else shift, label)
        position = position + offsets[() if is_single else builder.batch]
    return position.node


def _requested_offset(builder: Builder, q_offset: Any) -> Any:
    """The requested positions of the query rows: "start", "end", offsets, or None."""
    requests: list[tuple[str, Any]] = list(builder.alignments)
    if isinstance(q_offset, str):
        if q_offset not in ("start", "end"):
            raise ArgumentError(
                f"q_offset={shown(q_offset)} is not 'start' or 'end'.",
                action="Pass one of the two words, or integers.",
            )
        requests.append(("q_offset", q_offset))
    elif q_offset is not None:
        requests.append(("q_offset", _offset(q_offset, "q_offset", builder)))
    if not requests:
        return None
    shape = builder.shape
    ends: Array = np.array([shape.kv_len - shape.q_len])
    if builder.kv_lens is not None:
        ends = builder.kv_lens - shape.q_len
    resolved = {"start": np.zeros(1, np.int64), "end": ends}
    _, first = requests[0]
    for _, other in requests[1:]:
        both_words = isinstance(first, str) and isinstance(other, str)
        if both_words and first == other:
            continue
        a = resolved[first] if isinstance(first, str) else first
        b = resolved[other] if isinstance(other, str) else other
        if both_words or builder.restart or np.any(a != b):
            raise AmbiguityError(
                "two statements put the query rows at different positions.",
                [(source, f"{request}" if isinstance(request, str) else f"offset {request}")
                 for source, request in requests],
                "Say it once, either in the mask or with q_offset.",
            )  # fmt: skip
    alignments = [s for _, s in requests if isinstance(s, str)]
    return alignments[0] if alignments else first


def _refuse_ambiguous(builder: Builder) -> None:
    shape = builder.shape
    readers = [
        stage.label
        for stage in (*builder.scores, *builder.masks)
        if {"q_pos", "kv_pos"} <= stage.node.variables
    ]
    if builder.rotation:
        readers.append(builder.rotation[0].label)
    unequal = (
        bool(np.any(builder.restart.end_shift)) if builder.restart else shape.q_len != shape.kv_len
    )
    if readers and unequal:
        where = "in a segment " if builder.restart else ""
        raise AmbiguityError(
            f"{readers[0]} compares positions, and {where}q_len={shape.q_len} differs from "
            f"kv_len={shape.kv_len}: where do the queries stand?",
            [
                ("start", "row 0 of query at position 0 (torch, JAX)"),
                ("end", "last row of query at the last key (flash-attn, decoding)"),
            ],
            'Pass q_offset="start", q_offset="end" or integers.',
        )
