"""Attention with linear biases."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from qkv.errors import UnsupportedError
from qkv.mechanisms.base.modules.comparing import causal_mask, closest
from qkv.mechanisms.base.modules.loading import (
    named_weights,
    reads_module,
    refuse_other_parameters,
    require_attributes,
)
from qkv.mechanisms.base.projected import Options, ProjectedAttention
from qkv.variants.scores.alibi import alibi_slopes

__all__ = ["ALiBi"]


class ALiBi(ProjectedAttention):
    """Scores fall with the distance of query and key, in each head at its own slope.

        s[i, j] = q_i . k_j / sqrt(d) - slope_h |i - j|
        slope_h = 2 ** (-8 (h + 1) / p)            for h < p, the largest power of two <= num_heads
        slope_h = 2 ** (-4 (2 (h - p) + 1) / p)    for the other heads

    A model trained on short texts keeps its quality on longer ones, as no position is unseen.

    Parameters
    ----------
    embed_dim, num_heads : int
    **options
        As for `ProjectedAttention`.

    Notes
    -----
    Three operations for each pair; no parameters. Source: Press et al., "Train Short, Test Long"
    (2022).

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import ALiBi
    >>> ALiBi(4, causal=True).token_mixing(np.zeros((3, 4)))[0, 2].round(4)
    array([0.332 , 0.3333, 0.3346])
    """

    name = "alibi"
    paper = "Press et al., Train Short, Test Long: Attention with Linear Biases (2022)"
    formula = "softmax(Q K^T / sqrt(d) - slope_h |i - j|) V"
    fixed_options: ClassVar[Options] = {"alibi": True}

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any) -> Self:
        """The mechanism with the weights of a BloomAttention.

        Parameters
        ----------
        module : transformers BloomAttention
            Its fused projection holds query, key and value of each head side by side.

        Raises
        ------
        UnsupportedError
            The module is another, as a comparison on random input shows.
        """
        import torch

        require_attributes(module, ("num_heads", "head_dim", "hidden_size"))
        fused = ("query_key_value.weight", "query_key_value.bias")
        names = [*fused, "dense.weight", "dense.bias"]
        weights = {
            n.replace("dense", "out_proj"): w for n, w in named_weights(module, names).items()
        }
        if len(weights[fused[0]]) != 3 * module.hidden_size:
            raise UnsupportedError(
                f"query_key_value of {type(module).__name__} has {len(weights[fused[0]])} rows, "
                f"not 3 * {module.hidden_size}.",
                action="Pass a BloomAttention, whose heads have a key and a value each.",
            )
        for name in fused:
            parts = weights.pop(name).unflatten(0, (module.num_heads, 3, module.head_dim))
            for i, side in enumerate("qkv"):
                weights[name.replace("query_key_value", f"{side}_proj")] = parts[:, i].flatten(0, 1)
        refuse_other_parameters(module, ("query_key_value", "dense"), cls.name)
        mechanism = cls(module.hidden_size, module.num_heads, causal=True, weights=weights)

        def run(copied: Any, x: Any) -> Any:
            n = x.shape[1]
            positions = torch.arange(n, dtype=x.dtype)
            slopes = torch.as_tensor(alibi_slopes(module.num_heads), dtype=x.dtype)
            bias = (slopes[:, None, None] * positions).repeat(len(x), 1, 1)
            mask = causal_mask(n, None, x.dtype)
            return copied(x, torch.zeros_like(x), bias, mask)

        return closest(module, [(cls.name, mechanism)], run, module.hidden_size)

    @classmethod
    def example(cls) -> Self:
        """Two heads, whose slopes are 1/16 and 1/256."""
        return cls.for_example(num_heads=2)
