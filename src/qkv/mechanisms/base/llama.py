"""Mechanisms whose projections transformers names as those of Llama."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar, Self

from qkv.arguments.declarations import shown
from qkv.errors import UnsupportedError
from qkv.mechanisms.base.modules.comparing import closest, decoder_run
from qkv.mechanisms.base.modules.loading import (
    layer_type_of,
    measured_norm,
    module_rope,
    named_weights,
    reads_module,
    refuse_other_parameters,
    require_attributes,
)
from qkv.mechanisms.base.projected import ProjectedAttention
from qkv.variants import RoPE
from qkv.variants.rope import Pairs

__all__ = ["LlamaAttention", "refuse_window", "window_of"]

_NORMS = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
"""Names that models of transformers have for norms of queries and keys."""
_OTHER_WINDOWS = re.compile(r"window|attention_chunk|local_attention|sparse_attention|block_size")
_ALL_EARLIER = ("full_attention", "attention", "hybrid")
"""Types of layers whose attention sees all earlier tokens."""
_KNOWN_WINDOWS = {
    "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern",
    "_sliding_window_pattern",
}  # fmt: skip


class LlamaAttention(ProjectedAttention):
    """Attention that takes the weights of a LlamaAttention of transformers, or of one like it."""

    further_weights: ClassVar[tuple[str, ...]] = ()
    """Names of weights besides the projections, in transformers as well as here."""
    needs_rope: ClassVar[bool] = False
    """Whether a module without rotary positions is refused."""

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any, rope: RoPE | None = None) -> Self:
        """The mechanism with the weights of a LlamaAttention, or another with its names.

        Norms of queries and keys, a soft cap, sinks, and either layout of the rotation are read
        too. Both are run on random input, and a module that computes anything else is refused.

        Parameters
        ----------
        module : transformers attention module with q_proj, k_proj, v_proj and o_proj
        rope : qkv.RoPE, optional
            Its positions, instead of those that its configuration describes; `inv_freq` and, for
            YaRN and LongRoPE, `attention_factor` are the model's.

        Raises
        ------
        UnsupportedError
            The module has a weight, a mask or a step that the mechanism has not; or the
            frequencies of its positions change with the length of the text and `rope` is not given.
        ArgumentError
            The module lacks what the mechanism needs, such as the window of `SlidingWindow`.

        Notes
        -----
        Cost: the comparison runs the layer on 96 tokens, three times for each layout tried.
        """
        require_attributes(module, ("config", "head_dim"))
        weights, options = cls._read(module)
        options |= cls.options_of(module)
        layer_type, window = layer_type_of(module), options.get("left")
        given = module_rope(module.config, layer_type, rope)
        candidates = []
        for what, positions in _layouts(given, rope):
            if positions is not None or not cls.needs_rope:
                made = cls(**options, rope=positions, weights=weights)
                candidates.append((what, made))

        run = decoder_run(given, layer_type, window, causal=options["causal"])
        return closest(module, candidates, run, options["embed_dim"])

    @classmethod
    def _read(cls, module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Weights under our names, and the options that go with them."""
        names = {f"{side}_proj": f"{side}_proj" for side in "qkv"} | {"out_proj": "o_proj"}
        names |= {name: name for name in cls.further_weights}
        read = list(names.values())
        weights = named_weights(module, names)
        _fill_biases(weights)
        head_dim = module.head_dim
        (q_rows, embed_dim), k_rows = (
            weights["q_proj.weight"].shape,
            weights["k_proj.weight"].shape[0],
        )
        options: dict[str, Any] = {
            "embed_dim": embed_dim,
            "num_heads": q_rows // head_dim,
            "num_kv_heads": k_rows // head_dim,
            "head_dim": head_dim,
            "causal": bool(getattr(module, "is_causal", True)),
            "bias": "q_proj.bias" in weights,
            "scale": getattr(module, "scaling", None),
            "softcap": _either(module, "attn_logit_softcapping"),
        }
        for pair in _NORMS:
            if all(getattr(getattr(module, name, None), "weight", None) is not None
                   for name in pair):  # fmt: skip
                for side, name in zip("qk", pair, strict=True):
                    weight, eps = measured_norm(module, name)
                    weights[f"{side}_norm.weight"] = weight
                    read.append(name)
                options["qk_norm_eps"] = eps
                options["qk_norm"] = "head" if weight.numel() == head_dim else "all heads"
        if getattr(module, "sinks", None) is not None:
            weights |= named_weights(module, ["sinks"])
            options["sinks"] = True
            read.append("sinks")
        refuse_other_parameters(module, read, cls.name)
        if weights["out_proj.weight"].shape[1] != q_rows:
            raise UnsupportedError(
                f"q_proj of {type(module).__name__} gives {q_rows} numbers, and o_proj reads "
                f"{weights['out_proj.weight'].shape[1]}.",
                action="Call the module itself: it does something with queries beside scores.",
            )
        return weights, options

    @classmethod
    def options_of(cls, module: Any) -> dict[str, Any]:
        """Further keywords of the class for such a module.

        Raises
        ------
        UnsupportedError
            The layer has a window, which only `SlidingWindow` has.
        """
        refuse_window(module, cls.name)
        return {}


def refuse_window(module: Any, mechanism: str) -> None:
    """Raise if a layer has a window, which the mechanism has not.

    Raises
    ------
    UnsupportedError
        It has one, or a mask of another kind.
    """
    window = window_of(module)
    if window is not None:
        raise UnsupportedError(
            f"this layer sees a window of {window} tokens, and {mechanism} sees all.",
            action="Use SlidingWindow.from_transformers, or call the module itself.",
        )


def window_of(module: Any) -> int | None:
    """How many tokens a layer sees, itself included; None for all earlier ones.

    Raises
    ------
    UnsupportedError
        The configuration names a mask that is neither causal nor a window of fixed length.
    """
    config = module.config
    layer_type = layer_type_of(module)
    others: dict[str, Any] = {}
    if layer_type is None:
        others = {
            name: value for name, value in vars(config).items()
            if value and name not in _KNOWN_WINDOWS and _OTHER_WINDOWS.search(name)
        }  # fmt: skip
    elif layer_type not in (*_ALL_EARLIER, "sliding_attention"):
        others = {"layer_types": layer_type}
    if getattr(config, "use_bidirectional_attention", False):
        others["use_bidirectional_attention"] = config.use_bidirectional_attention
    if others:
        raise UnsupportedError(
            f"the configuration of {type(module).__name__} names a mask that is neither causal nor "
            "a window of fixed length.",
            [(name, shown(value, 100)) for name, value in others.items()],
            "Call the module itself.",
        )
    window = getattr(config, "sliding_window", None)
    if layer_type in _ALL_EARLIER or getattr(config, "use_sliding_window", True) is False:
        return None
    return window


def _layouts(rope: RoPE | None, given: RoPE | None) -> list[tuple[str, RoPE | None]]:
    if given is not None:
        return [(f"rope={shown(given, 80)}", given)]
    if rope is None:
        return [("no rotation", None)]
    layouts: tuple[Pairs, ...] = ("half_split", "interleaved")
    order = sorted(layouts, key=lambda layout: layout != rope.layout)
    candidates: list[tuple[str, RoPE | None]] = [
        (f"rotation with layout {layout!r}", replace(rope, layout=layout)) for layout in order
    ]
    return [*candidates, ("no rotation", None)]


def _either(module: Any, name: str) -> Any:
    """An attribute of the module or, without one, of its configuration."""
    return getattr(module, name, getattr(module.config, name, None))


def _fill_biases(weights: dict[str, Any]) -> None:
    """Zeros for the biases of projections without one, if others have theirs."""
    sides = ("q_proj", "k_proj", "v_proj", "out_proj")
    if any(f"{side}.bias" in weights for side in sides):
        for side in sides:
            weight = weights[f"{side}.weight"]
            weights.setdefault(f"{side}.bias", weight.new_zeros(weight.shape[0]))
