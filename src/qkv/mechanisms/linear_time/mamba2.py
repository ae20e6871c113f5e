"""Mamba-2: a state space model that is also attention with a decaying mask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import Interval, NotNegative, Size, Whole
from qkv.errors import ArgumentError
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.arrays.head_rows import join_heads, split_heads
from qkv.mechanisms.base.arrays.namespace import array_namespace
from qkv.mechanisms.base.arrays.normalization import rms_norm
from qkv.mechanisms.base.arrays.rows import Arrays
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM, EXAMPLE_WIDTH, select_columns
from qkv.mechanisms.base.modules.loading import reads_module
from qkv.mechanisms.base.operations import projection
from qkv.mechanisms.linear_time.recurrences.activations import silu, softplus
from qkv.mechanisms.linear_time.recurrences.chunks import (
    causal_product,
    decays_between,
    in_chunks,
    state_of_no_tokens,
)
from qkv.mechanisms.linear_time.recurrences.convolution import causal_convolution
from qkv.mechanisms.linear_time.recurrences.recurrent import (
    RecurrentMechanism,
    activation_cost,
    grouped_heads,
    head_dim_of,
    repeated_heads,
)
from qkv.mechanisms.linear_time.recurrences.state_space import (
    GATE_OF_ONE,
    HALVING,
    STEP_OF_ONE,
    initial_state_space_weight,
    require_silu,
)

__all__ = ["Mamba2", "chunk", "recurrent"]


class Mamba2(RecurrentMechanism):
    """State space duality: the state of a head decays by one number, so that chunks are attention.

        z, v, B, C, d = W_in x;   v, B, C = silu(conv(v, B, C));   dt = softplus(d + dt_bias)
        S_t = exp(dt_t A) S_{t-1} + B_t^T dt_t v_t,   o_t = C_t S_t + D v_t   in each head
        out = W_out (norm(o * silu(z)))

    In Mamba every channel decays at its own rates, which leaves no matrix product. With one rate
    for each head, a chunk of tokens is causal attention whose mask holds decays.

    Parameters
    ----------
    embed_dim, num_heads : int
    head_dim : int, optional
        `2 embed_dim // num_heads` unless given.
    state_size : int
        Length of a row of B and of C.
    num_groups : int
        How many B and C there are, a divisor of num_heads.
    conv_kernel : int
        Tokens that the short convolution sees.
    time_step_limit : (float, float)
        Smallest and largest dt.
    norm_epsilon : float
        What is added to the mean square of a row.
    bias, conv_bias : bool
        Whether W_in and W_out, and the convolution, have a bias.
    out_proj : bool
        Whether the heads are projected back to embed_dim.
    chunk_size : int
        Tokens in a chunk; changes speed and rounding only.
    weights : mapping of str to array, optional
        Named as in transformers' `Mamba2Mixer`; random by default. A is `-exp(A_log)`.
    seed : int
        Seed of the random weights.

    Raises
    ------
    ArgumentError, ShapeError
        The sizes, or the weights, do not fit one another.

    Notes
    -----
    O(n (chunk_size + state_size) (state_size + head_dim)) operations for each head, and the
    projections. Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient
    Algorithms Through Structured State Space Duality", arXiv 2405.21060.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Mamba2
    >>> Mamba2(16, num_heads=4)(np.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    name = "mamba2"
    paper = "Dao and Gu, Transformers are SSMs (2024)"
    formula = (
        "W_out norm(o * silu(z)), o_t = C_t S_t + D v_t, S_t = exp(dt_t A) S_{t-1} + B_t^T dt_t v_t"
    )
    mixing_formula: ClassVar[str] = (
        "M[t,j] = C_t . B_j exp(A (dt_{j+1} + ... + dt_t)) dt_j, and D on top for j = t"
    )

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        head_dim: Size | None = None,
        state_size: Size = 128,
        num_groups: Size = 1,
        conv_kernel: Size = 4,
        time_step_limit: Interval = (0.0, math.inf),
        norm_epsilon: NotNegative = 1e-5,
        bias: bool = False,
        conv_bias: bool = True,
        out_proj: bool = True,
        chunk_size: Size = 64,
        weights: Arrays | None = None,
        seed: Whole = 0,
    ) -> None:
        head_dim = head_dim_of(2 * embed_dim, num_heads, head_dim)
        if num_heads % num_groups:
            raise ArgumentError(
                f"num_heads={num_heads} is not a multiple of num_groups={num_groups}.",
                action="Let every group of heads be of one size.",
            )
        self.num_heads, self.head_dim, self.num_groups = num_heads, head_dim, num_groups
        self.state_size, self.conv_kernel = state_size, conv_kernel
        self.time_step_limit, self.norm_epsilon = time_step_limit, norm_epsilon
        self.out_proj = out_proj
        inner, mixed = num_heads * head_dim, num_heads * head_dim + 2 * num_groups * state_size
        shapes: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (inner + mixed + num_heads, embed_dim),
            "conv1d.weight": (mixed, 1, conv_kernel),
            "dt_bias": (num_heads,),
            "A_log": (num_heads,),
            "D": (num_heads,),
            "norm.weight": (inner,),
        }
        if conv_bias:
            shapes["conv1d.bias"] = (mixed,)
        if out_proj:
            shapes["out_proj.weight"] = (embed_dim, inner)
        if bias:
            shapes["in_proj.bias"] = (inner + mixed + num_heads,)
            shapes |= {"out_proj.bias": (embed_dim,)} if out_proj else {}
        super().__init__(shapes, weights, seed, embed_dim, chunk_size)

    def initial_weight(
        self, name: str, shape: tuple[int, ...], rng: np.random.Generator
    ) -> NDArray[Any]:
        """A from -1 to -num_heads, and time steps from 0.001 to 0.1, as in the paper."""
        weight = initial_state_space_weight(name, shape, rng)
        return super().initial_weight(name, shape, rng) if weight is None else weight

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is kept of the past: the rows that the convolution sees, and S of each head."""
        heads = (self.num_heads, self.state_size, self.head_dim)
        mixed = self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size
        return {"conv": (self.conv_kernel - 1, mixed), "scan": heads}

    def project(self, x: Any, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """C, B, value and step of every head or group, and the gate z."""
        xp = array_namespace(x)
        inner, states = self.num_heads * self.head_dim, self.num_groups * self.state_size
        rows = self.linear("in_proj", x)
        bias = self.weight("conv1d.bias", x) if "conv1d.bias" in self.weights else None
        mixed = rows[..., inner : -self.num_heads]
        weight = self.weight("conv1d.weight", x)
        mixed, state["conv"] = causal_convolution(mixed, weight, state["conv"], bias)
        mixed = silu(mixed)
        time_step = softplus(rows[..., -self.num_heads :] + self.weight("dt_bias", x))
        inputs = {
            "C": split_heads(mixed[..., inner + states :], self.num_groups),
            "B": split_heads(mixed[..., inner : inner + states], self.num_groups),
            "value": split_heads(mixed[..., :inner], self.num_heads),
            "step": split_heads(xp.clip(time_step, *self.time_step_limit), self.num_heads),
        }
        return inputs, rows[..., :inner]

    def mix(self, inputs: Mapping[str, Any], state: dict[str, Any]) -> Any:
        """The heads in chunks; those of a group share the products of C and B."""
        value, time_step = inputs["value"], inputs["step"]
        # A group becomes an axis of its own, along which its C and B are broadcast.
        c, b = inputs["C"][..., None, :, :], inputs["B"][..., None, :, :]
        grouped = grouped_heads(time_step * value, self.num_groups)
        log_decay = grouped_heads(time_step * self._a(value), self.num_groups)[..., 0]
        start = grouped_heads(state["scan"], self.num_groups)
        out, end = chunk(c, b, grouped, log_decay, start, self.chunk_size)
        xp = array_namespace(value)
        out, state["scan"] = xp.reshape(out, value.shape), xp.reshape(end, state["scan"].shape)
        return out + self.weight("D", value)[:, None, None] * value

    def mixing(self, inputs: Mapping[str, Any]) -> Any:
        """C times B, decayed on the way, D on the diagonal."""
        time_step, value = inputs["step"], inputs["value"]
        times = self.num_heads // self.num_groups
        c, b = repeated_heads(inputs["C"], times), repeated_heads(inputs["B"], times)
        weights = c @ b.mT * decays_between((time_step * self._a(value))[..., 0]) * time_step.mT
        xp = array_namespace(value)
        diagonal = xp.eye(value.shape[-2])
        return xp.tril(weights) + self.weight("D", value)[:, None, None] * diagonal

    def join(self, out: Any, gate: Any) -> Any:
        """The gated heads, normalised group by group, and projected back."""
        xp = array_namespace(out)
        rows = join_heads(out) * silu(gate)
        width = rows.shape[-1] // self.num_groups
        groups = xp.reshape(rows, (*rows.shape[:-1], self.num_groups, width))
        rows = xp.reshape(rms_norm(groups, self.norm_epsilon), rows.shape)
        rows = rows * self.weight("norm.weight", out)
        return self.project_back("out_proj", rows, gate) if self.out_proj else rows

    def _a(self, x: Any) -> Any:
        return -array_namespace(x).exp(self.weight("A_log", x))[:, None, None]

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of the recurrence token by token; chunks do more in fewer products."""
        e, h, d = symbols(e=self.embed_dim, h=self.num_heads, d=self.head_dim)
        s, g, k = symbols(s=self.state_size, g=self.num_groups, k=self.conv_kernel)
        tokens = batch * tokens
        channels, mixed = tokens * h * d, h * d + 2 * g * s
        states = channels * s
        ledger = projection("in_proj", tokens, e, h * d + mixed + h, "in_proj.bias" in self.weights)
        ledger += step("conv", multiply=tokens * mixed * k, add=tokens * mixed * k)
        ledger += activation_cost("conv", tokens * mixed)
        ledger += step("step", add=tokens * h) + activation_cost("step", tokens * h)
        ledger += step("decay", multiply=tokens * h, exp=tokens * h)
        ledger += step("state", multiply=2 * states + channels, add=states, space=batch * h * d * s)
        ledger += step("read", multiply=states + channels, add=states, space=channels)
        ledger += activation_cost("gate", channels) + step("gate", multiply=channels)
        ledger += step("norm", multiply=2 * channels, add=channels,
                      divide=channels + tokens * g, sqrt=tokens * g)  # fmt: skip
        if self.out_proj:
            ledger += projection("out_proj", tokens, h * d, e, "out_proj.bias" in self.weights)
        return ledger

    def widths(self) -> tuple[int, int]:
        """The widths of x and of the output."""
        e, h, d = symbols(e=self.embed_dim, h=self.num_heads, d=self.head_dim)
        return e, e if self.out_proj else h * d

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any) -> Self:
        """The mechanism with the weights of a `Mamba2Mixer` of transformers.

        Parameters
        ----------
        module : transformers.models.mamba2.modeling_mamba2.Mamba2Mixer

        Raises
        ------
        UnsupportedError
            Its activation is not silu, or it is another module, as a comparison on random input
            shows.
        """
        require_silu(module)
        names = ("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj")
        return cls._of_module(
            module,
            names,
            module.hidden_size,
            module.num_heads,
            head_dim=module.head_dim,
            state_size=module.ssm_state_size,
            num_groups=module.n_groups,
            conv_kernel=module.conv_kernel_size,
            time_step_limit=tuple(module.time_step_limit),
            norm_epsilon=module.layer_norm_epsilon,
            bias=module.in_proj.bias is not None,
            conv_bias=module.conv1d.bias is not None,
        )

    @classmethod
    def example(cls) -> Self:
        """C, B and value are Q, K and V; steps of 1, states halve, the gate is 1, no D."""
        d = EXAMPLE_HEAD_DIM
        order = [*range(8, 12), *range(4, 8), *range(4)]
        nothing = np.zeros((d, EXAMPLE_WIDTH))
        weights = {
            "in_proj.weight": np.concatenate([nothing, select_columns(order), nothing[:1]]),
            "in_proj.bias": np.repeat([GATE_OF_ONE, 0.0], [d, 3 * d + 1]),
            "conv1d.weight": np.ones((3 * d, 1, 1)),
            "dt_bias": np.array([STEP_OF_ONE]),
            "A_log": np.array([HALVING]),
            "D": np.zeros(1),
            "norm.weight": np.ones(d),
        }
        return cls(
            EXAMPLE_WIDTH,
            head_dim=d,
            state_size=d,
            conv_kernel=1,
            bias=True,
            conv_bias=False,
            out_proj=False,
            weights=weights,
        )


def recurrent(
    query: Any, key: Any, value: Any, log_decay: Any, state: Any = None
) -> tuple[Any, Any]:
    """State space duality token by token: `S[t] = exp(log_decay[t]) S[t-1] + key[t]^T value[t]`."""
    xp = array_namespace(query)

    def token(state: Any, q: Any, k: Any, v: Any, log: Any) -> tuple[Any, Any]:
        state = xp.exp(log) * state + k.mT @ v
        return q @ state, state

    rows = (query, key, value, log_decay[..., None])
    return in_chunks(token, rows, state_of_no_tokens(key, value) if state is None else state, 1)


def chunk(
    query: Any,
    key: Any,
    value: Any,
    log_decay: Any,
    state: Any = None,
    chunk_size: int = 64,
) -> tuple[Any, Any]:
    """State space duality in chunks: quadratic within a chunk, a state between chunks.

    Parameters
    ----------
    query, key : arrays (..., n, state_size)
        C and B of the paper.
    value : array (..., n, head_dim)
        Its X, each row multiplied by its time step.
    log_decay : array (..., n)
        Time step times A, zero or below.
    state : array (..., state_size, head_dim), optional
        What an earlier call returned.
    chunk_size : int

    Returns
    -------
    output : array (..., n, head_dim)
    state : array (..., state_size, head_dim)

    Notes
    -----
    O(n (chunk_size + state_size) (state_size + head_dim)) operations.
    Source: Dao and Gu, "Transformers are SSMs", arXiv 2405.21060, section 6.
    """
    xp = array_namespace(query)

    def tokens(state: Any, q: Any, k: Any, v: Any, log: Any) -> tuple[Any, Any]:
        products = decays_between(log[..., 0])
        since_start, until_end = xp.exp(xp.cumulative_sum(log, axis=-2)), products[..., -1, :, None]
        output = causal_product(q @ k.mT * products, v) + since_start * (q @ state)
        return output, since_start[..., -1:, :] * state + k.mT @ (until_end * v)

    rows = (query, key, value, log_decay[..., None])
    state = state_of_no_tokens(key, value) if state is None else state
    return in_chunks(tokens, rows, state, chunk_size)
