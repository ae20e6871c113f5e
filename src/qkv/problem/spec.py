"""A problem in two halves: `Spec`, its structure without arrays, and `Operands`, its values.

They are split because a description without arrays is what caching, compiled kernels, tracing and
files need. Structure decides which code runs; lengths, offsets, slopes and seeds do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qkv.problem.language.expressions import SCORE, TRUE, Kind, Node, conjunction, substitute
from qkv.problem.stored_rows import Rows, Storage, StoredRows, whole_rows

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table of the expressions: its name in them, what it is, its kind, type and rank."""

    name: str
    label: str
    kind: Kind
    dtype: str
    ndim: int


@dataclass(frozen=True, slots=True)
class Stage:
    """The effect of one variant: a new score in terms of `score`, or a condition."""

    label: str
    node: Node


@dataclass(frozen=True, slots=True)
class Rotation:
    """How query and key rows are rotated before the product (RoPE)."""

    label: str
    layout: Literal["half_split", "interleaved"]
    rotary_dim: int


_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Spec:
    """The structure of one attention problem; hashable, holds no arrays.

    Score stages and mask stages are expressions over `q_index`, `kv_index`, `head`, `batch`,
    `score` and the tables; positions have been replaced by their definitions. Keys and values are
    arrays of `dtype` where nothing is said of their storage. `library` and `device` say which
    arrays a backend is given: NumPy arrays in main memory, or tensors on a kind of device.
    """

    dtype: str
    batch_shape: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    scores: tuple[Stage, ...] = ()
    masks: tuple[Stage, ...] = ()
    tables: tuple[TableSpec, ...] = ()
    rotation: Rotation | None = None
    sinks: bool = False
    dropout: bool = False
    key_storage: Storage | None = None
    value_storage: Storage | None = None
    summary: str = ""
    library: str = "numpy"
    device: str = "cpu"

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The type of scores, softmax and sums."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    @property
    def batch_size(self) -> int:
        return int(np.prod(self.batch_shape, dtype=np.int64))

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 0

    @property
    def gathered_bytes(self) -> int:
        """Bytes that `Problem.gathered` allocates for keys, values and a widened query."""
        storages = self.key_storage, self.value_storage
        if not any(storages):
            return 0
        wide = any(storage and storage.dtype == "int8" for storage in storages)
        item = self.compute_dtype.itemsize if wide else _ITEM_BYTES[self.dtype]
        rows = self.num_kv_heads * self.kv_len
        size = sum(
            rows * dim
            for dim, storage in zip((self.head_dim, self.v_head_dim), storages, strict=True)
            if storage or (wide and _ITEM_BYTES[self.dtype] != item)
        )
        if wide and _ITEM_BYTES[self.dtype] != item:
            size += self.num_heads * self.q_len * self.head_dim
        return self.batch_size * size * item

    @property
    def score(self) -> Node:
        """All score stages as one expression of `score`."""
        node: Node = SCORE
        for stage in self.scores:
            node = substitute(stage.node, {"score": node})
        return node

    @property
    def mask(self) -> Node:
        """All mask stages as one condition; `TRUE` when there are none."""
        return conjunction([stage.node for stage in self.masks])

    @property
    def may_forbid(self) -> bool:
        """Whether a pair may be forbidden: by a mask, or by a score mod that gives -inf."""
        return self.score != SCORE or self.mask != TRUE

    @property
    def without_expressions(self) -> Spec:
        """What is the same for every mask and score mod."""
        return replace(self, scores=(), masks=(), tables=(), dropout=False)

    @property
    def kernel_key(self) -> Spec:
        """The structure that generated code depends on: no lengths, no batch, no labels."""
        return replace(
            self,
            batch_shape=(),
            num_heads=0,
            num_kv_heads=0,
            q_len=0,
            kv_len=0,
            scores=tuple(replace(s, label="") for s in self.scores),
            masks=tuple(replace(s, label="") for s in self.masks),
            tables=tuple(replace(t, label="") for t in self.tables),
            rotation=replace(self.rotation, label="") if self.rotation else None,
            summary="",
            library="numpy",
            device="cpu",
        )


@dataclass(frozen=True, slots=True)
class Dropout:
    """Probability of dropping a weight, and the seed of the counter-based generator."""

    p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Angles:
    """The rotation angle of each row: position times `inv_freq`, in radians.

    `q_pos` and `kv_pos` are `(1 or batch, length)`. Rotated entries of query and key are also
    multiplied by `factor`.
    """

    inv_freq: Array
    q_pos: Array
    kv_pos: Array
    factor: float = 1.0

    def rows(self, side: str) -> int:
        """1 when all batch rows of this side ("q" or "kv") share their positions."""
        return len(self.q_pos if side == "q" else self.kv_pos)

    def cos_sin(self, side: str, batch: int) -> tuple[Array, Array]:
        """Cosines and sines `(length, rotary_dim / 2)` times `factor`, in float64."""
        positions = (self.q_pos if side == "q" else self.kv_pos)[batch]
        angle = positions[:, None].astype(np.float64) * self.inv_freq
        return self.factor * np.cos(angle), self.factor * np.sin(angle)


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The origin of a table: the variant, the index among its tables, and its array.

    Where that array has one entry for each batch row, `broadcast_from` is the array that the
    variant gave, and `broadcast_shape` the shape of the batch, to which it was broadcast.
    """

    variant: Any
    place: int
    array: Array
    broadcast_from: Array | None = None
    broadcast_shape: tuple[int, ...] = ()

    @property
    def source(self) -> Array:
        """The array that the variant gave."""
        return self.array if self.broadcast_from is None else self.broadcast_from

    def holds(self, array: Array) -> bool:
        """Whether the variant gave this array as it is, and not one that it computed."""
        return self.source is array or _memory(self.source) == _memory(array)


def _memory(array: Array) -> tuple[Any, ...]:
    """Where the entries of an array lie, and in which order."""
    if not array.size:
        return (array.dtype,)
    lies = array.__array_interface__["data"][0], array.dtype
    if array.flags.c_contiguous:
        return (*lies, array.size)
    squeezed = array.squeeze()
    return (*lies, squeezed.shape, squeezed.strides)


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of all rows. Arrays are made on request, since there may be millions of rows.

    A rank is `(1 or batch, length)`, or the length where ranks are 0, 1, 2, ...; a shift is
    `(1 or batch,)` and is added to it. `align` is "start" or "end" if one of them was requested.
    """

    q_rank: Array | int
    kv_rank: Array | int
    q_shift: Array
    kv_shift: Array
    align: Literal["start", "end"] | None = None

    def query_positions(self) -> Array:
        """`(1 or batch, q_len)`."""
        return _shifted(self.q_rank, self.q_shift)

    def key_positions(self) -> Array:
        """`(1 or batch, kv_len)`."""
        return _shifted(self.kv_rank, self.kv_shift)


def _shifted(rank: Array | int, shift: Array) -> Array:
    rows = np.arange(rank, dtype=np.int64)[None] if isinstance(rank, int) else rank
    return np.asarray(rows + shift[:, None])


@dataclass(frozen=True, slots=True)
class Operands:
    """The values of one problem.

    query, key and value are views `(*batch_shape, heads, length, dim)`, broadcast but not copied;
    key and value may be `StoredRows` that stand for such arrays (`read_rows`, `whole_rows`);
    tables are indexed by the expressions of the `Spec`. `origins` says of each table, and
    `sink_origin` of the sinks, whose they are. For tensors on a device query, key and value have no
    memory, and `device_arrays` has the tensors: "query", "key" and "value" with heads before rows,
    and by the names of tables, and "sinks", those of variants.
    """

    query: Array
    key: Rows
    value: Rows
    scale: float
    tables: Mapping[str, Array]
    positions: Positions
    angles: Angles | None = None
    sinks: Array | None = None
    dropout: Dropout | None = None
    origins: Mapping[str, Origin] = field(default_factory=dict)
    sink_origin: Origin | None = None
    device_arrays: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """A checked problem: what every backend and inspector is given."""

    spec: Spec
    operands: Operands

    def read_only(self) -> Problem:
        """The same with views that nobody can write to, of all arrays in main memory."""
        names = "query", "key", "value", "tables", "positions", "angles", "sinks", "dropout"
        views = {name: _read_only(getattr(self.operands, name)) for name in names}
        return Problem(self.spec, replace(self.operands, **views))

    def gathered(self) -> Problem:
        """The same with keys and values as arrays, for code that knows no other rows.

        Quantised rows are widened to the type of computation, and then all three have that type.
        """
        spec, operands = self.spec, self.operands
        if spec.key_storage is None and spec.value_storage is None:
            return self
        dtype = spec.compute_dtype
        query: Array = operands.query
        key, value = (whole_rows(rows, dtype) for rows in (operands.key, operands.value))
        if any(
            isinstance(rows, StoredRows) and rows.scales is not None
            for rows in (operands.key, operands.value)
        ):
            query, key, value = (array.astype(dtype, copy=False) for array in (query, key, value))
        return Problem(
            replace(spec, dtype=query.dtype.name, key_storage=None, value_storage=None),
            replace(operands, query=query, key=key, value=value),
        )


def _read_only(value: Any) -> Any:
    """The same with views that nobody can write to: of an array, or of those in a mapping or an
    instance of a dataclass."""
    if isinstance(value, np.ndarray):
        view = value.view()
        view.setflags(write=False)
        return view
    if isinstance(value, Mapping):
        return {name: _read_only(of) for name, of in value.items()}
    if is_dataclass(value):
        made = copy(value)
        for each in fields(value):
            object.__setattr__(made, each.name, _read_only(getattr(value, each.name)))
        return made
    return value
