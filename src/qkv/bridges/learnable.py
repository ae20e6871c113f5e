"""Scales that are learned, or one for each head; constants of variants that cannot be learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qkv.arguments.array_errors import no_array_error
from qkv.arguments.readable_checks import array_shape, is_truth_value
from qkv.call.binding.bound import Structure
from qkv.call.binding.options import OptionValues
from qkv.call.binding.undeclared import held_arrays
from qkv.errors import DTypeError, ShapeError, UnsupportedError

__all__ = ["no_gradient", "refuse_constants", "refuse_undeclared", "with_scale"]


def with_scale(query: Any, options: OptionValues) -> tuple[Any, OptionValues]:
    """The query times an array of scales, and options without it.

    `scale * (q . k) = (scale * q) . k`, which the library of the query differentiates. The array
    has no dimension, or one of query heads.
    """
    scale = options.scale
    if is_truth_value(scale):
        raise DTypeError("scale has dtype bool.", action="Pass scale as floating numbers.")
    shape = array_shape("scale", scale)
    by_rows = options.layout == "blhd"
    heads = query.shape[-2 if by_rows else -3] if query.ndim > 2 else 1
    # Dynamo takes a tuple with a size that is a variable of its graph for unlike any other.
    if len(shape) > 1 or (shape and shape[0] != heads):
        raise ShapeError(
            f"scale has shape {shape}; there are {heads} query heads.",
            action="Pass one number, or one for each query head.",
        )
    if shape and query.ndim > 2:
        # As many dimensions as the query has, since JAX can be told to refuse fewer.
        places = [1] * query.ndim
        places[-2 if by_rows else -3] = heads
        scale = scale.reshape(places)
    scaled = query * scale
    if scaled.dtype != query.dtype:
        convert = getattr(scaled, "astype", None) or scaled.to
        scaled = convert(query.dtype)
    return scaled, options._replace(scale=1.0)


def refuse_constants(variants: Sequence[Any], is_tracked: Callable[[Any], bool]) -> None:
    """Raise an error if an array without a gradient is to be learned: it would train nothing."""
    for variant in variants:
        fields = getattr(type(variant), "constant_fields", {})
        for name, instead in fields.items():
            if is_tracked(getattr(variant, name, None)):
                raise no_gradient(
                    f"{name} of {type(variant).__name__}", f"{name}.detach()", instead
                )


def refuse_undeclared(structure: Structure, is_tracked: Callable[[Any], bool]) -> None:
    """Raise an error if an object that does not say what it holds has an array to be learned."""
    if structure.is_known:
        return
    for thing, name, array in held_arrays(structure.variants):
        if is_tracked(array):
            if hasattr(type(thing), "__jax_array__"):
                raise no_array_error(thing, "a parameter of a variant")
            raise UnsupportedError(
                f"{name} is differentiated or traced, and its class does not say how a call reads "
                "it, so that its gradient would be lost.",
                action="Declare `roles` in the class, {} at least, and keep the array in an "
                "attribute of its own.",
            )


def no_gradient(what: str, stopped: str, instead: str) -> UnsupportedError:
    """The error where a gradient is wanted that qkv does not have.

    `stopped` is the array without a gradient as the caller's library writes it, and `instead` what
    to write for one that is learned.
    """
    return UnsupportedError(
        f"a gradient of {what} is wanted; qkv has none.", action=f"Pass {stopped}, or {instead}."
    )
