"""Gated delta networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import NotNegative, Size, Whole
from qkv.errors import ArgumentError
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.arrays.head_rows import join_heads, split_heads
from qkv.mechanisms.base.arrays.namespace import array_namespace
from qkv.mechanisms.base.arrays.normalization import l2_norm, rms_norm
from qkv.mechanisms.base.arrays.rows import Arrays
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM, EXAMPLE_WIDTH, select_columns
from qkv.mechanisms.base.modules.loading import reads_module
from qkv.mechanisms.base.operations import projection
from qkv.mechanisms.linear_time.recurrences.activations import sigmoid, silu, softplus
from qkv.mechanisms.linear_time.recurrences.convolution import causal_convolution
from qkv.mechanisms.linear_time.recurrences.delta_rule import chunk, token_weights
from qkv.mechanisms.linear_time.recurrences.recurrent import (
    RecurrentMechanism,
    activation_cost,
    grouped_heads,
    head_dim_of,
    repeated_heads,
)
from qkv.mechanisms.linear_time.recurrences.state_space import require_silu

__all__ = ["GatedDelta"]

L2_EPSILON = 1e-6
"""The epsilon that is added to squared lengths of query and key rows, as in the model."""


class GatedDelta(RecurrentMechanism):
    """A gated delta network: the state is a memory whose errors are corrected, and it fades.

        q, k, v, z, b, a = W x;   q, k, v = silu(conv(q, k, v));   q, k of length one
        beta = sigmoid(b),   g = -exp(A_log) softplus(a + dt_bias)
        S' = exp(g_t) S_{t-1},   S_t = S' + beta_t k_t^T (v_t - k_t S'),   o_t = q_t S_t / sqrt(d)
        out = W_out (norm(o) * silu(z))

    Linear attention only ever adds to its state, so that a key written twice holds the sum of two
    values. The delta rule replaces what a key held, and the gate forgets all of it at once.

    Parameters
    ----------
    embed_dim, num_heads : int
        Width of x, and number of value heads.
    num_key_heads : int, optional
        Heads of queries and keys, a divisor of `num_heads`, which is the default.
    head_dim : int, optional
        Length of a query and key row, `embed_dim // num_heads` unless given.
    v_head_dim : int, optional
        Length of a value row, `head_dim` unless given.
    conv_kernel : int
        Tokens that the short convolution sees.
    norm_epsilon : float
        What is added to the mean square of an output row.
    out_proj : bool
        Whether the heads are projected back to embed_dim.
    chunk_size : int
        Tokens in a chunk; changes speed and rounding only.
    weights : mapping of str to array, optional
        Named as in transformers' `Qwen3NextGatedDeltaNet`; random by default.
    seed : int
        Seed of the random weights.

    Raises
    ------
    ArgumentError, ShapeError
        The sizes, or the weights, do not fit one another.

    Notes
    -----
    O(n (chunk_size + head_dim) (chunk_size + v_head_dim)) operations for each head, and the
    projections. Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with
    Delta Rule", arXiv 2412.06464; as in Qwen3-Next.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import GatedDelta
    >>> GatedDelta(16, num_heads=4)(np.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    name = "gated-delta"
    paper = "Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024)"
    formula = (
        "W_out (norm(q_t S_t) * silu(z)), S_t = S' + beta_t k_t^T (v_t - k_t S'), S' = e^g S_{t-1}"
    )
    mixing_formula: ClassVar[str] = (
        "M = (Q K^T * L) (I + R)^-1 diag(beta), R = strictly lower part of diag(beta) K K^T * L, "
        "L = decays"
    )

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        num_key_heads: Size | None = None,
        head_dim: Size | None = None,
        v_head_dim: Size | None = None,
        conv_kernel: Size = 4,
        norm_epsilon: NotNegative = 1e-6,
        out_proj: bool = True,
        chunk_size: Size = 64,
        weights: Arrays | None = None,
        seed: Whole = 0,
    ) -> None:
        key_heads = num_heads if num_key_heads is None else num_key_heads
        if num_heads % key_heads:
            raise ArgumentError(
                f"num_heads={num_heads} is not a multiple of num_key_heads={key_heads}.",
                action="Let every key head serve as many value heads.",
            )
        head_dim = head_dim_of(embed_dim, num_heads, head_dim)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.num_heads, self.num_key_heads = num_heads, key_heads
        self.head_dim, self.v_head_dim = head_dim, v_head_dim
        self.conv_kernel, self.norm_epsilon, self.out_proj = conv_kernel, norm_epsilon, out_proj
        keys, values = key_heads * head_dim, num_heads * v_head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "in_proj_qkvz.weight": (2 * keys + 2 * values, embed_dim),
            "in_proj_ba.weight": (2 * num_heads, embed_dim),
            "conv1d.weight": (2 * keys + values, 1, conv_kernel),
            "dt_bias": (num_heads,),
            "A_log": (num_heads,),
            "norm.weight": (v_head_dim,),
        }
        if out_proj:
            shapes["out_proj.weight"] = (embed_dim, values)
        super().__init__(shapes, weights, seed, embed_dim, chunk_size)

    def initial_weight(
        self, name: str, shape: tuple[int, ...], rng: np.random.Generator
    ) -> NDArray[Any]:
        """Decay rates from 0 to 16, as in Qwen3-Next; the norm and dt_bias start at one."""
        if name in ("norm.weight", "dt_bias"):
            return np.ones(shape)
        if name == "A_log":
            return np.log(rng.uniform(0.01, 16, shape))
        return super().initial_weight(name, shape, rng)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is kept of the past: the rows that the convolution sees, and S of each head."""
        keys, values = self.num_key_heads * self.head_dim, self.num_heads * self.v_head_dim
        return {
            "conv": (self.conv_kernel - 1, 2 * keys + values),
            "scan": (self.num_heads, self.head_dim, self.v_head_dim),
        }

    def project(self, x: Any, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Query, key, value, log_decay and beta of every head, and the gate z."""
        xp = array_namespace(x)
        heads, d, group = self.num_key_heads, self.head_dim, self.num_heads // self.num_key_heads
        width = group * self.v_head_dim
        # The columns of one key head are adjacent: its query, key, values and gates.
        q, k, v, z = _split_columns(self.linear("in_proj_qkvz", x), heads, (d, d, width, width))
        b, a = _split_columns(self.linear("in_proj_ba", x), heads, (group, group))
        mixed = xp.concat([q, k, v], axis=-1)
        weight = self.weight("conv1d.weight", x)
        mixed, state["conv"] = causal_convolution(mixed, weight, state["conv"])
        mixed = silu(mixed)
        keys = heads * d
        query = split_heads(mixed[..., :keys], heads)
        key = split_heads(mixed[..., keys : 2 * keys], heads)
        rate = xp.exp(self.weight("A_log", x)) * softplus(a + self.weight("dt_bias", x))
        inputs = {
            "query": l2_norm(query, L2_EPSILON) * d**-0.5,
            "key": l2_norm(key, L2_EPSILON),
            "value": split_heads(mixed[..., 2 * keys :], self.num_heads),
            "log_decay": split_heads(-rate, self.num_heads),
            "beta": split_heads(sigmoid(b), self.num_heads),
        }
        return inputs, z

    def mix(self, inputs: Mapping[str, Any], state: dict[str, Any]) -> Any:
        """The gated delta rule in chunks; value heads with one key head share its products."""
        value = inputs["value"]
        # A group becomes an axis of its own, along which its query and key are broadcast.
        query, key = inputs["query"][..., None, :, :], inputs["key"][..., None, :, :]
        v, log_decay, beta, start = (
            grouped_heads(heads, self.num_key_heads)
            for heads in (value, inputs["log_decay"], inputs["beta"], state["scan"])
        )
        rows = (query, key, v, log_decay[..., 0], beta[..., 0])
        out, end = chunk(*rows, start, self.chunk_size)
        xp = array_namespace(value)
        state["scan"] = xp.reshape(end, state["scan"].shape)
        return xp.reshape(out, value.shape)

    def mixing(self, inputs: Mapping[str, Any]) -> Any:
        """The contribution of each value to each output, after all corrections."""
        times = self.num_heads // self.num_key_heads
        query, key = (repeated_heads(inputs[name], times) for name in ("query", "key"))
        return token_weights(query, key, inputs["log_decay"][..., 0], inputs["beta"][..., 0])

    def join(self, out: Any, gate: Any) -> Any:
        """The heads normalised one by one, gated, and projected back."""
        rows = rms_norm(out, self.norm_epsilon) * self.weight("norm.weight", out)
        rows = join_heads(rows) * silu(gate)
        return self.project_back("out_proj", rows, gate) if self.out_proj else rows

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of the recurrence token by token; chunks do more in fewer products."""
        e, h, g = symbols(e=self.embed_dim, h=self.num_heads, g=self.num_key_heads)
        d, d_v, k = symbols(d=self.head_dim, d_v=self.v_head_dim, k=self.conv_kernel)
        tokens = batch * tokens
        keys, values = tokens * g * d, tokens * h * d_v
        states, scalars, mixed = values * d, tokens * h, 2 * keys + values
        ledger = projection("in_proj_qkvz", tokens, e, 2 * g * d + 2 * h * d_v)
        ledger += projection("in_proj_ba", tokens, e, 2 * h)
        ledger += step("conv", multiply=mixed * k, add=mixed * (k - 1))
        ledger += activation_cost("conv", mixed)
        ledger += step("normalise", multiply=3 * keys, add=2 * keys, divide=2 * keys,
                      sqrt=2 * tokens * g)  # fmt: skip
        ledger += activation_cost("decay", scalars) + step("decay", add=scalars, exp=scalars)
        ledger += step("decay", multiply=scalars) + activation_cost("beta", scalars)
        ledger += step("state", multiply=3 * states + values, add=2 * states - values,
                      subtract=values, space=batch * h * d * d_v)  # fmt: skip
        ledger += step("read", multiply=states, add=states - values, space=values)
        ledger += step("norm", multiply=2 * values, add=values, divide=values + scalars,
                      sqrt=scalars)  # fmt: skip
        ledger += activation_cost("gate", values) + step("gate", multiply=values)
        if self.out_proj:
            ledger += projection("out_proj", tokens, h * d_v, e)
        return ledger

    def widths(self) -> tuple[int, int]:
        """The widths of x and of the output."""
        e, h, d_v = symbols(e=self.embed_dim, h=self.num_heads, d_v=self.v_head_dim)
        return e, e if self.out_proj else h * d_v

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any) -> Self:
        """The mechanism with the weights of a `Qwen3NextGatedDeltaNet` of transformers.

        Parameters
        ----------
        module : transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet

        Raises
        ------
        UnsupportedError
            Its activation is not silu, or it is another module, as a comparison on random input
            shows.
        """
        require_silu(module)
        names = ("in_proj_qkvz", "in_proj_ba", "conv1d", "dt_bias", "A_log", "norm", "out_proj")
        return cls._of_module(
            module,
            names,
            module.hidden_size,
            module.num_v_heads,
            num_key_heads=module.num_k_heads,
            head_dim=module.head_k_dim,
            v_head_dim=module.head_v_dim,
            conv_kernel=module.conv_kernel_size,
            norm_epsilon=module.layer_norm_epsilon,
        )

    @classmethod
    def example(cls) -> Self:
        """Query, key and value are Q, K and V; states halve, half of an error is corrected."""
        d = EXAMPLE_HEAD_DIM
        weights = {
            "in_proj_qkvz.weight": np.concatenate(
                [select_columns(range(12)), np.full((d, EXAMPLE_WIDTH), 0.25)]
            ),
            "in_proj_ba.weight": np.zeros((2, EXAMPLE_WIDTH)),
            "conv1d.weight": np.ones((3 * d, 1, 1)),
            "dt_bias": np.zeros(1),
            "A_log": np.zeros(1),
            "norm.weight": np.ones(d),
        }
        return cls(EXAMPLE_WIDTH, head_dim=d, conv_kernel=1, out_proj=False, weights=weights)


def _split_columns(rows: Any, heads: int, widths: tuple[int, ...]) -> list[Any]:
    """`(..., n, heads * sum(widths))` as one `(..., n, heads * width)` for each width."""
    xp = array_namespace(rows)
    apart = xp.reshape(rows, (*rows.shape[:-1], heads, sum(widths)))
    parts, start = [], 0
    for width in widths:
        part = apart[..., start : start + width]
        parts.append(xp.reshape(part, (*rows.shape[:-1], heads * width)))
        start += width
    return parts
