"""Weights of torch and transformers modules under the names that mechanisms use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError, QkvError, UnsupportedError
from qkv.mechanisms.base.arrays.normalization import weighted_rms_norm
from qkv.variants import RoPE

__all__ = [
    "layer_type_of",
    "measured_norm",
    "module_rope",
    "named_weights",
    "reads_module",
    "refuse_other_attributes",
    "refuse_other_parameters",
    "require_attributes",
    "torch_multi_head",
]


_Loader = TypeVar("_Loader", bound=Callable[..., Any])


def reads_module(load: _Loader) -> _Loader:
    """A loader `(cls, module, ...)` that refuses modules of a form that it does not expect.

    What it reads of a module of another kind may be missing, None, or of any other type or shape.

    Raises
    ------
    UnsupportedError
        Reading the module raised an error of Python or of torch.
    """

    @wraps(load)
    def loaded(cls: Any, module: Any, *arguments: Any, **options: Any) -> Any:
        # A wrong call of the loader itself stays a TypeError.
        signature(load).bind(cls, module, *arguments, **options)
        try:
            return load(cls, module, *arguments, **options)
        except QkvError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
                ValueError) as error:  # fmt: skip
            raise UnsupportedError(
                f"{type(module).__name__} cannot be read as {cls.name}.",
                [(type(error).__name__, str(error)[:200])],
                "Pass a module of the class that the loader names.",
            ) from error

    return cast(_Loader, loaded)


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
    UnsupportedError
        Its weights are not in memory.
    """
    from qkv.arrays.torch_arrays import check_loaded

    require_attributes(module, ("state_dict",))
    state = module.state_dict()
    names = names if isinstance(names, Mapping) else {name: name for name in names}
    weights: dict[str, Any] = {}
    check_loaded(module, state.values())
    for name, theirs in names.items():
        parts = [part for part in ("", ".weight", ".bias") if f"{theirs}{part}" in state]
        if not parts:
            raise ArgumentError(
                f"{type(module).__name__} has no {theirs}.",
                [("it has", ", ".join(state))],
                "Pass the attention module of a layer, not the layer or the model.",
            )
        for part in parts:
            weights[f"{name}{part}"] = state[f"{theirs}{part}"].detach().clone()
    return weights


def require_attributes(module: Any, names: Iterable[str]) -> None:
    """Raise if the module lacks an attribute that modules of its kind have.

    Raises
    ------
    ArgumentError
        It does.
    """
    for name in names:
        if not hasattr(module, name):
            raise ArgumentError(
                f"{type(module).__name__} has no {name}.",
                action="Pass an attention module of the class that the loader names.",
            )


def refuse_other_parameters(module: Any, read: Iterable[str], mechanism: str) -> None:
    """Raise if the module has parameters other than those of the names that were read.

    Raises
    ------
    UnsupportedError
        It has some, so it computes something with them.
    """
    taken = tuple(read)
    others = [
        name
        for name in module.state_dict()
        if not any(name == one or name.startswith(f"{one}.") for one in taken)
    ]
    if others:
        raise UnsupportedError(
            f"{type(module).__name__} has weights that {mechanism} does not use.",
            [("weights", ", ".join(others)[:300])],
            "Call the module itself: without them the output would be another.",
        )


def refuse_other_attributes(module: Any, known: Iterable[str]) -> None:
    """Raise if the module has an attribute that says something about it which is not known.

    Attributes of torch, private ones, submodules, and what is None, False or 0 say nothing.

    Raises
    ------
    UnsupportedError
        It has some.
    """
    taken = {*known, "training", "config", "layer_idx", "gradient_checkpointing"}
    others = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in taken and value
    }
    if others:
        raise UnsupportedError(
            f"{type(module).__name__} has attributes that its loader does not know.",
            [(name, shown(value, 100)) for name, value in others.items()],
            "Call the module itself, or one of the class that the loader names.",
        )


def measured_norm(module: Any, name: str) -> tuple[Any, float]:
    """The weight and epsilon with which `weighted_rms_norm` is the norm `name` of a module.

    Some models store the weight less one (Gemma), so the norm is run on random rows.

    Raises
    ------
    UnsupportedError
        It is another norm.
    """
    import torch

    norm = getattr(module, name)
    weight = named_weights(module, [name])[f"{name}.weight"]
    eps = next((getattr(norm, n) for n in ("variance_epsilon", "eps") if hasattr(norm, n)), None)
    if weight.ndim == 1:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(4, len(weight), generator=generator).to(weight)
        with torch.no_grad():
            expected = norm(rows).double()
        eps = float(torch.finfo(weight.dtype).eps if eps is None else eps)
        rtol = 8 * torch.finfo(weight.dtype).eps
        for candidate in (weight, 1.0 + weight):
            ours = weighted_rms_norm(rows.double(), candidate.double(), eps)
            if torch.allclose(ours, expected, rtol=max(rtol, 1e-6), atol=1e-6):
                return candidate, eps
    raise UnsupportedError(
        f"{name} of {type(module).__name__} is not an RMSNorm with one weight for each number.",
        [(name, shown(norm, 100))],
        "Call the module itself.",
    )


def layer_type_of(module: Any) -> str | None:
    """What the configuration says of the layer of an attention module, such as "full_attention"."""
    types = getattr(module.config, "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if types is None or index is None or index >= len(types):
        return None
    return str(types[index])


def module_rope(config: Any, layer_type: str | None, rope: RoPE | None) -> RoPE | None:
    """`rope`, or the rotary positions that a transformers config describes; None without any.

    Raises
    ------
    UnsupportedError
        `rope` is None and the frequencies change with the length of the text.
    """
    if rope is not None:
        return rope
    positions = getattr(config, "rope_parameters", None)
    if not positions:
        return None
    nested = all(isinstance(value, Mapping) for value in positions.values())
    positions = (positions.get(layer_type) or {}) if nested else positions
    kind = positions.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise UnsupportedError(
            f"the frequencies of rope_type {shown(kind)} change with the length of the text.",
            action="Pass rope=qkv.RoPE.from_hf_config(module.config, seq_len=...).",
        )
    return RoPE.from_hf_config(config, layer_type=layer_type if nested else None)


def torch_multi_head(module: Any) -> dict[str, Any]:
    """Arguments of `ProjectedAttention` from a `torch.nn.MultiheadAttention`.

    Raises
    ------
    ArgumentError
        It is another module.
    UnsupportedError
        The module adds keys and values of its own, or its keys and values differ in width.
    """
    needed = ("in_proj_weight", "in_proj_bias", "add_zero_attn", "kdim", "vdim", "out_proj")
    require_attributes(module, needed)
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
