"""The builder: variants add masks, score changes and tables to a problem with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv.arguments.declarations import shown
from qkv.arguments.readable_checks import as_array
from qkv.errors import AmbiguityError, ArgumentError, DTypeError, ShapeError
from qkv.problem.building.padding import padding_index
from qkv.problem.language.expressions import Kind, Var, as_node, conjunction, text
from qkv.problem.language.reading import is_array_at_position
from qkv.problem.language.symbols import Expr, Table
from qkv.problem.spec import Dropout, Origin, Rotation, Stage, TableSpec

Array = NDArray[Any]
Align: TypeAlias = Literal["start", "end"]

FLOATS = ("float16", "bfloat16", "float32", "float64")
INDEX_LIMIT = 2**31 - 1
"""Positions, offsets and lengths stay below this, so that their differences never overflow."""
MAX_DIMENSIONS = 32
"""The most dimensions of an array: older versions of NumPy broadcast no more."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a problem."""

    batch_shape: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape to which masks and biases broadcast."""
        return (*self.batch_shape, self.num_heads, self.q_len, self.kv_len)


@dataclass(frozen=True, slots=True)
class Restart:
    """Positions that begin again inside a problem: ranks of rows, and what `end` adds to them."""

    q_rank: Array
    kv_rank: Array
    end_shift: Array


class Builder:
    """Collects the masks, score changes and tables of one problem's variants.

    A variant reads `q_pos`, `kv_pos`, `q_index`, `kv_index`, `head`, `batch` and `score`, makes
    tables of its arrays, and calls `mask` with a condition (True = may attend) or `mod` with a new
    score. `shape` has the problem's sizes, for checks; a size written into an expression becomes
    part of the structure, so prefer `scalar`.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.arrays: dict[str, Array] = {}
        self.tables: list[TableSpec] = []
        self.scores: list[Stage] = []
        self.masks: list[Stage] = []
        self.alignments: list[tuple[str, Align]] = []
        self.kv_lens: Array | None = None
        self.is_part = False  # whether a limit of keys would be one of a part of the mask only
        self.restart: Restart | None = None
        self.rotation: tuple[Rotation, Array, float] | None = None
        self.sinks: Array | None = None
        self.dropout: Dropout | None = None
        self.origins: dict[str, Origin] = {}
        self.sink_origin: Origin | None = None
        self._label = ""
        self._variant: Any = None
        self._first = 0

    q_pos = property(lambda self: Expr(Var("q_pos")), doc="Position of the query row.")
    kv_pos = property(lambda self: Expr(Var("kv_pos")), doc="Position of the key row.")
    q_index = property(lambda self: Expr(Var("q_index")), doc="Row of the query array.")
    kv_index = property(lambda self: Expr(Var("kv_index")), doc="Row of the key array.")
    head = property(lambda self: Expr(Var("head")), doc="Query head.")
    batch = property(lambda self: Expr(Var("batch")), doc="Flat index over leading dimensions.")
    score = property(lambda self: Expr(Var("score")), doc="The score so far.")

    def lower(self, variant: Any) -> None:
        """Call `variant.lower` with this builder."""
        if not hasattr(variant, "lower") or isinstance(variant, str | bytes | type):
            raise ArgumentError(
                f"a mask cannot be combined with {type(variant).__name__}.",
                action="Combine masks with masks or boolean arrays.",
            )
        before = self._label, self._variant, self._first
        self._label, self._variant, self._first = repr(variant), variant, len(self.tables)
        try:
            variant.lower(self)
        except IndexError as error:
            if not is_array_at_position(error):
                raise
            raise ArgumentError(
                f"{type(variant).__name__}.lower indexes an array with an expression.",
                action="Make it a table first, as in table = b.table(array, 'name'), and index "
                "that: table[b.q_index].",
            ) from None
        finally:
            self._label, self._variant, self._first = before

    def mask(self, condition: Any) -> None:
        """Forbid the pairs for which `condition` is False."""
        node = as_node(condition)
        if node.kind != "bool":
            raise ArgumentError(
                f"a mask condition is {node.kind}, not boolean.",
                [("variant", self._label), ("condition", text(node))],
                "Compare it, as in kv_pos <= q_pos.",
            )
        if "score" in node.variables:
            raise ArgumentError(
                "a mask condition reads the score.",
                [("variant", self._label), ("condition", text(node))],
                "Return -np.inf from a score mod instead.",
            )
        self.masks.append(Stage(self._label, node))

    def mod(self, score: Any) -> None:
        """Replace the score; `score` is usually an expression of `self.score`."""
        node = as_node(score)
        if node.kind == "bool":
            raise ArgumentError(
                "a score mod gives a condition, not a number.",
                [("variant", self._label), ("expression", text(node))],
                "Use np.where(condition, score, -np.inf) or a mask.",
            )
        self.scores.append(Stage(self._label, node))

    def dense_mask(self, array: ArrayLike) -> Expr:
        """Whether a boolean array that broadcasts to the scores allows the pair."""
        given = as_array("mask", array)
        if given.dtype != bool:
            raise DTypeError(
                f"a mask has dtype {given.dtype}, not bool.",
                [("variant", self._label)],
                "Pass array.astype(bool) for a mask (True = attend), or Bias(array) to "
                "add floating numbers to the scores.",
            )
        return self.broadcast(given, "mask")

    def condition(self, variant: Any, *, limits_whole: bool = False) -> Expr:
        """The condition of a mask variant or boolean array, without adding it as a mask.

        `limits_whole` says that keys behind its limit are forbidden in the whole mask too, and that
        "end" counts from there.
        """
        if isinstance(variant, np.ndarray):
            return self.dense_mask(variant)
        scores, masks, was_part = len(self.scores), len(self.masks), self.is_part
        self.is_part = was_part or not limits_whole
        self.lower(variant)
        self.is_part = was_part
        if len(self.scores) != scores or len(self.masks) == masks:
            raise ArgumentError(
                "only masks combine with |, & and ~.", [("variant", repr(variant))],
                "Pass score variants to attention as arguments of their own.",
            )  # fmt: skip
        parts = [stage.node for stage in self.masks[masks:]]
        del self.masks[masks:]
        return Expr(conjunction(parts))

    def table(self, array: ArrayLike, label: str = "table") -> Table:
        """An array that expressions can read, one integer index for each dimension."""
        view = np.asarray(array)
        name = f"t{len(self.tables)}"
        kind = kind_of_array(view, f"{self._label} {label}".strip())
        self.tables.append(TableSpec(name, label, kind, view.dtype.name, view.ndim))
        self.arrays[name] = view
        self.origins[name] = Origin(self._variant, len(self.tables) - self._first, view)
        return Table(name, kind, view.shape)

    def scalar(self, value: Any, label: str = "value") -> Expr:
        """A number that is a value, not structure: changing it compiles nothing."""
        return self.table(np.asarray(value), label).entry()

    def per_batch(self, values: ArrayLike, label: str) -> Expr:
        """One value for each batch row: a number, or an array over the leading dimensions."""
        array = np.asarray(values)
        if array.ndim == 0:
            return self.scalar(array, label)
        table = self.table(self.batch_rows(array, label, 0), label)
        origin = self.origins[table.name]
        self.origins[table.name] = replace(
            origin, broadcast_from=array, broadcast_shape=self.shape.batch_shape
        )
        return table.entry(self.batch)

    def per_head(self, values: ArrayLike, label: str) -> Expr:
        """One value for each query head: a number or `(num_heads,)`."""
        array = np.asarray(values)
        if array.ndim == 0:
            return self.scalar(array, label)
        if array.shape != (self.shape.num_heads,):
            raise ShapeError(
                f"{label} has shape {array.shape}; there are {self.shape.num_heads} query heads.",
                [("variant", self._label)],
                f"Pass one number, or an array of shape ({self.shape.num_heads},).",
            )
        return self.table(array, label).entry(self.head)

    def batch_rows(self, values: ArrayLike, label: str, trailing: int) -> Array:
        """Broadcast over the leading dimensions and flatten them; `trailing` axes stay."""
        array = np.asarray(values)
        tail = array.shape[array.ndim - trailing :]
        try:
            full = np.broadcast_to(array, (*self.shape.batch_shape, *tail))
        except ValueError:
            batch = f"{self.shape.batch_shape}"
            of_option = [(label, f"{array.dtype} {array.shape}"), ("batch", batch)]
            raise ShapeError(
                f"{label} has shape {array.shape}; its leading dimensions do not broadcast to "
                f"the batch {self.shape.batch_shape}.",
                [("variant", self._label)] if self._label else of_option,
                "Give one entry for each batch row, or a single one for all."
                if self.shape.batch_shape
                else "There is no batch: pass it without its leading dimensions.",
            ) from None
        return full.reshape(prod(self.shape.batch_shape), *tail)

    def broadcast(
        self,
        array: ArrayLike,
        label: str,
        axes: Sequence[tuple[str, int, Expr]] | None = None,
    ) -> Expr:
        """The element of an array that broadcasts to the scores, read in place.

        `axes` names the dimensions behind the batch as (name, size, index); by default they are
        heads, query rows and key rows. Dimensions of size 1, or of stride 0, are not indexed.
        """
        if axes is None:
            axes = (
                ("num_heads", self.shape.num_heads, self.head),
                ("q_len", self.shape.q_len, self.q_index),
                ("kv_len", self.shape.kv_len, self.kv_index),
            )
        view = np.asarray(array)
        target = (*self.shape.batch_shape, *(size for _, size, _ in axes))
        padded = view.reshape((1,) * (len(target) - view.ndim) + view.shape)
        if padded.ndim > len(target) or any(
            have not in (1, want) for have, want in zip(padded.shape, target, strict=True)
        ):
            names = ", ".join(["*batch", *(name for name, _, _ in axes)])
            inserted, lengths = padding_index(self.shape.scores, view, label)
            padding = f"Pass {label}{inserted}" + (f" or {lengths}." if lengths else ".")
            raise ShapeError(
                f"{label} has shape {view.shape}, which does not broadcast to ({names}) = "
                f"{target}.",
                [("variant", self._label)],
                padding
                if inserted and target == self.shape.scores
                else "Insert dimensions of size 1 where it is the same for all.",
            )
        for axis, (size, stride) in enumerate(zip(padded.shape, padded.strides, strict=True)):
            if stride == 0 and size > 1:
                padded = padded[(slice(None),) * axis + (slice(0, 1),)]
        indices: list[Any] = [0] * len(target)
        batch_axes = len(self.shape.batch_shape)
        wide = [a for a in range(batch_axes) if self.shape.batch_shape[a] > 1]
        for axis in range(batch_axes):
            if padded.shape[axis] == 1:
                continue
            if wide == [axis]:
                indices[axis] = self.batch
            else:
                coordinate = np.indices(self.shape.batch_shape, sparse=False)[axis].reshape(-1)
                indices[axis] = self.table(coordinate, f"{label} row")[self.batch]
        for axis, (_, _, index) in enumerate(axes, start=batch_axes):
            if padded.shape[axis] != 1:
                indices[axis] = index
        table = self.table(padded, label)
        self.origins[table.name] = replace(self.origins[table.name], array=view)
        return table.entry(*indices)

    def align(self, how: Align) -> None:
        """State for the whole problem where query rows stand among the keys."""
        if not isinstance(how, str) or how not in ("start", "end"):
            raise ArgumentError(
                f"align={shown(how)} is not 'start' or 'end'.",
                [("variant", self._label)],
                "Use one of the two words, or leave it out and pass q_offset.",
            )
        self.alignments.append((f"{self._label}", how))

    def limit_keys(self, kv_lens: Array) -> None:
        """State the number of real keys of each batch row; `end` alignment counts from there."""
        rows = self.batch_rows(kv_lens, "kv_lens", 0).astype(np.int64)
        if not self.is_part:  # as in ~KeyLengths(n), which says nothing of the whole
            self.kv_lens = rows if self.kv_lens is None else np.minimum(self.kv_lens, rows)

    def restart_positions(self, restart: Restart) -> None:
        """Give positions that begin again in each segment; arrays `(batch or 1, length)`."""
        if self.restart is not None:
            raise AmbiguityError(
                "two variants restart positions.",
                [("variant", self._label)],
                "Combine the segment ids into one array: ids_a * num_b + ids_b.",
            )
        self.restart = restart

    def rotate(
        self,
        layout: Literal["half_split", "interleaved"],
        inv_freq: Array,
        attention_factor: float = 1.0,
    ) -> None:
        """Rotate query and key rows by position: pair i turns by position * inv_freq[i].

        The rotated entries of both are multiplied by `attention_factor`.
        """
        if self.rotation is not None:
            raise AmbiguityError(
                "two variants rotate query and key.", [("variant", self._label)], "Pass one RoPE."
            )
        dim = 2 * len(inv_freq)
        if dim > self.shape.head_dim:
            raise ShapeError(
                f"rotary_dim={dim} is larger than head_dim={self.shape.head_dim}.",
                [("variant", self._label)],
                "Rotate at most head_dim entries.",
            )
        self.rotation = (Rotation(self._label, layout, dim), inv_freq, attention_factor)

    def sink(self, values: ArrayLike) -> None:
        """Add exp(value of the query head) to the denominator of every row."""
        if self.sinks is not None:
            raise AmbiguityError(
                "two variants add sinks.",
                [("variant", self._label)],
                "Pass one Sinks with np.logaddexp(a, b).",
            )
        array = real_numbers(values, "sinks")
        if array.shape not in ((), (self.shape.num_heads,)):
            raise ShapeError(
                f"sinks have shape {array.shape}; there are {self.shape.num_heads} query heads.",
                [("variant", self._label)],
                "Pass one number, or one for each query head.",
            )
        self.sinks = np.broadcast_to(array.astype(np.float64), (self.shape.num_heads,))
        self.sink_origin = Origin(self._variant, 0, array)

    def drop(self, p: float, seed: int) -> None:
        """Drop weights with probability p after the softmax."""
        if self.dropout is not None:
            raise AmbiguityError(
                "two variants drop weights.", [("variant", self._label)], "Pass one Dropout."
            )
        self.dropout = Dropout(p, seed)


def real_numbers(values: ArrayLike, label: str) -> Array:
    """An array of numbers: a floating one as it is, others as float64."""
    try:
        given = np.asarray(values)
        if given.dtype.name in FLOATS and given.dtype.isnative:
            return given
        if given.dtype.kind not in "bcOSUMm":
            return np.asarray(given, np.float64)
        seen = f"dtype {given.dtype}"
    except (ValueError, TypeError):
        seen = "rows of different lengths"
    raise DTypeError(
        f"{label} are not real numbers.",
        [("seen", seen)],
        "Pass one number, or an array of one for each query head.",
    )


def kind_of_array(array: Array, label: str) -> Kind:
    """The kind of a table's elements."""
    dtype = array.dtype
    if dtype.isnative and dtype.kind == "b":
        return "bool"
    if dtype.isnative and dtype.kind in "iu" and dtype != np.uint64:
        return "int"
    if dtype.isnative and dtype.name in FLOATS:
        return "float"
    raise DTypeError(
        f"{label} has dtype {dtype if dtype.isnative else dtype.str}, which expressions cannot "
        "read.",
        action="Use a boolean, integer (up to 64 bits, signed) or floating array in the "
        "machine's byte order.",
    )
