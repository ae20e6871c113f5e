"""A record of one call as a file: its inputs, its results, and who computed them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.arrays import ArrayLibrary, is_array, library_named
from qkv.call.binding.bound import bind
from qkv.call.binding.options import OptionValues
from qkv.call.checked import CheckedCall, check_call
from qkv.call.inspected import Inspected
from qkv.errors import ArgumentError, UnsupportedError
from qkv.files.described import read_described, schema_of, write_described
from qkv.inspection.records.variant_data import from_data, to_data
from qkv.partial import RowStatistics
from qkv.problem.stored_rows import Paged, Quantized

__all__ = ["is_record", "load", "save"]

Array = NDArray[Any]

SCHEMA, VERSION = "qkv-record", 1

_OPERANDS = ("query", "key", "value")
_OPTIONS = ("scale", "layout", "q_offset", "kv_offset")
_STATISTICS = tuple(field.name for field in fields(RowStatistics))
_STORAGE = {cls.__name__: cls for cls in (Paged, Quantized)}


def save(inspected: Inspected, path: str | os.PathLike[str]) -> None:
    """Write what was found of a call; see `Record.save`."""
    call = inspected.call
    arrays: dict[str, Array] = {}
    unbound, shape = call.unbound, _shape_of_rows(call)
    try:
        variants = to_data(unbound.variants, arrays, "variants")
    except UnsupportedError as error:
        raise error.with_action(
            "Inspect with the array that it computes, as qkv.Mask(array) or qkv.Bias(array), or "
            "keep query, key and value with qkv.files.write_arrays and inspect them again."
        ) from None
    about = {
        "backend": inspected.backend,
        "statistics_backend": call.choice.backend.name,
        "library": call.library.name,
        "operands": {
            name: _operand_data(getattr(unbound, name), arrays, name) for name in _OPERANDS
        },
        "variants": variants,
        "options": {
            name: to_data(getattr(unbound.options, name), arrays, name) for name in _OPTIONS
        },
    }
    arrays["output"] = call.library.on_host(inspected.output, "output", by_value=True)
    arrays["lse"] = inspected.row_lse.reshape(shape)
    if inspected.rows is not None:
        for name in _STATISTICS:
            arrays[f"rows.{name}"] = getattr(inspected.rows, name).reshape(shape)
    write_described(path, SCHEMA, VERSION, about, arrays)


def load(path: str | os.PathLike[str], library: str | None = None) -> Inspected:
    """Read what `save` wrote, in arrays of another library if one is named; see `Record.load`."""

    def made_of(about: dict[str, Any], arrays: dict[str, Array]) -> Inspected:
        return _inspected({**about, "library": library or about["library"]}, arrays)

    return read_described(path, SCHEMA, VERSION, "record of qkv.inspect", made_of)


def is_record(path: str | os.PathLike[str]) -> bool:
    """Whether a file says of itself that it is a record of one call; False if it is unreadable."""
    return schema_of(path) == SCHEMA


def _inspected(about: dict[str, Any], arrays: dict[str, Array]) -> Inspected:
    call = _checked_call(about, arrays)
    spec = call.problem.spec
    shape, output = _shape_of_rows(call), arrays["output"]
    of_rows = {"lse": arrays["lse"]}
    if any(f"rows.{name}" in arrays for name in _STATISTICS):
        of_rows |= {name: arrays[f"rows.{name}"] for name in _STATISTICS}
    for name, array in of_rows.items():
        if array.shape != shape or array.dtype != spec.compute_dtype:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, for rows {shape}")
    like_output = call.arranged(np.broadcast_to(np.int8(0), (*shape, spec.v_head_dim)))
    if output.shape != like_output.shape or output.dtype != call.dtype:
        raise ValueError(f"output is {output.dtype} {output.shape}, not {like_output.shape}")
    lse = of_rows.pop("lse")
    return Inspected(
        call.library.restore(output),
        call.rows(lse),
        lse,
        RowStatistics(**of_rows) if of_rows else None,
        str(about["backend"]),
        lambda: call,
    )


def _checked_call(about: dict[str, Any], arrays: dict[str, Array]) -> CheckedCall:
    """The call again, for the backend that computed its statistics, if that runs here."""
    library = _library(str(about["library"]), arrays)
    query, key, value = (_operand(about["operands"][name], arrays, library) for name in _OPERANDS)
    variants = from_data(about["variants"], arrays)
    if not isinstance(variants, tuple):
        raise ValueError("there is no list of variants")
    options = {name: from_data(about["options"][name], arrays) for name in _OPTIONS}
    try:
        values = OptionValues(**options, backend=str(about["statistics_backend"]))
        return check_call(bind(query, key, value, variants, values))
    except (ArgumentError, UnsupportedError):
        return check_call(bind(query, key, value, variants, OptionValues(**options)))


def _library(name: str, arrays: Mapping[str, Array]) -> ArrayLibrary:
    """The library of the call, or NumPy where that is not installed or has not these types."""
    numpy = library_named("numpy")
    try:
        library = library_named(name)
    except ImportError:
        return numpy
    dtypes = {array.dtype for name, array in arrays.items() if name.startswith(_OPERANDS)}
    kept = [library.view(library.restore(np.zeros(1, t)), "query").dtype == t for t in dtypes]
    return library if all(kept) else numpy


def _operand_data(operand: Any, arrays: dict[str, Array], place: str) -> Any:
    """Query, key or value as JSON data; its arrays are put into `arrays`.

    The order of axes in memory is kept, because the order in which NumPy adds products up depends
    on it.
    """
    if operand is None:
        return None
    if is_array(operand):
        arrays[place] = operand
        order = sorted(range(operand.ndim), key=lambda axis: -abs(operand.strides[axis]))
        return {"array": place, "order": order}
    held = {field.name: getattr(operand, field.name) for field in fields(operand)}
    data = {name: _operand_data(part, arrays, f"{place}.{name}") for name, part in held.items()}
    return {"storage": type(operand).__name__, "fields": data}


def _operand(data: Any, arrays: Mapping[str, Array], library: ArrayLibrary, depth: int = 0) -> Any:
    """What `_operand_data` was given, in arrays of a library."""
    if data is None:
        return None
    if "array" in data:
        array, order = arrays[data["array"]], data["order"]
        if sorted(order) != list(range(array.ndim)):
            raise ValueError(f"{shown(order)} is not an order of {array.ndim} axes")
        dense = np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
        return library.restore(dense)
    if depth > len(_STORAGE):
        raise ValueError("operands are nested too deeply")
    held = {n: _operand(part, arrays, library, depth + 1) for n, part in data["fields"].items()}
    return _STORAGE[data["storage"]](**held)


def _shape_of_rows(call: CheckedCall) -> tuple[int, ...]:
    spec = call.problem.spec
    return *spec.batch_shape, spec.num_heads, spec.q_len
