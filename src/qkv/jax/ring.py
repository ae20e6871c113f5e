"""Attention of JAX arrays whose rows are spread over devices: keys travel around a ring."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qkv._api import attention
from qkv.arguments.declarations import checked_integer, shown
from qkv.bridges.jax.calls import array_of_jax, scaled
from qkv.bridges.jax.pytrees import with_constants
from qkv.bridges.jax.rules import stand_in
from qkv.call.binding.bound import bind
from qkv.call.binding.flatten import Leaves, flatten, roles_of, unflatten
from qkv.call.binding.options import OptionValues
from qkv.call.checked import check_call
from qkv.errors import AmbiguityError, ArgumentError, QkvError, ShapeError, UnsupportedError
from qkv.partial import Partial, merge
from qkv.variants import (
    ALiBi,
    Causal,
    GlobalTokens,
    Prefix,
    RelativeBias,
    RoPE,
    ScoreMod,
    Sinks,
    SlidingWindow,
    Softcap,
    Strided,
)
from qkv.variants.masks.algebra import AllOf, AnyOf, Not

__all__ = ["ring_attention"]

OF_POSITIONS = (
    ALiBi, Causal, GlobalTokens, Prefix, RelativeBias, RoPE, ScoreMod, SlidingWindow, Softcap,
    Strided,
)  # fmt: skip
"""Variants that read where rows stand, and no array of the rows."""


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    axis_name: str,
    scale: Any = None,
    q_offset: int | Literal["start", "end"] | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention over rows that devices share, inside of `jax.shard_map`; O(n / devices) memory.

        out = softmax(scale * Q K^T + ...) V   over the rows of all devices along the axis

    Device i holds the i-th of as many equal parts of the rows. Keys and values go once around.

    Parameters
    ----------
    query : array (..., num_heads, own rows, head_dim)
    key : array (..., num_kv_heads, own rows, head_dim)
    value : array (..., num_kv_heads, own rows, v_head_dim)
    *variants
        Those that read positions, which are those of the whole sequence: `Causal`,
        `SlidingWindow`, `Prefix`, `GlobalTokens`, `Strided`, `&`, `|` and `~` of them, `ALiBi`,
        `RelativeBias`, `RoPE`, `Softcap`, `ScoreMod`; and `Sinks`.
    axis_name : str
        Of the mesh.
    scale : float or scalar array, optional
        `head_dim ** -0.5` unless given. A traced one multiplies the query.
    q_offset : int, "start", "end" or None
        Position of query row 0 of all devices. "start" is 0, "end" puts the last query at the last
        key. `Causal(align=...)` says it as well.
    return_lse : bool
        Return `(output, lse)`.

    Returns
    -------
    array like query, or (array, array (..., num_heads, own rows))
        Differentiable once, in reverse. Gradients of arrays of variants are summed over devices as
        JAX does for other operations.

    Raises
    ------
    UnsupportedError
        For other variants, which hold arrays of the rows.
    AmbiguityError
        If query and key differ in rows, a variant compares positions, and nothing says where the
        queries stand; or if two statements differ.
    ArgumentError, ShapeError
        If something is not an array, or key and value differ in rows.

    Notes
    -----
    The backward pass sends keys around again, with their gradients, and computes each step's
    forward pass anew, so that no device ever holds more than two parts. Parts are merged in
    float32 (float64 for float64), by steps of the ring: every run has the same bits.
    Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers" (2023).

    Examples
    --------
    >>> import jax, jax.numpy as jnp, qkv.jax
    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(AxisType.Auto,))
    >>> def attend(q, k, v):
    ...     return qkv.jax.ring_attention(q, k, v, qkv.Causal(), axis_name="rows")
    >>> rows = P(None, "rows", None)
    >>> x = jnp.ones((2, 8 * jax.device_count(), 4))
    >>> jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)(x, x, x).shape[0]
    2
    """
    for variant in variants:
        _require_positions(variant)
    for name, array in (("query", query), ("key", key), ("value", value)):
        if not isinstance(array, (jax.Array, np.ndarray)) or array.ndim < 2:
            raise ArgumentError(
                f"{name} is a {type(array).__name__}, not an array (..., num_heads, rows, dim).",
                action="Pass an array of JAX.",
            )
    if jnp.shape(key)[-2] != jnp.shape(value)[-2]:
        raise ShapeError(
            f"key has {jnp.shape(key)[-2]} rows and value {jnp.shape(value)[-2]}.",
            action="Pass the same rows of both.",
        )
    devices = _devices_along(axis_name)
    if q_offset is not None and not isinstance(q_offset, str):
        q_offset = checked_integer("q_offset", q_offset)
    _check_alignment(devices, (query, key, value), variants, q_offset)
    words: list[Any] = [q_offset]
    sinks = tuple(v for v in variants if isinstance(v, Sinks))
    others = tuple(
        with_constants(_unaligned(v, words)) for v in variants if not isinstance(v, Sinks)
    )
    more_keys = devices * (jnp.shape(key)[-2] - jnp.shape(query)[-2])
    first = q_offset if isinstance(q_offset, int) else more_keys if "end" in words else 0
    leaves = Leaves.none()
    tree = flatten((sinks, others), leaves)
    # Each device has a gradient of its own of what all devices share; the transpose adds them up.
    shared = [
        _varying(array_of_jax(leaf, role), axis_name)
        for leaf, role in zip(leaves.arrays, roles_of(tree, iter(leaves.arrays)), strict=True)
    ]
    query, options = scaled(query, OptionValues(scale=scale))
    ring = _Ring(axis_name, tree, options.scale, first)
    if jnp.shape(query)[-2]:
        out, lse = _attend(ring, query, key, value, shared)
    else:  # JAX forgets in loops that arrays without rows differ between devices.
        out, lse = ring.step(0, query, key, value, shared)
    return (out, lse) if return_lse else out


def _require_positions(variant: Any) -> None:
    match variant:
        case AllOf() | AnyOf():
            for part in variant.masks:
                _require_positions(part)
        case Not():
            _require_positions(variant.mask)
        case Sinks():
            pass
        case _ if not isinstance(variant, OF_POSITIONS):
            raise UnsupportedError(
                f"{type(variant).__name__} is not a variant of positions, so that a device cannot "
                "read it for the rows of others.",
                [("variants of positions", ", ".join(kind.__name__ for kind in OF_POSITIONS))],
                "Say it with one of those, or gather the keys with jax.lax.all_gather.",
            )


def _unaligned(variant: Any, words: list[str]) -> Any:
    """The variant without what it says of alignment, which is added to `words`."""
    match variant:
        case AllOf() | AnyOf():
            return replace(variant, masks=tuple(_unaligned(m, words) for m in variant.masks))
        case Not():
            return replace(variant, mask=_unaligned(variant.mask, words))
        case Causal() if variant.align is not None:
            words.append(variant.align)
            return replace(variant, align=None)
    return variant


def _check_alignment(
    devices: int, operands: Sequence[Any], variants: Sequence[Any], q_offset: Any
) -> None:
    """Raise unless it is clear where query rows stand.

    It must be now: XLA ends the process where one device fails for which others wait.
    """
    leaves = Leaves.none()
    tree = flatten(tuple(variants), leaves)
    query, key, value = (stand_in(jax.typeof(array)) for array in operands)
    arrays = (stand_in(jax.typeof(array)) for array in leaves.arrays)
    options = OptionValues(q_offset=q_offset)
    check_call(bind(query, key, value, (), options))
    query, key, value = (
        np.broadcast_to(np.zeros((), a.dtype), (*a.shape[:-2], devices * a.shape[-2], a.shape[-1]))
        for a in (query, key, value)
    )
    try:
        check_call(bind(query, key, value, unflatten(tree, arrays.__next__), options))
    except AmbiguityError:
        raise
    except QkvError:  # Arrays are replaced by zeros here, so other errors may not be the caller's.
        pass


def _devices_along(axis_name: str) -> int:
    """How many devices an axis has, an error if the call is not mapped over one of this name."""
    if isinstance(axis_name, str):
        with suppress(NameError):
            size: int = jax.lax.axis_size(axis_name)
            return size
    raise ArgumentError(
        f"axis_name={shown(axis_name)} is not an axis of devices here.",
        action="Call it inside of jax.shard_map, with the name of an axis of its mesh.",
    )


def _varying(leaf: Any, axis_name: str) -> Any:
    """The same array, of which each device counts as having one of its own."""
    # A choice by device; functions that say so have other names in each version of JAX.
    return jnp.where(jax.lax.axis_index(axis_name) >= 0, leaf, leaf)


class _Ring:
    """What is static in one call."""

    def __init__(self, axis_name: str, tree: Any, scale: float | None, first: int) -> None:
        self.axis_name, self.tree, self.scale, self.first = axis_name, tree, scale, first
        self.devices = _devices_along(axis_name)

    def sent(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays of the device before this one."""
        ring = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return [jax.lax.ppermute(array, self.axis_name, ring) for array in arrays]

    def step(self, number: Any, query: Any, key: Any, value: Any, leaves: Any) -> tuple[Any, Any]:
        """`(out, lse)` of the own queries with the keys that came in this step."""
        own = jax.lax.axis_index(self.axis_name)
        owner = (own - number) % self.devices
        sinks, others = unflatten(self.tree, iter(leaves).__next__)
        # Sinks belong to the whole, so that one step has them.
        variants = others + (sinks if isinstance(number, int) else ())
        return attention(
            query, key, value, *variants,
            scale=self.scale, q_offset=self.first + own * query.shape[-2],
            kv_offset=owner * key.shape[-2], return_lse=True,
        )  # fmt: skip


def _attend(ring: _Ring, query: Any, key: Any, value: Any, leaves: list[Any]) -> tuple[Any, Any]:
    wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32

    @jax.custom_vjp
    def whole(q: Any, k: Any, v: Any, leaves: Any) -> tuple[Any, Any]:
        out, lse = ring.step(0, q, k, v, leaves)

        def advance(number: Any, carried: Any) -> Any:
            k, v, out, lse = carried
            k, v = ring.sent((k, v))
            own_out, own_lse = ring.step(number, q, k, v, leaves)
            merged = merge([Partial(out, lse), Partial(own_out.astype(wide), own_lse)], jnp)
            return k, v, merged.out, merged.lse

        state = k, v, out.astype(wide), lse
        *_, out, lse = jax.lax.fori_loop(1, ring.devices, advance, state)
        return out.astype(q.dtype), lse

    def forward(q: Any, k: Any, v: Any, leaves: Any) -> Any:
        out, lse = whole(q, k, v, leaves)
        return (out, lse), (q, k, v, leaves, out, lse)

    def backward(kept: Any, cotangents: Any) -> Any:
        q, k, v, leaves, out, lse = kept
        learned = [leaf for leaf in leaves if _is_floating(leaf)]
        d_out, d_lse = (cotangent.astype(wide) for cotangent in cotangents)
        of_whole = (d_out * out.astype(wide)).sum(-1)

        def gradients(number: Any, k: Any, v: Any) -> Any:
            """Gradients by one step's result: d out_i = w d out, with the weight w of the step."""

            def step(q: Any, k: Any, v: Any, learned: Any) -> Any:
                own = iter(learned)
                given = [next(own) if _is_floating(leaf) else leaf for leaf in leaves]
                return ring.step(number, q, k, v, given)

            (own_out, own_lse), pull = jax.vjp(step, q, k, v, learned)
            weight = _weight(own_lse, lse)
            of_step = (d_out * own_out.astype(wide)).sum(-1)
            d_own_out = (d_out * weight[..., None]).astype(own_out.dtype)
            d_own_lse = (weight * (of_step - of_whole + d_lse)).astype(own_lse.dtype)
            return jax.tree.map(lambda d: d.astype(wide), pull((d_own_out, d_own_lse)))

        d_q, d_k, d_v, d_learned = gradients(0, k, v)

        def advance(number: Any, carried: Any) -> Any:
            *travelling, summed = carried
            k, v, d_k, d_v = ring.sent(travelling)
            own_q, own_k, own_v, own_learned = gradients(number, k, v)
            summed = jax.tree.map(jnp.add, summed, (own_q, own_learned))
            return k, v, d_k + own_k, d_v + own_v, summed

        state = k, v, d_k, d_v, (d_q, d_learned)
        *_, d_k, d_v, (d_q, d_learned) = jax.lax.fori_loop(1, ring.devices, advance, state)
        d_k, d_v = ring.sent((d_k, d_v))  # The last step leaves them one device before their own.
        own = iter(d_learned)
        d_leaves = [
            next(own).astype(leaf.dtype) if _is_floating(leaf) else
            np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves
        ]  # fmt: skip
        return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_leaves

    whole.defvjp(forward, backward)
    return whole(query, key, value, leaves)


def _is_floating(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _weight(lse: Any, total: Any) -> Any:
    """exp(lse - total), 0 where no key was seen."""
    return jnp.exp(jnp.where(total > -jnp.inf, lse - total, -jnp.inf))
