"""`qkv plan`: what `qkv.plan` says of a file's arrays, or of sizes alone."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qkv
from qkv.arguments.declarations import shown
from qkv.cli.variants import variants_of
from qkv.errors import AmbiguityError, ArgumentError
from qkv.files import read_arrays
from qkv.inspection.summaries.terminal import Page
from qkv.problem.building.builder import INDEX_LIMIT

__all__ = ["run"]

Array = NDArray[Any]

SCHEMA, VERSION = "qkv-plan", 1

_SIZES = {
    "batch_size": 1, "heads": 8, "kv_heads": 8, "q_len": 1024, "kv_len": 1024, "head_dim": 64,
}  # fmt: skip
_LARGEST_ARRAY = 2**63 - 1
"""Bytes."""
_LIKE = {"kv_heads": "heads", "kv_len": "q_len"}
"""Sizes that are, unless given, those of the query."""


def run(options: argparse.Namespace) -> str:
    """The output of the command."""
    query, key, value = _arrays(options)
    try:
        plan = qkv.plan(
            query,
            key,
            value,
            *variants_of(options.variants),
            scale=options.scale,
            layout=options.layout,
            q_offset=options.q_offset,
        )
    except AmbiguityError as error:
        raise error.with_action("Pass --q-offset start, --q-offset end, or a position.") from None
    if options.json:
        data = asdict(plan)
        data["refusals"] = {name: list(map(str, why)) for name, why in plan.refusals.items()}
        data = {"schema": SCHEMA, "version": VERSION, **data}
        return json.dumps(data, indent=2, allow_nan=False) + "\n"
    page = Page()
    return "\n".join(page.token(line, 1000) for line in str(plan).splitlines()) + "\n"


def _arrays(options: argparse.Namespace) -> tuple[Array, Array, Array]:
    given = {name: getattr(options, name) for name in _SIZES}
    given_options = [name for name in (*given, "dtype") if getattr(options, name) is not None]
    if options.file is not None:
        if given_options:
            raise ArgumentError(
                f"{_flag(given_options[0])} was given, and the file {shown(options.file, 80)}, "
                "whose arrays have sizes.",
                action="Pass a file, or sizes.",
            )
        arrays = read_arrays(options.file)
        return arrays.query, arrays.key, arrays.value
    sizes: dict[str, int] = dict(_SIZES)
    for name, value in given.items():
        if value is not None:
            sizes[name] = value
        elif name in _LIKE:
            sizes[name] = sizes[_LIKE[name]]
        if sizes[name] < 0:
            raise ArgumentError(f"{_flag(name)} {value} is below zero.", action="Pass 0 or more.")
        if sizes[name] > INDEX_LIMIT:
            raise ArgumentError(
                f"{_flag(name)} {value} is beyond {INDEX_LIMIT}.", action="Pass a smaller size."
            )
    if sizes["kv_heads"] and sizes["heads"] % sizes["kv_heads"]:
        raise ArgumentError(
            f"--heads {sizes['heads']} is not a multiple of --kv-heads {sizes['kv_heads']}.",
            action="Groups of query heads of one size share a key head.",
        )
    nothing = np.zeros((), _dtype(options.dtype or "float32"))
    longest = max("q_len", "kv_len", key=sizes.__getitem__)
    axes = {name: sizes[name] for name in ("batch_size", "heads", longest, "head_dim")}
    # NumPy counts an axis of no rows as one row here.
    if math.prod(max(size, 1) for size in axes.values()) * nothing.itemsize > _LARGEST_ARRAY:
        written = " ".join(f"{_flag(name)} {size}" for name, size in axes.items())
        raise ArgumentError(f"no array is as large as {written}.", action="Pass smaller sizes.")

    def rows(heads: int, length: int) -> Array:
        """An array of these sizes that takes no memory."""
        axes = (heads, length) if options.layout == "bhld" else (length, heads)
        return np.broadcast_to(nothing, (sizes["batch_size"], *axes, sizes["head_dim"]))

    key = rows(sizes["kv_heads"], sizes["kv_len"])
    return rows(sizes["heads"], sizes["q_len"]), key, key


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return name
