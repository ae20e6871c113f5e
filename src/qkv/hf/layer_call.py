"""One call of one attention layer as a call of qkv."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

import qkv
from qkv.call.binding.flatten import Leaves, copied, flatten
from qkv.errors import UnsupportedError
from qkv.hf.stored_tensor import layer_rows, plain_tensor, state_of

__all__ = ["LayerCall"]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of one attention layer, as arguments of `qkv.attention`.

    Attributes
    ----------
    module : torch.nn.Module
        The layer.
    query, key, value : tensor (batch, heads, length, head_dim)
        As the layer gives them; key and value may have fewer heads, and are those of the cache.
    variants : tuple
        Masks, biases, softcap, sinks and dropout.
    scale : float or None
    q_offset, kv_offset : int
        Positions of the first query row and the first key row; 0 where the mask is a tensor, which
        does not say them.

    Examples
    --------
    >>> import torch, qkv, qkv.hf
    >>> x = torch.zeros(1, 2, 3, 4)
    >>> call = qkv.hf.LayerCall(torch.nn.Identity(), x, x, x, (qkv.Causal(),), None, 0, 0)
    >>> call.output().shape
    torch.Size([1, 3, 2, 4])
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    variants: tuple[Any, ...]
    scale: float | None
    q_offset: int
    kv_offset: int
    states: tuple[int, ...] | None = field(default=None, repr=False, compare=False)

    def watched(self) -> LayerCall:
        """The same call, which refuses to compute once somebody has written to its tensors."""
        return replace(self, states=self._states())

    def output(self) -> torch.Tensor:
        """`attention` of it, (batch, q_len, num_heads, v_head_dim); differentiable."""
        self._require_unchanged()
        key, value, lengths = layer_rows(self.key, self.value)
        variants = (*self.variants, *lengths) if lengths else self.variants
        out: torch.Tensor = qkv.attention(self.query, key, value, *variants, **self.options)
        # A decoding step has one row, for which `contiguous` copies nothing.
        return out.transpose(1, 2).contiguous()

    def inspect(self) -> Any:
        """`qkv.inspect` of it; no gradient goes through."""
        call = self.dense()
        arrays = (array.detach() for array in (call.query, call.key, call.value))
        return qkv.inspect(*arrays, *call.variants, **call.options)

    def dense(self) -> LayerCall:
        """The same call with plain tensors of keys and values that lie in pages or as int8."""
        self._require_unchanged()
        *_, lengths = layer_rows(self.key, self.value)
        key, value = plain_tensor(self.key), plain_tensor(self.value)
        variants = (*self.variants, *lengths)
        return replace(self, key=key, value=value, variants=variants, states=None)

    def kept(self) -> LayerCall:
        """The same call of copies, without gradients: for what is computed after the layer has run.

        A cache writes over the keys that it hands out: when a window moves on, when beams change
        places, when tokens are taken back.
        """
        call = self.dense()
        query, key, value, variants = copied((call.query, call.key, call.value, call.variants))
        return LayerCall(
            self.module, query, key, value, variants, self.scale, self.q_offset, self.kv_offset
        )

    @property
    def has_positions(self) -> bool:
        """Whether it is known where its queries stand among its keys.

        A mask that is a tensor does not say it, and earlier tokens of a cache may come first.
        """
        is_dense = any(isinstance(variant, torch.Tensor) for variant in self.variants)
        *_, lengths = layer_rows(self.key, self.value)
        # Pages have room for more rows than there are tokens.
        tokens = max((int(np.max(of.kv_lens)) for of in lengths), default=self.key.shape[2])
        return not is_dense or self.query.shape[2] == tokens or self.q_offset > 0

    @property
    def options(self) -> dict[str, Any]:
        """scale, q_offset and kv_offset, as keywords of `qkv.attention`."""
        return {"scale": self.scale, "q_offset": self.q_offset, "kv_offset": self.kv_offset}

    def _states(self) -> tuple[int, ...]:
        leaves = Leaves.none()
        flatten((self.query, self.key, self.value, self.variants), leaves)
        return tuple([state_of(leaf) for leaf in leaves.arrays if isinstance(leaf, torch.Tensor)])

    def _require_unchanged(self) -> None:
        if self.states is None or self.states == self._states():
            return
        raise UnsupportedError(
            f"the tensors of this call of {type(self.module).__name__} have been written to since "
            "it was observed, as a cache does with the next tokens: the result would be wrong.",
            action="Keep call.kept() in the observer, which copies them, or compute there.",
        )
