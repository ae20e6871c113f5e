"""Attention with JAX's own signature, and over devices; `qkv.attention` takes JAX arrays as well.

ring    `ring_attention`, keys that travel between devices inside of `jax.shard_map`
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qkv._api import attention
from qkv.arguments.declarations import checked
from qkv.bridges.jax.rules import is_registered
from qkv.call.binding.unknown_keywords import drop_in_error, with_signature_of_theirs
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.jax.ring import ring_attention
from qkv.variants import Bias, Causal, KeyLengths, Mask, SlidingWindow

__all__ = ["dot_product_attention", "ring_attention"]

_MOST_DIMENSIONS = 32

is_registered()  # Registers the foreign function, which programs that were exported name.


@with_signature_of_theirs
@checked
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    **unknown: Any,
) -> Any:
    """`jax.nn.dot_product_attention`, exact and in O(n) memory; the import is all that changes.

        s[t, j] = scale * query[t] . key[j] + bias[t, j]
        out[t]  = sum_j exp(s[t, j] - lse[t]) value[j],   lse[t] = log sum_j exp(s[t, j])

    over the pairs that are allowed.

    Parameters
    ----------
    query : array (batch, q_len, num_heads, head_dim), or without batch
    key, value : array (batch, kv_len, num_kv_heads, head_dim), or without batch
        num_kv_heads divides num_heads.
    bias : array, optional
        Added to the scores; broadcasts to (batch, num_heads, q_len, kv_len).
    mask : boolean array, optional
        True = attend; broadcasts like bias.
    scale : float or scalar array, optional
        `head_dim ** -0.5` unless given. A traced one multiplies the query.
    is_causal : bool
        Row t sees keys up to t, also where q_len and kv_len differ.
    query_seq_lengths, key_value_seq_lengths : int32 array (batch,), optional
        Rows and keys that are real; the output of other rows is 0.
    local_window_size : int or (int, int), optional
        Keys before and after row t that it sees, both included.
    implementation : None, "xla" or "cudnn"
        None is qkv. A name asks for that kernel of JAX's, and JAX is called.
    return_residual : bool
        Return `(out, lse)`, lse (batch, q_len, num_heads) in key's dtype and without gradient.

    Returns
    -------
    array or (array, array)
        Output like query.

    Raises
    ------
    KeywordError
        A keyword of another library; the message has the call to write.
    ShapeError, DTypeError, ArgumentError
        The arguments do not fit; while JAX traces, as far as shapes and dtypes tell. What only
        values tell is a `jax.errors.JaxRuntimeError` with the same message.

    Notes
    -----
    One difference: a row that may see no key is 0 here, with lse -inf and gradients 0; JAX gives
    it the mean of all values, those behind the mask included. It does so by large finite scores,
    through which NaN behind a mask reaches every row; here it reaches none.

    The CPU computes. `jit`, `grad`, `grad` of `grad`, `jvp`, `linearize`, `jacfwd`, `hessian`,
    `vmap`, `scan`, `checkpoint` and `shard_map` apply. `jvp` of `jvp` and third derivatives raise
    UnsupportedError.
    Cost: `4 head_dim` operations for each pair in a tile that is not empty. Source: the signature
    of JAX 0.10.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np, qkv.jax
    >>> x = jnp.eye(2)[:, None]
    >>> out = qkv.jax.dot_product_attention(x, x, x, is_causal=True)
    >>> np.asarray(out[:, 0]).round(2)
    array([[1.  , 0.  ],
           [0.33, 0.67]], dtype=float32)
    """
    if unknown:
        said = {
            "bias": bias, "mask": mask, "is_causal": is_causal, "scale": scale, "layout": "blhd",
            "key_value_seq_lengths": key_value_seq_lengths,
        }  # fmt: skip
        known = signature(dot_product_attention).parameters
        raise drop_in_error("dot_product_attention", unknown, said, list(known))
    for given in (query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths):
        _check_depth(given)
    if implementation is not None:
        their_own: Any = jax.nn.dot_product_attention
        return their_own(
            query,
            key,
            value,
            bias,
            mask,
            scale=scale,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            implementation=implementation,
            **({"return_residual": True} if return_residual else {}),
        )
    q, k, v = (
        _four_dimensions(given, name)
        for given, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    shape = jnp.shape(query)
    _check(q, k, v)
    variants: list[Any] = []
    if bias is not None:
        variants.append(Bias(_added(_four_dimensions(bias, "bias"))))
    if mask is not None:
        allowed = _four_dimensions(mask, "mask")
        if allowed.dtype != bool:
            raise DTypeError(
                f"mask has dtype {allowed.dtype}, not bool.",
                action="Pass mask.astype(bool) if 1 means may attend, or bias=mask to add it to "
                "the scores.",
            )
        variants.append(Mask(allowed))
    if is_causal:
        variants.append(Causal())
    if local_window_size is not None:
        one_for_both = isinstance(local_window_size, int | np.integer)
        left_right: Any = (local_window_size,) * 2 if one_for_both else local_window_size
        if len(left_right) != 2:
            raise ArgumentError(
                f"local_window_size={left_right} has {len(left_right)} numbers.",
                action="Pass (before, after), or one number for both.",
            )
        variants.append(SlidingWindow(*left_right))
    batch, q_len, kv_len = q.shape[0], q.shape[1], k.shape[1]
    if query_seq_lengths is not None:
        lengths = _lengths(query_seq_lengths, "query_seq_lengths", batch)
        variants.append(Mask((jnp.arange(q_len)[None] < lengths[:, None])[:, None, :, None]))
    if key_value_seq_lengths is not None:
        lengths = _lengths(key_value_seq_lengths, "key_value_seq_lengths", batch)
        variants.append(KeyLengths(jnp.clip(lengths, 0, kv_len)))
    if isinstance(scale, jax.core.Tracer):
        q, scale = q * scale.astype(q.dtype), 1.0
    try:
        out, lse = attention(
            q, k, v, *variants, scale=scale, layout="blhd", q_offset="start", return_lse=True
        )
    except ShapeError as error:
        if 'layout="' not in error.action:
            raise
        raise error.with_action("Pass (batch, length, heads, dim), as by swapaxes(1, 2).") from None
    out = out.reshape(shape)
    if not return_residual:
        return out
    residual = lse.swapaxes(1, 2).astype(k.dtype).reshape(shape[:-1])
    return out, jax.lax.stop_gradient(residual)


def _array(given: Any, name: str) -> Any:
    try:
        return jnp.asarray(given)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise DTypeError(
            f"{name} is a {type(given).__name__}, not an array.", action="Pass jax.numpy arrays."
        ) from error


def _check_depth(given: Any) -> None:
    """Refuse lists that are nested more deeply than arrays can be, as one that holds itself is.

    JAX would not count its recursion back: whatever Python calls afterwards would be too deep.
    """
    level = [given]
    for _ in range(_MOST_DIMENSIONS + 1):
        inside = [part for part in level if isinstance(part, list | tuple)]
        level = list({id(inner): inner for part in inside for inner in part}.values())
    if level:
        raise DTypeError(
            f"a list is nested more than {_MOST_DIMENSIONS} times, or holds itself.",
            action="Pass jax.numpy arrays.",
        )


def _four_dimensions(array: Any, name: str) -> Any:
    made = _array(array, name)
    return made.reshape((1,) * (4 - made.ndim) + made.shape)


def _check(query: Any, key: Any, value: Any) -> None:
    """Raise the errors of JAX that qkv would not raise: one batch, and values as wide as keys."""
    seen = [(name, f"{array.dtype} {array.shape}")
            for name, array in (("query", query), ("key", key), ("value", value))]  # fmt: skip
    if max(query.ndim, key.ndim, value.ndim) > 4:
        raise ShapeError(
            "query, key or value has more than 4 dimensions.",
            seen,
            "Pass (batch, length, heads, dim), or qkv.attention(..., layout='blhd').",
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        # jax.nn raises a ValueError here, and DTypeError is not one.
        raise ArgumentError(
            "query, key and value have different dtypes.",
            seen,
            "Convert them to one, as in key.astype(query.dtype).",
        )
    if key.shape != value.shape or query.shape[0] != key.shape[0]:
        raise ShapeError(
            "key and value have one shape here, and query has their batch.",
            seen,
            "qkv.attention(..., layout='blhd') takes other values, and broadcasts.",
        )


def _added(bias: Any) -> Any:
    """A bias of any real type; whole numbers are made floating, as by addition."""
    if jnp.issubdtype(bias.dtype, jnp.floating):
        return bias
    if jnp.issubdtype(bias.dtype, jnp.complexfloating):
        raise DTypeError(f"bias has dtype {bias.dtype}.", action="Pass bias.real.")
    return bias.astype(jnp.float32)


def _lengths(lengths: Any, name: str, batch: int) -> Any:
    made = _array(lengths, name)
    if made.shape != (batch,) or made.dtype != jnp.int32:
        raise ShapeError(
            f"{name} is {made.dtype} {made.shape}; the batch is {batch}.",
            action=f"Pass int32 of shape ({batch},).",
        )
    return made
