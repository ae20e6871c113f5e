"""Weights of torch and transformers modules under the names that mechanisms use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from qkv.errors import ArgumentError, UnsupportedError
from qkv.variants import RoPE

__all__ = ["named_weights", "plain_rope", "torch_multi_head"]


def named_weights(module: Any, names: Mapping[str, str] | Iterable[str]) -> dict[str, Any]:
    """Copies of a module's weights, and their biases where there are some.

    Parameters
    ----------
    module : torch.nn.Module
    names : mapping of str to str, or iterable of str
        Name here, such as "out_proj", to the name in the module, such as "o_proj"; names alone are
        the same here and there. Without a "weight" or "bias" below it, the parameter of that name
        itself.

    Returns
    -------
    dict of str to torch.Tensor
        Without gradients.

    Raises
    ------
    ArgumentError
        The module has no such parameter.
    """
    state = module.state_dict()
    names = names if isinstance(names, Mapping) else {name: name for name in names}
    found: dict[str, Any] = {}
    for name, theirs in names.items():
        parts = [part for part in ("", ".weight", ".bias") if f"{theirs}{part}" in state]
        if not parts:
            raise ArgumentError(
                f"{type(module).__name__} has no {theirs}.",
                [("it has", ", ".join(state))],
                "Pass the attention module of a layer, not the layer or the model.",
            )
        for part in parts:
            found[f"{name}{part}"] = state[f"{theirs}{part}"].detach().clone()
    return found


def plain_rope(config: Any, rope: RoPE | None, layout: Any = "half_split") -> RoPE:
    """`rope`, or the rotary positions that a transformers config describes without scaling.

    Raises
    ------
    UnsupportedError
        `rope` is None and the positions are scaled.
    """
    if rope is not None:
        return rope
    positions = getattr(config, "rope_parameters", None) or {}
    if positions.get("rope_type", "default") != "default" or "rope_theta" not in positions:
        raise UnsupportedError(
            f"the module has rope_parameters {positions!r:.200}.",
            action="Pass rope=qkv.RoPE(inv_freq=...) with its frequencies.",
        )
    return RoPE(base=positions["rope_theta"], layout=layout)


def torch_multi_head(module: Any) -> dict[str, Any]:
    """Arguments of `ProjectedAttention` from a `torch.nn.MultiheadAttention`.

    Raises
    ------
    UnsupportedError
        The module adds keys and values of its own, or its keys and values differ in width.
    """
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    if "bias_k" in state or module.add_zero_attn or module.kdim != module.vdim:
        raise UnsupportedError(
            "the module has bias_k and bias_v, add_zero_attn, or kdim different from vdim.",
            action="Use a module without them.",
        )
    weights = {f"out_proj.{kind}": state[f"out_proj.{kind}"] for kind in ("weight", "bias")
               if f"out_proj.{kind}" in state}  # fmt: skip
    for i, side in enumerate("qkv"):
        if "in_proj_weight" in state:
            weights[f"{side}_proj.weight"] = state["in_proj_weight"].chunk(3)[i]
        else:
            weights[f"{side}_proj.weight"] = state[f"{side}_proj_weight"]
        if "in_proj_bias" in state:
            weights[f"{side}_proj.bias"] = state["in_proj_bias"].chunk(3)[i]
    return {
        "embed_dim": module.embed_dim,
        "num_heads": module.num_heads,
        "kv_dim": module.kdim,
        "bias": "in_proj_bias" in state,
        "weights": weights,
    }
