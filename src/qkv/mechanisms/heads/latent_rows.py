"""Latent rows, which a cache of multi-head latent attention keeps, as callers pass them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.mechanisms.base.arrays.namespace import array_namespace
from qkv.variants import RoPE

__all__ = ["check_latents", "rotation_of_latents"]


def rotation_of_latents(rope: RoPE | None, width: int) -> RoPE:
    """Rotary positions of `width` numbers, interleaved unless given.

    Raises
    ------
    ArgumentError
        The numbers are not pairs, or the rotation is one of fewer.
    """
    rope = RoPE(layout="interleaved") if rope is None else rope
    if width % 2 or rope.rotary_dim not in (None, width):
        raise ArgumentError(
            f"qk_rope_head_dim={width} numbers are rotated in pairs, all of them.",
            [("rope", str(rope))],
            "Pass an even qk_rope_head_dim, and a rope without rotary_dim.",
        )
    return replace(rope, rotary_dim=width)


def check_latents(latents: Any, x: Any, width: int, least: int = 0) -> None:
    """Refuse what are not `least` latent rows or more of the sequences of x.

    Raises
    ------
    DTypeError
        `latents` is not an array, or of another type than x.
    ShapeError
        There are too few rows, or they are of another width, or of other sequences.
    """
    array_namespace(latents)
    shape, lead = tuple(latents.shape), tuple(x.shape[:-2])
    if shape[:-2] != lead or shape[-1] != width or shape[-2] < least:
        expected = ", ".join(map(str, (*lead, f"{least} or more", width)))
        raise ShapeError(
            f"latents have shape {shape}, not ({expected}).",
            [("x", str(tuple(x.shape)))],
            "Pass the latent rows of all tokens so far, as `latents` or `step` returns them.",
        )
    if latents.dtype != x.dtype:
        raise DTypeError(
            f"latents have dtype {latents.dtype}, x {x.dtype}.",
            action="Convert one of them to the dtype of the other.",
        )
