"""How a row is called: by the arrays of each library, and as transformers calls a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import qkv
from benchmarks.latency.rows import CALL
from qkv.errors import UnsupportedError
from qkv.variants import Bias, Causal, Not, Prefix, Sinks, SlidingWindow, Softcap

__all__ = ["FRONT_ENDS", "FrontEnd", "front_end"]

Array: TypeAlias = NDArray[Any]
Bound: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class FrontEnd:
    """One way to call.

    Attributes
    ----------
    name, package : str
        As tables show it, and what must be installed.
    place : callable (array) -> array
        From a NumPy array (batch, heads, length, head_dim) to what is passed.
    bind : callable (variants, lengths, options) -> callable (query, key, value)
        The call; what happens once in a model's step, such as making a mask, happens in `bind`.
    read : callable (result) -> array
        Back to NumPy, (batch, heads, length, head_dim).
    steps : bool
        Whether decoding steps are taken. They are not where every length is compiled anew.
    environment : mapping
        Variables of its process.
    """

    name: str
    package: str
    place: Callable[[Array], Any]
    bind: Callable[[Sequence[Any], tuple[int, int], Mapping[str, Any]], Bound]
    read: Callable[[Any], Array]
    steps: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


def _attention(
    variants: Sequence[Any], lengths: tuple[int, int], options: Mapping[str, Any]
) -> Bound:
    return lambda query, key, value: qkv.attention(query, key, value, *variants, **options)


def _attention_blhd(
    variants: Sequence[Any], lengths: tuple[int, int], options: Mapping[str, Any]
) -> Bound:
    return _attention(variants, lengths, {**options, "layout": "blhd"})


def _turned(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(1, 2))


# torch


def _tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(array))


def _attention_torch(
    variants: Sequence[Any], lengths: tuple[int, int], options: Mapping[str, Any]
) -> Bound:
    return _attention([_holding(v, _tensor) for v in variants], lengths, options)


def _holding(variant: Any, convert: Callable[[Array], Any]) -> Any:
    """The same variant, with arrays of another library in it, as the users of that hold them."""
    if isinstance(variant, np.ndarray):
        return convert(variant)
    if isinstance(variant, tuple):
        return tuple(_holding(part, convert) for part in variant)
    if not is_dataclass(variant) or isinstance(variant, type):
        return variant
    held = {entry.name: getattr(variant, entry.name) for entry in fields(variant) if entry.init}
    arrays = {
        name: _holding(value, convert)
        for name, value in held.items()
        if isinstance(value, np.ndarray | tuple) or is_dataclass(value)
    }
    return replace(variant, **arrays) if arrays else variant


# JAX


def _jax_array(array: Array) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(array)


def _attention_jax(
    variants: Sequence[Any], lengths: tuple[int, int], options: Mapping[str, Any]
) -> Bound:
    attend = _attention([_holding(v, _jax_array) for v in variants], lengths, options)
    return lambda *arrays: attend(*arrays).block_until_ready()


def _attention_jit(
    variants: Sequence[Any], lengths: tuple[int, int], options: Mapping[str, Any]
) -> Bound:
    import jax

    held = [_holding(v, _jax_array) for v in variants]
    compiled = jax.jit(_attention(held, lengths, options))
    return lambda *arrays: compiled(*arrays).block_until_ready()


# transformers


def _interface(
    variants: Sequence[Any], lengths: tuple[int, int], options: Mapping[str, Any]
) -> Bound:
    """The function of "qkv" in transformers' `AttentionInterface`, with the mask of a step made."""
    import torch
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import qkv.hf

    qkv.hf.enable()
    mask_function, padding, options = _in_transformers_words(variants)
    q_len, kv_len = lengths
    kept = None
    if padding is not None:
        kept = torch.arange(kv_len)[None] >= _tensor(np.asarray(padding).reshape(-1, 1))
    mask = None
    if mask_function is not None:
        mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["qkv"](
            batch_size=1,
            q_length=q_len,
            kv_length=kv_len,
            q_offset=kv_len - q_len,
            mask_function=mask_function,
            attention_mask=kept,
        )
    attend = ALL_ATTENTION_FUNCTIONS["qkv"]
    module = torch.nn.Module()
    options |= {"scaling": CALL.head_dim**-0.5, "is_causal": False}

    def run(query: Any, key: Any, value: Any) -> Any:
        return attend(module, query, key, value, mask, **options)[0]

    return run


def _in_transformers_words(variants: Sequence[Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Mask function, padding and keywords."""
    from transformers import masking_utils

    mask, padding = None, None
    options: dict[str, Any] = {}
    for variant in variants:
        if isinstance(variant, Causal):
            mask = masking_utils.causal_mask_function
        elif isinstance(variant, SlidingWindow) and variant.right == 0 and variant.left is not None:
            mask = masking_utils.sliding_window_causal_mask_function(variant.left + 1)
        elif isinstance(variant, Not) and isinstance(variant.mask, Prefix):
            padding = variant.mask.length
        elif isinstance(variant, Softcap):
            options["softcap"] = variant.cap
        elif isinstance(variant, Sinks):
            values = np.asarray(variant.values, np.float32)
            options["s_aux"] = _tensor(np.broadcast_to(values, (CALL.num_heads,)))
        elif isinstance(variant, Bias):
            options["position_bias"] = _tensor(np.asarray(variant.array))
        else:
            raise UnsupportedError("a layer of transformers has no words for it.")
    return mask, padding, options


_QKV = {"QKV_NUM_THREADS": "{threads}"}
_OMP = {**_QKV, "OMP_NUM_THREADS": "{threads}", "MKL_NUM_THREADS": "{threads}"}
_XLA = {**_QKV, "JAX_PLATFORMS": "cpu", "NPROC": "{threads}"}

FRONT_ENDS = (
    FrontEnd(
        "NumPy", "numpy", np.ascontiguousarray, _attention, np.asarray, environment=_QKV
    ),
    FrontEnd(
        "NumPy blhd", "numpy", _turned, _attention_blhd, lambda out: out.swapaxes(1, 2),
        environment=_QKV,
    ),
    FrontEnd(
        "torch", "torch", _tensor, _attention_torch, lambda out: np.asarray(out.detach()),
        environment=_OMP,
    ),
    FrontEnd(
        "torch transposed", "torch", lambda array: _tensor(_turned(array)).transpose(1, 2),
        _attention_torch, lambda out: np.asarray(out.detach()), environment=_OMP,
    ),
    FrontEnd("JAX", "jax", _jax_array, _attention_jax, np.asarray, environment=_XLA),
    FrontEnd("JAX jit", "jax", _jax_array, _attention_jit, np.asarray, False, _XLA),
    FrontEnd(
        "Hugging Face", "transformers", lambda array: _tensor(_turned(array)).transpose(1, 2),
        _interface, lambda out: np.asarray(out.transpose(1, 2)), environment=_OMP,
    ),
)  # fmt: skip


def front_end(name: str) -> FrontEnd:
    """The front end of exactly this name."""
    return next(one for one in FRONT_ENDS if one.name == name)
