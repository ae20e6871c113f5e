"""Validation of a call: arrays and variants in, a checked `Problem` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.arguments.readable_checks import check_layout, is_truth_value
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.problem.building.builder import FLOATS, INDEX_LIMIT, MAX_DIMENSIONS, Builder, Shape
from qkv.problem.building.offsets import positions_of
from qkv.problem.language.bounds import check_table_reads
from qkv.problem.language.expressions import Node, substitute
from qkv.problem.language.intervals import Interval
from qkv.problem.language.reading import signature_unless
from qkv.problem.spec import Angles, Operands, Positions, Problem, Rotation, Spec, Stage
from qkv.problem.stored_rows import (
    Paged,
    Quantized,
    Rows,
    StoredRows,
    as_stored_rows,
    checked_pages,
    scores_of_offset,
    storage_of,
)

Array = NDArray[Any]
Layout = Literal["bhld", "blhd"]
Arrays = dict[str, Rows]


def check(
    query: Array,
    key: Array | Paged | Quantized,
    value: Array | Paged | Quantized,
    variants: Sequence[Any],
    *,
    scale: float | None = None,
    layout: Layout = "bhld",
    q_offset: Any = None,
    kv_offset: Any = 0,
) -> Problem:
    """Bind arrays and variants into a problem, or raise the first thing that is wrong."""
    check_layout(layout)
    arrays: Arrays = {"query": query}
    for name, given in (("key", key), ("value", value)):
        if isinstance(given, Paged | Quantized):
            arrays[name] = as_stored_rows(given, name, layout)
        else:
            arrays[name] = given
    _check_dtypes(arrays)
    views, shape = _shape(arrays, layout)
    q_rows = views["query"]
    assert not isinstance(q_rows, StoredRows)
    builder = _lowered(shape, variants)
    rows = views["key"]
    # Rotated keys are widened before they are rotated, and their offset with them.
    if isinstance(rows, StoredRows) and rows.offset is not None and builder.rotation is None:
        at_scale = _scale(scale, shape.head_dim)
        added = scores_of_offset(q_rows, rows.offset, at_scale)
        views["key"] = replace(rows, offset=None)
        builder = _lowered(shape, (_KeyOffset(added), *variants))
    positions, definitions = positions_of(builder, q_offset, kv_offset)
    scores = tuple(Stage(s.label, substitute(s.node, definitions)) for s in builder.scores)
    masks = tuple(Stage(s.label, substitute(s.node, definitions)) for s in builder.masks)
    _check_tables(shape, [s.node for s in (*scores, *masks)], builder.arrays)
    rotation, angles = _rotation(builder, positions)
    key_rows, value_rows = (
        checked_pages(views[name], builder.kv_lens, name) for name in ("key", "value")
    )
    spec = Spec(
        dtype=query.dtype.name,
        batch_shape=shape.batch_shape,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        scores=scores,
        masks=masks,
        tables=tuple(builder.tables),
        rotation=rotation,
        sinks=builder.sinks is not None,
        dropout=builder.dropout is not None,
        key_storage=storage_of(key_rows),
        value_storage=storage_of(value_rows),
        summary=" & ".join(map(repr, variants)) or "no variants",
    )
    return Problem(
        spec,
        Operands(
            query=q_rows,
            key=key_rows,
            value=value_rows,
            scale=_scale(scale, shape.head_dim),
            tables=builder.arrays,
            positions=positions,
            angles=angles,
            sinks=builder.sinks,
            dropout=builder.dropout,
            origins=builder.origins,
            sink_origin=builder.sink_origin,
        ),
    )


KEY_OFFSET = "the offset of key"
"""The label of the table of what the offset of quantised keys adds to the scores."""


@dataclass(frozen=True, eq=False)
class _KeyOffset:
    """What the offset of quantised keys adds to all scores of a query, before any variant."""

    added: Array

    def lower(self, builder: Builder) -> None:
        """Add it."""
        builder.mod(builder.score + builder.broadcast(self.added, KEY_OFFSET))

    def __repr__(self) -> str:
        return "offset of key"


def _lowered(shape: Shape, variants: Sequence[Any]) -> Builder:
    """A builder with everything that the variants add to it."""
    builder = Builder(shape)
    for variant in variants:
        if isinstance(variant, type):
            raise ArgumentError(
                f"{variant.__name__} is a class, not a variant.",
                action=f"Make one: {variant.__name__}(...).",
            )
        if not hasattr(variant, "lower") or isinstance(variant, str | bytes):
            raise _no_variant(variant)
        try:
            builder.lower(variant)
        except AttributeError as error:
            _explain_attribute(error, variant)
            raise
    return builder


def _explain_attribute(error: AttributeError, variant: Any) -> None:
    """Raise for an attribute that a dataclass was given beside its fields, which a call leaves."""
    kind = type(variant)
    if error.obj is variant and is_dataclass(kind) and getattr(kind, "roles", None) is not None:
        raise ArgumentError(
            f"{kind.__name__}.lower reads {error.name}, which is no field of the dataclass; a call "
            "keeps the fields alone.",
            action=f"Declare it, as in {error.name}: Any = field(init=False), or compute it in "
            "lower.",
        ) from None


def _check_dtypes(arrays: Arrays) -> None:
    # Quantised rows go with any floating type, and are checked together with their scales.
    arrays = {
        name: array
        for name, array in arrays.items()
        if not (isinstance(array, StoredRows) and array.scales is not None)
    }
    for name, array in arrays.items():
        if not _is_float(array.dtype):
            raise DTypeError(
                f"{name} has dtype {array.dtype.str if not array.dtype.isnative else array.dtype}; "
                f"attention takes {', '.join(FLOATS)} in the machine's byte order.",
                _dtypes_and_shapes(arrays).items(),
                f"Convert it, as in {name}.astype('float32').",
            )
    if len({array.dtype for array in arrays.values()}) > 1:
        raise DTypeError(
            "query, key and value have different dtypes.",
            _dtypes_and_shapes(arrays).items(),
            "Convert them to one, as in key.astype(query.dtype).",
        )


def _no_variant(given: Any) -> ArgumentError:
    """The error for a fourth argument that is neither a variant nor an array."""
    kind, name = type(given).__name__, getattr(given, "__name__", "")
    fact, action = f"{shown(given, 80)} is not a variant.", ""
    if given is None:
        action = "Leave it out: without a mask every query sees every key."
    elif isinstance(given, list | tuple):
        fact = f"a {kind} of {len(given)} is not a variant."
        action = "Pass an array: True may attend, numbers are added to the scores."
        if not given:
            action = "Leave it out: without a mask every query sees every key."
        elif any(hasattr(item, "lower") or hasattr(item, "dtype") for item in given):
            action = "Pass each as an argument of its own: *variants."
    elif callable(getattr(given, "mask_mod", None)):  # A BlockMask of FlexAttention.
        fact, action = f"a {kind} is not a variant.", "Pass qkv.Mask(block_mask.mask_mod)."
    elif callable(given) and name:
        fact = f"the function {name} is not a variant."
        named = "fn" if name == "<lambda>" else name
        is_mask = signature_unless(given, 5) is not None and signature_unless(given, 4) is None
        action = f"Pass qkv.{'Mask' if is_mask else 'ScoreMod'}({named})."
    return ArgumentError(
        fact,
        [("type", kind)],
        action or "Pass masks, score variants or arrays; other arguments have names, as scale=0.5.",
    )


@lru_cache(maxsize=64)
def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.name in FLOATS and dtype.isnative


def _dtypes_and_shapes(arrays: Arrays) -> dict[str, str]:
    return {name: f"{array.dtype} {array.shape}" for name, array in arrays.items()}


def _shape(arrays: Arrays, layout: Layout) -> tuple[Arrays, Shape]:
    """Views `(*batch_shape, heads, length, dim)` and their sizes."""
    views: Arrays = {}
    for name, array in arrays.items():
        if array.ndim < 2:
            raise ShapeError(
                f"{name} has {array.ndim} {'dimension' if array.ndim == 1 else 'dimensions'}; "
                "attention needs at least 2.",
                _dtypes_and_shapes(arrays).items(),
                "Pass (..., heads, length, dim); two dimensions are one head.",
            )
        if array.ndim > MAX_DIMENSIONS:
            fact = f"{name} has {array.ndim} dimensions; NumPy broadcasts at most {MAX_DIMENSIONS}."
            raise ShapeError(fact, action=f"Pass {name}.reshape(-1, *{name}.shape[-3:]).")
        views[name] = array if isinstance(array, StoredRows) else _as_heads(array, layout)
    q, k, v = views["query"], views["key"], views["value"]

    def wrong(fact: str, action: str) -> ShapeError:
        reading = {"bhld": "(batch, length, heads, dim)", "blhd": "(batch, heads, length, dim)"}
        other: Layout = "blhd" if layout == "bhld" else "bhld"
        if _fits(arrays, other):
            action = (
                f'Arrays were read as layout="{layout}". If yours are {reading[layout]}, '
                f'pass layout="{other}".'
            )
        return ShapeError(fact, _described(arrays, q, k, v), action)

    if q.shape[-1] != k.shape[-1]:
        raise wrong(
            f"query has head_dim={q.shape[-1]} and key has head_dim={k.shape[-1]}.",
            "The product q.k needs rows of one length.",
        )
    if q.shape[-1] == 0:
        raise wrong("head_dim=0: there is nothing to multiply.", "Give rows of 1 number or more.")
    if k.shape[-2] != v.shape[-2]:
        raise wrong(
            f"key has kv_len={k.shape[-2]} and value has kv_len={v.shape[-2]}.",
            "Give one row of value for each row of key.",
        )
    if k.shape[-3] != v.shape[-3]:
        raise wrong(
            f"key has {k.shape[-3]} heads and value has {v.shape[-3]}.",
            "Give key and value one number of heads.",
        )
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise wrong(
            f"num_heads={heads} is not a multiple of num_kv_heads={kv_heads}.",
            "Let every head of key and value serve one number of query heads.",
        )
    if max(q.shape[-2], k.shape[-2]) > INDEX_LIMIT:
        raise wrong(f"a length is beyond {INDEX_LIMIT}.", "Split the keys and use qkv.merge.")
    try:
        batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    except ValueError:
        raise wrong(
            f"leading dimensions {q.shape[:-3]}, {k.shape[:-3]} and {v.shape[:-3]} do not "
            "broadcast with one another.",
            "Let them be equal, or 1 where they are the same for all.",
        ) from None
    for name, view in views.items():
        if view.shape[:-3] != batch:
            views[name] = _broadcast(view, batch)
    return views, Shape(
        batch, heads, kv_heads, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    )  # fmt: skip


def _fits(arrays: Arrays, layout: Layout) -> bool:
    """Whether the shapes go together if they are read in a layout."""
    if any(isinstance(array, StoredRows) or array.ndim < 3 for array in arrays.values()):
        return False
    heads, length = (-3, -2) if layout == "bhld" else (-2, -3)
    q, k, v = (array.shape for array in arrays.values())
    return bool(
        k[heads] == v[heads]
        and k[length] == v[length]
        and q[-1] == k[-1] > 0
        and k[heads]
        and q[heads] % k[heads] == 0
    )


def _as_heads(array: Array, layout: Layout) -> Array:
    view = array[None] if array.ndim == 2 else array
    return view.swapaxes(-3, -2) if layout == "blhd" and array.ndim > 2 else view


def _broadcast(view: Rows, batch: tuple[int, ...]) -> Rows:
    if isinstance(view, StoredRows):
        return view.broadcast(batch)
    return np.broadcast_to(view, (*batch, *view.shape[-3:]))


def _described(arrays: Arrays, q: Rows, k: Rows, v: Rows) -> list[tuple[str, str]]:
    """The arguments and their sizes, as rows of an error message."""
    given = _dtypes_and_shapes(arrays)
    width = max(map(len, given.values()))
    rows = {
        "query": ("num_heads", "head_dim", q),
        "key": ("num_kv_heads", "head_dim", k),
        "value": ("num_kv_heads", "v_head_dim", v),
    }
    lengths = {"query": "q_len", "key": "kv_len", "value": "kv_len"}
    seen = []
    for name, (heads, dim, view) in rows.items():
        sizes = f"{f'{heads}={view.shape[-3]}':<16} {f'{lengths[name]}={view.shape[-2]}':<12}"
        seen.append((name, f"{given[name]:<{width}}  {sizes} {dim}={view.shape[-1]}"))
    return seen


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    try:
        is_number = not (isinstance(scale, str | bytes) or is_truth_value(scale))
        number = float(scale if is_number else "nan")
    except (OverflowError, TypeError, ValueError):
        number = float("nan")
    is_array = isinstance(scale, (list, tuple)) or (hasattr(scale, "ndim") and scale.ndim > 0)
    if is_array and not np.isfinite(number):
        raise ArgumentError(
            f"scale={shown(scale)} is not one finite number for all heads.",
            action="Multiply the rows of query by the scales of their heads, and pass scale=1.0.",
        )
    if not np.isfinite(number):
        raise ArgumentError(
            f"scale={shown(scale)} is not a finite number.",
            action=f"Leave it out for 1 / sqrt(head_dim) = {head_dim**-0.5:.6g}.",
        )
    return number


def _check_tables(shape: Shape, nodes: list[Node], arrays: dict[str, Array]) -> None:
    batches = int(np.prod(shape.batch_shape, dtype=np.int64))
    if 0 in (batches, shape.num_heads, shape.q_len, shape.kv_len):
        return
    sizes = {
        "q_index": shape.q_len,
        "kv_index": shape.kv_len,
        "head": shape.num_heads,
        "batch": batches,
    }
    known = {name: Interval.of(0, size - 1) for name, size in sizes.items()}
    check_table_reads(nodes, known, arrays)


def _rotation(builder: Builder, positions: Positions) -> tuple[Rotation | None, Angles | None]:
    if builder.rotation is None:
        return None, None
    rotation, inv_freq, factor = builder.rotation
    if rotation.rotary_dim == 0:
        return None, None
    return rotation, Angles(
        inv_freq, positions.query_positions(), positions.key_positions(), factor
    )
