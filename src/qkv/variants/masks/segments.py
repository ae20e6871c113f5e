"""Packed sequences: several sequences in one row, each of which attends only to itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv._dynamo import made_outside
from qkv.arguments.readable_checks import as_array
from qkv.errors import DTypeError, ShapeError
from qkv.problem.building.builder import Builder, Restart, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import Role
from qkv.variants.masks.algebra import MaskVariant


@dataclass(frozen=True, eq=False, repr=False)
class Segments(MaskVariant):
    """A query attends to keys of its own segment; positions restart in each.

    Parameters
    ----------
    q_ids : integer array (..., q_len)
        Segment of each query row; equal numbers are one segment.
    kv_ids : integer array (..., kv_len), optional
        Segment of each key row; `q_ids` if not given.

    Raises
    ------
    ShapeError, DTypeError
        If the ids do not fit the rows, or are not integers.
    AmbiguityError
        If segments differ in query and key length and a variant reads positions: say
        `q_offset="start"` or `"end"`, which then holds in each segment.

    Notes
    -----
    A row's position is its rank among the rows with its id. Tiles of two segments that do not meet
    are skipped.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((3, 4))
    >>> packed = qkv.Segments.from_cu_seqlens([0, 2, 3])
    >>> qkv.inspect(x, x, x, packed).weights[...]
    array([[0.5, 0.5, 0. ],
           [0.5, 0.5, 0. ],
           [0. , 0. , 1. ]])
    """

    roles: ClassVar[Mapping[str, Role]] = {"q_ids": "per_step", "kv_ids": "per_step"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    q_ids: ArrayLike
    kv_ids: ArrayLike | None = None

    @classmethod
    @made_outside("Segments.from_cu_seqlens", "reads the values of its arrays")
    def from_cu_seqlens(cls, cu_q: ArrayLike, cu_kv: ArrayLike | None = None) -> Segments:
        """Make segments of cumulative lengths `[0, n0, n0 + n1, ...]`, as varlen interfaces take.

        Raises
        ------
        ShapeError
            If the lengths do not start at 0 and rise, or are of different numbers of sequences.
        """
        cu_q = as_array("cu_q", cu_q)
        cu_kv = None if cu_kv is None else as_array("cu_kv", cu_kv)
        if cu_kv is not None and cu_q.shape != cu_kv.shape:
            raise ShapeError(
                f"cu_q is of {cu_q.size - 1} sequences and cu_kv of {cu_kv.size - 1}.",
                [("cu_q", f"{cu_q!s:.100}"), ("cu_kv", f"{cu_kv!s:.100}")],
                "Give each sequence of queries one of keys; one without keys repeats its end.",
            )
        return cls(
            _ids_from_cu_seqlens(cu_q, "cu_q"),
            None if cu_kv is None else _ids_from_cu_seqlens(cu_kv, "cu_kv"),
        )

    def lower(self, builder: Builder) -> None:
        shape = builder.shape
        q_ids = _rows(self.q_ids, "q_ids", shape.q_len, "q_len")
        if self.kv_ids is None and shape.q_len != shape.kv_len:
            raise ShapeError(
                f"q_len={shape.q_len} and kv_len={shape.kv_len} differ; Segments has q_ids only.",
                action="Pass kv_ids as well.",
            )
        kv_ids = q_ids
        if self.kv_ids is not None:
            kv_ids = _rows(self.kv_ids, "kv_ids", shape.kv_len, "kv_len")
            _refuse_other_sign(self.q_ids, self.kv_ids)
        q_rows = builder.batch_rows(q_ids, "q_ids", 1)
        kv_rows = builder.batch_rows(kv_ids, "kv_ids", 1)
        if q_ids.ndim == 1:
            q_rows = q_rows[:1]
        if kv_ids.ndim == 1:
            kv_rows = kv_rows[:1]
        q_rank, kv_rank = _ranks(q_rows), _ranks(kv_rows)
        builder.restart_positions(Restart(q_rank, kv_rank, _end_shift(q_rows, kv_rows)))
        q_axes = [("q_len", shape.q_len, builder.q_index)]
        kv_axes = [("kv_len", shape.kv_len, builder.kv_index)]
        builder.mask(
            builder.broadcast(q_ids, "q_ids", q_axes)
            == builder.broadcast(kv_ids, "kv_ids", kv_axes)
        )

    def naive_rows(self, dense: Dense) -> None:
        q_ids, kv_ids = self._segment_ids(dense)
        starts = dense.q_pos - np.arange(len(q_ids)), dense.kv_pos - np.arange(len(kv_ids))
        q_pos = [sum(1 for b in q_ids[:i] if b == a) for i, a in enumerate(q_ids)]
        kv_pos = [sum(1 for b in kv_ids[:i] if b == a) for i, a in enumerate(kv_ids)]
        if dense.align == "end":
            for i, a in enumerate(q_ids):
                q_pos[i] += int(np.sum(kv_ids == a)) - int(np.sum(q_ids == a))
            starts = (np.zeros_like(starts[0]), starts[1])
        dense.q_pos = np.asarray(q_pos, np.int64) + starts[0]
        dense.kv_pos = np.asarray(kv_pos, np.int64) + starts[1]

    def naive(self, dense: Dense) -> None:
        q_ids, kv_ids = self._segment_ids(dense)
        for i, a in enumerate(q_ids):
            for j, b in enumerate(kv_ids):
                if a != b:
                    dense.allowed[i, j] = False

    def _segment_ids(self, dense: Dense) -> tuple[NDArray[Any], NDArray[Any]]:
        q_ids = dense.batch_entry(self.q_ids, trailing=1)
        return q_ids, q_ids if self.kv_ids is None else dense.batch_entry(self.kv_ids, trailing=1)

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Segments]:
        q_ids = np.sort(rng.integers(0, 3, shape.q_len))
        kv_ids = np.sort(rng.integers(0, 3, (*shape.batch_shape, shape.kv_len)), axis=-1)
        if shape.q_len == shape.kv_len:
            return (cls(q_ids), cls(q_ids, kv_ids))
        return (cls(q_ids, kv_ids),)


def _ids_from_cu_seqlens(cu_seqlens: ArrayLike, name: str) -> NDArray[np.int64]:
    edges = as_array(name, cu_seqlens)
    are_edges = edges.ndim == 1 and edges.dtype.kind in "iu" and len(edges) > 0
    # Differences of unsigned integers would wrap around where the lengths decrease.
    ends = edges.astype(np.int64) if are_edges else np.array([0, -1])
    lengths = ends[1:] - ends[:-1]
    if (lengths < 0).any() or edges[0] != 0:
        raise ShapeError(
            f"{name} is not a rising sequence of integers that starts at 0.",
            [(name, str(edges)[:200])],
            "Pass cumulative lengths, as in [0, 3, 7] for segments of 3 and 4 rows.",
        )
    return np.repeat(np.arange(len(lengths)), lengths)


def _rows(ids: ArrayLike, name: str, length: int, length_name: str) -> NDArray[Any]:
    array = as_array(name, ids)
    if array.dtype.kind not in "iu":
        raise DTypeError(
            f"{name} has dtype {array.dtype}, not an integer type.",
            action="Number the segments with integers.",
        )
    if array.ndim < 1 or array.shape[-1] != length:
        raise ShapeError(
            f"{name} has shape {array.shape}; {length_name}={length}.",
            action=f"Give one id for each row: shape (..., {length}); or cumulative lengths that "
            f"end at {length}, in which padding behind the last sequence is a segment of its own.",
        )
    is_read = array.dtype.isnative and array.dtype != np.uint64
    return array if is_read else array.astype(np.int64)


def _refuse_other_sign(q_ids: ArrayLike, kv_ids: ArrayLike) -> None:
    """Raise for ids that only one of the types has: read as 64 bits, 2**64 - 1 would be -1."""
    given = [("q_ids", np.asarray(q_ids)), ("kv_ids", np.asarray(kv_ids))]
    if given[0][1].dtype.kind == given[1][1].dtype.kind:
        return
    for name, ids in given:
        largest = ids.max(initial=0)
        if largest > np.iinfo(np.int64).max:
            raise DTypeError(
                f"{name} has the segment {largest}, and the other ids are signed integers, which "
                "end at 2**63 - 1.",
                [(other, f"{array.dtype} {array.shape}") for other, array in given],
                "Pass ids of one integer type.",
            )


def _ranks(ids: NDArray[Any]) -> NDArray[np.int64]:
    """Number of earlier rows with the same id."""
    ranks = np.empty(ids.shape, np.int64)  # The type of the ids may be too small for ranks.
    for row, out in zip(ids, ranks, strict=True):
        order = np.argsort(row, kind="stable")
        ordered = row[order]
        first = np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(row)]
        start = np.maximum.accumulate(np.where(first, np.arange(len(row)), 0))
        out[order] = np.arange(len(row)) - start
    return ranks


def _end_shift(q_ids: NDArray[Any], kv_ids: NDArray[Any]) -> NDArray[np.int64]:
    """Key rows less query rows of each query row's segment."""
    rows = max(len(q_ids), len(kv_ids))
    q_ids = np.broadcast_to(q_ids, (rows, q_ids.shape[1]))
    kv_ids = np.broadcast_to(kv_ids, (rows, kv_ids.shape[1]))
    shift = np.zeros(q_ids.shape, np.int64)
    for q_row, kv_row, out in zip(q_ids, kv_ids, shift, strict=True):
        unique_ids, inverse, q_count = np.unique(q_row, return_inverse=True, return_counts=True)
        ordered = np.sort(kv_row)
        kv_count = np.searchsorted(ordered, unique_ids, "right") - np.searchsorted(
            ordered, unique_ids
        )
        out[:] = (kv_count - q_count)[inverse]
    return shift
