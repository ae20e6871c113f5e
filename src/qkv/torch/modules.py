"""torch modules: attention of the classical texts, and multi-head attention."""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

import qkv
from qkv.arguments.declarations import Size, checked, checked_size
from qkv.backends.torch.attention import softmax
from qkv.cache import ContiguousCache
from qkv.call.binding.unknown_keywords import keyword_error, with_signature_of_theirs
from qkv.errors import ArgumentError, ShapeError
from qkv.torch.layer_arguments import (
    Device,
    FloatingType,
    first_line,
    require_fitting,
    require_tensors,
    unknown_of_layer,
)

__all__ = ["Cache", "MultiHeadAttention", "ScaledDotProductAttention"]


class ScaledDotProductAttention(nn.Module):
    """`softmax(Q K^T / sqrt(d_k)) V` as the texts write it: True in `mask` means *masked out*.

    That is the opposite of `qkv.attention` and of torch's own function, where True may attend.

    Parameters
    ----------
    d_k : int
        Length of the rows of Q and K.

    Attributes
    ----------
    d_k : int
    scale : float
        `sqrt(d_k)`, by which scores are divided.

    Raises
    ------
    ArgumentError
        If d_k is not a positive integer.

    Notes
    -----
    Returns the weights, so it holds the q_len x kv_len matrix; for long inputs call
    `qkv.inspect`. A row that is masked out everywhere has weights and output 0. Source: Vaswani
    et al. (2017), section 3.2.1.

    Examples
    --------
    >>> import torch, qkv.torch
    >>> x = torch.eye(2)
    >>> future = torch.ones(2, 2, dtype=torch.bool).triu(1)
    >>> weights, output = qkv.torch.ScaledDotProductAttention(d_k=2)(x, x, x, mask=future)
    >>> weights[0]
    tensor([1., 0.])
    """

    def __init__(self, d_k: int) -> None:
        super().__init__()
        self.d_k = checked_size("d_k", d_k)
        self.scale = sqrt(self.d_k)

    def extra_repr(self) -> str:
        return f"d_k={self.d_k}"

    def forward(
        self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weights `(..., q_len, kv_len)` and output `(..., q_len, d_v)`.

        Parameters
        ----------
        Q, K, V : Tensor (..., length, d_k), (..., length, d_k), (..., length, d_v)
        mask : boolean Tensor that broadcasts to the weights, optional
            True is masked out: NaN behind it reaches neither results nor gradients.

        Returns
        -------
        (Tensor, Tensor)
            Both have the type of the output; weights are computed in float32 (float64 for
            float64).

        Raises
        ------
        ShapeError
            If rows of Q or K do not have length d_k.
        """
        require_tensors(Q=Q, K=K, V=V)
        if mask is not None:
            require_tensors(mask=mask)
        for name, rows in (("Q", Q), ("K", K)):
            if not rows.ndim or rows.shape[-1] != self.d_k:
                raise ShapeError(
                    f"{name} has rows of length {rows.shape[-1] if rows.ndim else 0}; "
                    f"d_k={self.d_k}.",
                    [("Q", str(tuple(Q.shape))), ("K", str(tuple(K.shape)))],
                    "Pass tensors (..., length, d_k).",
                )
        if mask is not None and mask.dtype is not torch.bool:
            mask = mask.to(torch.bool)
        allowed = () if mask is None else (qkv.Mask(~mask),)
        output: Tensor = qkv.attention(Q, K, V, *allowed, scale=1 / self.scale)
        with torch.autocast(Q.device.type, enabled=False):
            weights = _weights(Q.to(output.dtype), K.to(output.dtype), mask, 1 / self.scale)
        return weights.to(output.dtype), output


def _weights(Q: Tensor, K: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`softmax(Q K^T / sqrt(d_k))` over what is not masked, float32 or float64."""
    compute_dtype = torch.float64 if Q.dtype is torch.float64 else torch.float32
    Q, K = Q.to(compute_dtype), K.to(compute_dtype)
    if mask is None:
        return (Q @ K.mT * scale).softmax(-1)
    # A masked pair has gradient 0, and 0 times a row that is not finite is NaN. So such rows are
    # zeroed in the product that is differentiated, and added without a gradient.
    finite_queries, finite_keys = Q.isfinite().all(-1, True), K.isfinite().all(-1, True)
    finite_products = torch.where(finite_queries, Q, 0.0) @ torch.where(finite_keys, K, 0.0).mT
    scores = (
        torch.where(finite_queries & finite_keys.mT, finite_products, Q.detach() @ K.detach().mT)
        * scale
    )
    return softmax(scores.masked_fill(mask, -torch.inf))[0]


class Cache(ContiguousCache):
    """Keys and values of earlier tokens, at the end of which new ones are written.

    `qkv.cache.ContiguousCache` with a `length`. For inference: rows are stored without gradients,
    and rows that require gradients are refused.

    Parameters
    ----------
    capacity : int, optional
        Tokens that there is room for; memory is then taken when the first arrive. Unless given,
        it doubles whenever it is full.
    dtype : "int8", optional
        As for `qkv.cache.ContiguousCache`.

    Raises
    ------
    ArgumentError
        If the capacity is not a whole number of 0 or more, or the dtype is unknown.

    Examples
    --------
    >>> import torch, qkv.torch
    >>> cache = qkv.torch.Cache(8)
    >>> key, value = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    >>> cache.length, tuple(key.shape)
    (3, (1, 2, 3, 4))
    """

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max(initial=0))


class MultiHeadAttention(nn.Module):
    """Multi-head attention: projections of query, key and value, heads, and a projection back.

        head_h = attention(x W_q[h], y W_k[h'], y W_v[h']),  h' = h // group_size
        out    = [head_0, head_1, ...] W_o

    Parameters
    ----------
    embed_dim, num_heads : int
        Width of the model, and number of query heads; head_dim is `embed_dim // num_heads`.
    num_kv_heads : int, optional
        Fewer than `num_heads` for grouped-query attention, 1 for multi-query attention.
    causal : bool
        Each token sees itself and what came before.
    rope : qkv.RoPE, optional
        Rotary positions.
    alibi : bool
        Linear biases, with the slopes of the paper.
    dropout : float
        Probability of dropping a weight while training; 1 leaves none.
    bias : bool
        Whether projections have one.
    kv_dim : int, optional
        Width of what is attended to, `embed_dim` unless given.
    device : torch.device or str, optional
        Where the weights are; torch's default unless given.
    dtype : torch.dtype, optional
        Of the weights; torch's default unless given.

    Raises
    ------
    ArgumentError
        If a size is not a positive integer, embed_dim is not a multiple of num_heads, or num_heads
        of num_kv_heads, dropout is not a probability, or torch cannot make such weights on the
        device.
    DTypeError
        If dtype is not one of torch's floating types of 16, 32 or 64 bits.
    KeywordError
        A keyword of `torch.nn.MultiheadAttention` that means nothing here; the message says what
        to write.

    Notes
    -----
    `load_state_dict` takes the state of `torch.nn.MultiheadAttention` as well. Sources: Vaswani et
    al. (2017), section 3.2.2; Shazeer (2019); Ainslie et al., "GQA" (2023).

    Examples
    --------
    >>> import torch, qkv.torch
    >>> layer = qkv.torch.MultiHeadAttention(16, num_heads=4, num_kv_heads=2, causal=True)
    >>> layer(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    @with_signature_of_theirs
    @checked
    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size,
        *,
        num_kv_heads: Size | None = None,
        causal: bool = False,
        rope: qkv.RoPE | None = None,
        alibi: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        kv_dim: Size | None = None,
        device: Device = None,
        dtype: FloatingType = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise unknown_of_layer(unknown)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if embed_dim % num_heads:
            raise ArgumentError(
                f"embed_dim={embed_dim} cannot be divided into num_heads={num_heads} heads.",
                action="Choose a multiple of num_heads.",
            )
        if num_heads % kv_heads:
            raise ArgumentError(
                f"num_heads={num_heads} is not a multiple of num_kv_heads={kv_heads}.",
                action="Let every group of query heads be of one size.",
            )
        if not 0 <= dropout <= 1:
            raise ArgumentError(
                f"dropout={dropout} is not a probability.", action="Pass a number from 0 to 1."
            )
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.causal, self.rope, self.alibi, self.dropout = causal, rope, alibi, dropout
        kv_dim = embed_dim if kv_dim is None else kv_dim
        like = {"bias": bias, "device": device, "dtype": dtype}
        try:
            self.q_proj = nn.Linear(embed_dim, embed_dim, **like)
            self.k_proj = nn.Linear(kv_dim, kv_heads * self.head_dim, **like)
            self.v_proj = nn.Linear(kv_dim, kv_heads * self.head_dim, **like)
            self.out_proj = nn.Linear(embed_dim, embed_dim, **like)
        except RuntimeError as error:
            raise ArgumentError(
                f"torch cannot make weights for embed_dim={embed_dim} and kv_dim={kv_dim}.",
                [("torch says", first_line(error))],
                "Choose sizes whose weights fit into memory.",
            ) from error
        self.register_load_state_dict_pre_hook(_rename_state)

    def extra_repr(self) -> str:
        sizes = f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{sizes}, causal={self.causal}, rope={self.rope}, alibi={self.alibi}"

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *variants: Any,
        cache: qkv.cache.Cache | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Attend from `query` to `key` and `value`, or to itself.

        Parameters
        ----------
        query : Tensor (..., q_len, embed_dim)
        key, value : Tensor (..., kv_len, kv_dim), optional
            `query` unless given; `value` is `key` unless given.
        *variants
            More masks (True = may attend) and biases, as `qkv.attention` takes them.
        cache : Cache, or any cache of `qkv.cache`, optional
            `key` and `value` are new tokens that follow those in it. Not while training: under
            `torch.no_grad()`, or with projections that need no gradient.

        Returns
        -------
        Tensor (..., q_len, embed_dim)

        Raises
        ------
        DTypeError, ArgumentError
            What is given is not a tensor, or of another type or device than the weights, or `cache`
            is not a cache.
        ShapeError
            Rows do not have the width of the weights that they are multiplied with, or with a
            cache query and key do not have as many.
        KeywordError
            A keyword of `torch.nn.MultiheadAttention`; the message has the call to write.
        """
        if unknown:
            raise keyword_error(
                "MultiHeadAttention",
                unknown,
                ("query", "key", "value", "cache"),
                called=("query", "key", "value"),
                name="layer",
            )
        key = query if key is None else key
        value = key if value is None else value
        require_tensors(query=query, key=key, value=value)
        require_fitting("query", query, self.q_proj)
        require_fitting("key", key, self.k_proj)
        require_fitting("value", value, self.v_proj)
        if cache is not None and not (hasattr(cache, "append") and hasattr(cache, "q_offset")):
            raise ArgumentError(
                f"cache is a {type(cache).__name__}, not a cache.", action="Pass qkv.torch.Cache."
            )
        if cache is not None and query.shape[-2] != key.shape[-2]:
            raise ShapeError(
                f"query has {query.shape[-2]} rows and key {key.shape[-2]} new tokens; with a "
                "cache row i of query stands at new token i.",
                [("query", f"{tuple(query.shape)}"), ("key", f"{tuple(key.shape)}")],
                "Pass a row of query for each new token.",
            )
        q = self._heads(self.q_proj(query), self.num_heads)
        k = self._heads(self.k_proj(key), self.num_kv_heads)
        v = self._heads(self.v_proj(value), self.num_kv_heads)
        q_offset = cache.q_offset if cache is not None else 0
        all_variants: list[Any] = list(variants)
        if self.rope is not None and cache is None:
            all_variants.append(self.rope)
        elif self.rope is not None:
            # The cache stores rotated keys, so each key is rotated once, at its own position.
            starts = torch.as_tensor(q_offset, device=q.device)[..., None, None]
            q, k = (
                self.rope.rotate(t, starts + torch.arange(t.shape[-2], device=t.device))
                for t in (q, k)
            )
        all_variants += [qkv.Causal()] if self.causal else []
        all_variants += [qkv.ALiBi()] if self.alibi else []
        drops = self.dropout if self.training else 0.0
        if 0 < drops < 1:
            all_variants.append(qkv.Dropout(drops, torch.randint(2**63 - 1, (), device="cpu")))
        out: Tensor
        if cache is None:
            out = qkv.attention(q, k, v, *all_variants, q_offset=0)
        else:
            out = cache.append(k, v).attention(q, *all_variants)
        if drops == 1:
            out = nn.functional.dropout(out, drops)
        projected: Tensor = self.out_proj(out.transpose(-3, -2).flatten(-2))
        return projected

    def _heads(self, rows: Tensor, heads: int) -> Tensor:
        heads_apart: Tensor = rows.unflatten(-1, (heads, self.head_dim))
        return heads_apart.transpose(-3, -2)


def _rename_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the parameters of `torch.nn.MultiheadAttention` to those of this module."""
    for name in ("bias_k", "bias_v"):
        if prefix + name in state:
            raise ArgumentError(
                f"the state has {name}, a key and value of its own for every row.",
                action="Append that row to key and value yourself.",
            )
    sides = ("q", "k", "v")
    for kind in ("weight", "bias"):
        packed = state.pop(f"{prefix}in_proj_{kind}", None)
        if packed is not None:
            for side, part in zip(sides, packed.chunk(3), strict=True):
                state[f"{prefix}{side}_proj.{kind}"] = part
    for side in sides:
        weight = state.pop(f"{prefix}{side}_proj_weight", None)
        if weight is not None:
            state[f"{prefix}{side}_proj.weight"] = weight
