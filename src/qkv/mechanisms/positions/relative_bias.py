"""Attention with T5's learned bias of the distance."""

from __future__ import annotations

from typing import Any, ClassVar, Self, Unpack

import numpy as np

from qkv.arguments.declarations import Size
from qkv.errors import ArgumentError
from qkv.ledger import Ledger, step
from qkv.mechanisms.base.modules.comparing import causal_mask, closest
from qkv.mechanisms.base.modules.loading import (
    named_weights,
    reads_module,
    refuse_other_attributes,
    refuse_other_parameters,
    require_attributes,
)
from qkv.mechanisms.base.projected import Options, ProjectedAttention
from qkv.variants import RelativeBias as BiasOfDistance

__all__ = ["RelativeBias"]

_TABLE = "relative_attention_bias.weight"
_KNOWN = (
    "is_decoder", "is_causal", "has_relative_attention_bias", "relative_attention_num_buckets",
    "relative_attention_max_distance", "d_model", "key_value_proj_dim", "n_heads", "dropout",
    "inner_dim", "scaling", "pruned_heads",
)  # fmt: skip
"""Attributes of a T5Attention, all of which are read or do nothing in evaluation."""


class RelativeBias(ProjectedAttention):
    """A learned number for each head and range of distances is added to the score.

        s[i, j] = q_i . k_j + table[bucket(j - i), h]

    Near distances have a bucket each, far ones share buckets that grow logarithmically.

    Parameters
    ----------
    embed_dim, num_heads : int
    num_buckets, max_distance : int
        Buckets of the table, and the distance from which on all share the last one.
    **options
        As for `ProjectedAttention`; a causal mechanism spends all buckets on the past. Scores are
        not scaled unless `scale` is given, and there are no biases of projections, as in T5.

    Raises
    ------
    ArgumentError
        A size is not a positive integer, or there are too few buckets, or more of them for single
        distances than max_distance has.

    Notes
    -----
    One addition for each pair; `num_buckets * num_heads` parameters,
    `relative_attention_bias.weight`. Source: Raffel et al., "T5" (2020), section 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import RelativeBias
    >>> RelativeBias(8, num_heads=2).weights["relative_attention_bias.weight"].shape
    (32, 2)
    """

    name = "relative-bias"
    paper = "Raffel et al., Exploring the Limits of Transfer Learning (T5, 2020), section 2.1"
    formula = "softmax(Q K^T + table[bucket(j - i)]) V"
    default_options: ClassVar[Options] = {"scale": 1.0, "bias": False}
    compares_positions = True

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        num_buckets: Size = 32,
        max_distance: Size = 128,
        **options: Unpack[Options],
    ) -> None:
        self.num_buckets, self.max_distance = num_buckets, max_distance
        super().__init__(embed_dim, num_heads, **options)
        least = 2 if self.causal else 4
        if num_buckets < least:
            raise ArgumentError(
                f"num_buckets={num_buckets}: a table has {least} buckets or more, "
                "two for each direction.",
                action=f"Pass num_buckets >= {least}.",
            )
        BiasOfDistance(self.weights[_TABLE], not self.causal, max_distance)  # Checks the distance.

    def more_shapes(self) -> dict[str, tuple[int, ...]]:
        """The table."""
        return {_TABLE: (self.num_buckets, self.num_heads)}

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """The bias of the distance, and the causal mask if there is one."""
        table = self.weight(_TABLE, query)
        bias = BiasOfDistance(table, not self.causal, self.max_distance)
        return (bias, *super().variants(query, key))

    def score_cost(self, pairs: int) -> Ledger:
        """One addition for each pair, and the other score variants."""
        return step("relative_bias", add=pairs) + super().score_cost(pairs)

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any) -> Self:
        """The mechanism with the weights of a T5Attention that has a table.

        Parameters
        ----------
        module : transformers T5Attention with `has_relative_attention_bias=True`

        Raises
        ------
        UnsupportedError
            The module is another, as its attributes or a comparison on random input show.
        """
        require_attributes(module, ("d_model", "n_heads", "key_value_proj_dim", "is_decoder"))
        names = {f"{side}_proj": side for side in "qkv"}
        names |= {"out_proj": "o", "relative_attention_bias": "relative_attention_bias"}
        weights = named_weights(module, names)
        refuse_other_parameters(module, names.values(), cls.name)
        refuse_other_attributes(module, _KNOWN)
        mechanism = cls(
            module.d_model,
            module.n_heads,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=module.relative_attention_max_distance,
            head_dim=module.key_value_proj_dim,
            causal=module.is_decoder,
            weights=weights,
        )

        def run(copied: Any, x: Any) -> Any:
            mask = causal_mask(x.shape[1], None, x.dtype) if module.is_decoder else None
            return copied(x, mask=mask)

        return closest(module, [(cls.name, mechanism)], run, module.d_model)

    @classmethod
    def example(cls) -> Self:
        """One head with eight buckets; the further away, the smaller the bias."""
        # Buckets 0 to 3 are distances 0, 1, 2 to 3 and more of earlier keys, 4 to 7 of later ones.
        table = np.array([0.5, 0.25, 0.0, -0.25, 0.5, 0.25, 0.0, -0.25])[:, None]
        return cls.for_example(num_buckets=8, max_distance=8, weights={_TABLE: table})
