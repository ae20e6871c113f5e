"""Multi-query attention."""

from __future__ import annotations

from typing import Any, Self, Unpack

from qkv.arguments.declarations import Size
from qkv.errors import ArgumentError
from qkv.mechanisms.base.modules.comparing import causal_mask, closest
from qkv.mechanisms.base.modules.loading import (
    named_weights,
    reads_module,
    refuse_other_parameters,
    require_attributes,
)
from qkv.mechanisms.base.projected import Options, ProjectedAttention

__all__ = ["MultiQuery"]


class MultiQuery(ProjectedAttention):
    """Many query heads that share one key head and one value head.

    Decoding reads the keys and values of all earlier tokens at every step; with one head of them
    instead of num_heads, the cache and its traffic shrink by that factor.

    Parameters
    ----------
    embed_dim, num_heads : int
    **options
        As for `ProjectedAttention`, without num_kv_heads.

    Raises
    ------
    ArgumentError
        If num_kv_heads is another number than 1.

    Notes
    -----
    KV cache: `2 n head_dim` numbers a layer instead of `2 n num_heads head_dim`. Source: Shazeer,
    "Fast Transformer Decoding: One Write-Head is All You Need" (2019).

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import MultiQuery
    >>> MultiQuery(16, num_heads=4).weights["k_proj.weight"].shape
    (4, 16)
    """

    name = "multi-query"
    paper = "Shazeer, Fast Transformer Decoding: One Write-Head is All You Need (2019)"
    formula = "[head_0, head_1, ...] W_o, head_h = softmax(Q_h K^T / sqrt(d)) V"

    def __init__(self, embed_dim: Size, num_heads: Size, **options: Unpack[Options]) -> None:
        if options.get("num_kv_heads") not in (None, 1):
            raise ArgumentError(
                f"num_kv_heads={options['num_kv_heads']}; multi-query attention has one.",
                action="Use GroupedQuery for more.",
            )
        options["num_kv_heads"] = 1
        super().__init__(embed_dim, num_heads, **options)

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any) -> Self:
        """The mechanism with the weights of a GPTBigCodeAttention.

        Parameters
        ----------
        module : transformers GPTBigCodeAttention with `multi_query=True`

        Raises
        ------
        ArgumentError
            The module has more than one kv head.
        UnsupportedError
            The module is another, as a comparison on random input shows.
        """
        needed = ("head_dim", "num_heads", "multi_query", "embed_dim", "scaling")
        require_attributes(module, needed)
        d, h = module.head_dim, module.num_heads
        if not module.multi_query:
            raise ArgumentError(
                "the module has as many key heads as query heads.", action="Use MultiHead."
            )
        weights = named_weights(module, {"c_attn": "c_attn", "out_proj": "c_proj"})
        for kind in ("weight", "bias"):
            sides = zip("qkv", weights.pop(f"c_attn.{kind}").split((h * d, d, d)), strict=True)
            weights.update({f"{side}_proj.{kind}": part for side, part in sides})
        refuse_other_parameters(module, ("c_attn", "c_proj"), cls.name)
        mechanism = cls(module.embed_dim, h, causal=True, scale=module.scaling, weights=weights)

        def run(copied: Any, x: Any) -> Any:
            return copied(x, attention_mask=causal_mask(x.shape[1], None, x.dtype))

        return closest(module, [(cls.name, mechanism)], run, module.embed_dim)

    @classmethod
    def example(cls) -> Self:
        """Two query heads of two numbers that share the first two columns of K and V."""
        return cls.for_example(num_heads=2, num_kv_heads=1)
