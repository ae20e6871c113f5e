"""Mechanisms whose projections transformers names as those of Llama."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from qkv.mechanisms.base.loading import named_weights, plain_rope
from qkv.mechanisms.base.projected import ProjectedAttention
from qkv.variants import RoPE

__all__ = ["LlamaAttention"]


class LlamaAttention(ProjectedAttention):
    """Attention that takes the weights of a LlamaAttention of transformers, or of one like it."""

    further_weights: ClassVar[tuple[str, ...]] = ()
    """Names of weights besides the projections, in transformers as well as here."""

    @classmethod
    def from_transformers(cls, module: Any, rope: RoPE | None = None) -> Self:
        """The mechanism with the weights of a LlamaAttention, or another with its names.

        Parameters
        ----------
        module : transformers attention module with q_proj, k_proj, v_proj and o_proj
        rope : qkv.RoPE, optional
            Its positions, where they are scaled.

        Raises
        ------
        UnsupportedError
            Its positions are scaled and `rope` is not given.
        ArgumentError
            Its config lacks what the mechanism needs, such as the window of `SlidingWindow`.
        """
        config = module.config
        names = {f"{side}_proj": f"{side}_proj" for side in "qkv"} | {"out_proj": "o_proj"}
        names |= {name: name for name in cls.further_weights}
        weights = named_weights(module, names)
        return cls(
            config.hidden_size,
            config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=module.head_dim,
            causal=True,
            bias="q_proj.bias" in weights,
            rope=plain_rope(config, rope),
            scale=module.scaling,
            weights=weights,
            **cls.options_of(module),
        )

    @classmethod
    def options_of(cls, module: Any) -> dict[str, Any]:
        """Further keywords of the class for such a module."""
        return {}
