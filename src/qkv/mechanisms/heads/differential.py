"""Differential attention."""

from __future__ import annotations

from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import NotNegative, Size
from qkv.errors import ArgumentError
from qkv.ledger import Count, Ledger, attention_ledger, step, symbols
from qkv.mechanisms.base.arrays.head_rows import join_heads
from qkv.mechanisms.base.arrays.namespace import array_namespace, like, values
from qkv.mechanisms.base.arrays.normalization import rms_norm
from qkv.mechanisms.base.arrays.rows import Rows
from qkv.mechanisms.base.explanations.explanation import Line, Step, number
from qkv.mechanisms.base.llama import LlamaAttention
from qkv.mechanisms.base.projected import Options

__all__ = ["Differential"]

_LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class Differential(LlamaAttention):
    """The difference of two softmax maps, which cancels the attention that both give to noise.

        out_h  = (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V
        lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

    Map h and map `h + num_heads / 2` make a pair. Their values, of `2 head_dim` numbers, are those
    of the two kv heads at the same places side by side. Each pair is normalised by itself:
    `(1 - lambda_init) RMSNorm(out_h)`.

    Parameters
    ----------
    embed_dim : int
    num_heads : int
        Softmax maps, twice the pairs; num_kv_heads is even as well.
    lambda_init : float
        In the paper `0.8 - 0.6 exp(-0.3 layer)`, from layer 0 on, which is the default of 0.2.
    normalize : bool
        Whether pairs are normalised.
    eps : float
        Of the RMSNorm.
    **options
        As for `ProjectedAttention`.

    Raises
    ------
    ArgumentError
        num_heads or num_kv_heads is odd.

    Notes
    -----
    As many operations as multi-head attention of the same width, and twice the weighted sums.
    Source: Ye et al., "Differential Transformer" (2024), section 2.1.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Differential
    >>> Differential(16, num_heads=4)(np.ones((5, 16))).shape
    (5, 16)
    """

    name = "differential"
    paper = "Ye et al., Differential Transformer (2024), section 2.1"
    formula = "(softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V"
    further_weights = _LAMBDAS

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 2,
        *,
        lambda_init: float = 0.2,
        normalize: bool = True,
        eps: NotNegative = 1e-5,
        **options: Unpack[Options],
    ) -> None:
        kv_heads = options.get("num_kv_heads") or num_heads
        if num_heads % 2 or kv_heads % 2:
            raise ArgumentError(
                f"num_heads={num_heads} and num_kv_heads={kv_heads}: maps are taken in pairs.",
                action="Pass even numbers.",
            )
        self.lambda_init, self.normalize, self.eps = lambda_init, normalize, eps
        super().__init__(embed_dim, num_heads, **options)

    def more_shapes(self) -> dict[str, tuple[int, ...]]:
        """The vectors of lambda."""
        return dict.fromkeys(_LAMBDAS, (self.head_dim,))

    def initial_weight(
        self, name: str, shape: tuple[int, ...], rng: np.random.Generator
    ) -> NDArray[Any]:
        """An initial weight: normal with deviation 0.1 for lambdas, else as in other mechanisms."""
        if name in _LAMBDAS:
            return rng.normal(0.0, 0.1, shape)
        return super().initial_weight(name, shape, rng)

    def weight_of_second_map(self, x: Any) -> Any:
        """lambda, in the library of `x`."""
        namespace = array_namespace(x)
        q1, k1, q2, k2 = (self.weight(name, x) for name in _LAMBDAS)
        first, second = namespace.sum(q1 * k1), namespace.sum(q2 * k2)
        return namespace.exp(first) - namespace.exp(second) + self.lambda_init

    def heads(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Query and key rows of each map, and the values of its pair, `2 head_dim` long."""
        q, k, v = super().heads(query, key, value)
        namespace = array_namespace(v)
        half = self.num_kv_heads // 2
        pair = namespace.concat([v[..., :half, :, :], v[..., half:, :, :]], axis=-1)
        return q, k, namespace.concat([pair, pair], axis=-3)

    def join(self, out: Any) -> Any:
        """The differences of pairs, normalised, side by side and projected back."""
        namespace = array_namespace(out)
        pairs = self.difference(out)
        if self.normalize:
            pairs = (1 - self.lambda_init) * rms_norm(pairs, self.eps)
        rows = namespace.astype(join_heads(pairs), out.dtype, copy=False)
        return self.linear("out_proj", rows) if self.out_proj else rows

    def difference(self, maps: Any) -> Any:
        """`first - lambda * second` of the first and second half of the maps (..., maps, n, m)."""
        half = self.num_heads // 2
        return maps[..., :half, :, :] - self.weight_of_second_map(maps) * maps[..., half:, :, :]

    def token_mixing(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """The differences of the weights, `(..., num_heads / 2, n, n)`.

        Their rows add to 1 - lambda. Without the normalisation, the output of a pair is this matrix
        times its values. Values only, without a gradient.
        """
        weights = values(super().token_mixing(x, key, value), "weights")
        return like(self.detached().difference(weights), x)

    def steps_after(self, out: Any, index: int) -> list[Step]:
        """The difference of each pair of maps, and what is made of it."""
        second = float(self.weight_of_second_map(out))
        half = self.num_heads // 2
        rows = values(out, "out")[:, index]
        title = "exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init"
        lines = tuple(
            Line(
                f"pair {pair}",
                row.tolist(),
                f"o of head {pair} - {number(second)} * o of head {pair + half}",
            )
            for pair, row in enumerate(rows[:half] - second * rows[half:])
        )
        final = Line("out", self.join(out)[index].tolist())
        return [
            Step("Lambda", title, (Line("lambda", second),)),
            Step("Difference", "o1 - lambda o2", lines),
            Step("Join", "normalised, side by side, projected back, as far as used", (final,)),
        ]

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of the maps, whose values have `2 head_dim` numbers, and of the rest."""
        ledger = super().operations(tokens, batch)
        d, h = symbols(d=self.head_dim, h=self.num_heads)
        pairs, heads = self.pairs(tokens), batch * h
        wider = attention_ledger(pairs, tokens, d, 2 * d)
        narrow = attention_ledger(pairs, tokens, d, d)
        more = {
            key: (count - narrow.operations[key]) * heads
            for key, count in wider.operations.items()
            if key[0] == "av"
        }
        left = {"av": (wider.space["av"] - narrow.space["av"]) * heads}
        numbers = batch * tokens * h * d
        ledger += Ledger(more, left) + step("difference", multiply=numbers, subtract=numbers)
        if self.normalize:
            rows = batch * tokens * (h // 2)
            ledger += step(
                "norm", multiply=2 * numbers, add=numbers, divide=numbers + rows, sqrt=rows
            )
        return ledger

    @classmethod
    def options_of(cls, module: Any) -> dict[str, Any]:
        """lambda_init and epsilon of a DiffLlamaAttention."""
        return {
            **super().options_of(module),
            "lambda_init": module.lambda_init,
            "eps": module.config.rms_norm_eps,
        }

    @classmethod
    def example(cls) -> Self:
        """One pair of maps of two numbers with lambda = 0.5, not normalised."""
        zeros: dict[str, Any] = {name: np.zeros(2) for name in _LAMBDAS}
        return cls.for_example(2, lambda_init=0.5, normalize=False, weights=zeros)
