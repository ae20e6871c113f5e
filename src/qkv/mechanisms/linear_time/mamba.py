"""Mamba: a state space model whose step, input and output depend on the token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import Size, Whole
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.arrays.namespace import array_namespace, host_views, like, with_axis_moved
from qkv.mechanisms.base.arrays.rows import Arrays
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM, EXAMPLE_WIDTH, select_columns
from qkv.mechanisms.base.modules.loading import reads_module
from qkv.mechanisms.base.operations import projection
from qkv.mechanisms.linear_time.recurrences.activations import silu, softplus
from qkv.mechanisms.linear_time.recurrences.chunks import (
    in_chunks,
    state_of_no_tokens,
    sums_between,
)
from qkv.mechanisms.linear_time.recurrences.convolution import causal_convolution
from qkv.mechanisms.linear_time.recurrences.recurrent import RecurrentMechanism, activation_cost
from qkv.mechanisms.linear_time.recurrences.scan import (
    in_segments,
    joined_segments,
    linear_scan,
    segments,
)
from qkv.mechanisms.linear_time.recurrences.state_space import (
    GATE_OF_ONE,
    HALVING,
    STEP_OF_ONE,
    initial_state_space_weight,
    require_silu,
)

__all__ = ["Mamba", "chunk", "recurrent", "token_weights"]


class Mamba(RecurrentMechanism):
    """A selective state space model: every channel keeps state_size numbers, and tokens say how.

        u, z = W_in x;   v = silu(conv(u));   (d, B, C) = W_x v;   dt = softplus(W_dt d + bias)
        h_t = exp(dt_t A) h_{t-1} + dt_t v_t B_t,   o_t = C_t . h_t + D v_t   in each channel
        out = W_out (o * silu(z))

    Earlier state space models treat all tokens alike. Here the step dt, the input B and the output
    C depend on the token, so that a channel can keep some tokens and skip others.

    Parameters
    ----------
    embed_dim : int
        Width of x.
    inner_dim : int, optional
        Channels, `2 embed_dim` unless given.
    state_size : int
        Numbers that a channel keeps.
    conv_kernel : int
        Tokens that the short convolution sees.
    time_step_rank : int, optional
        Rank of W_dt, `embed_dim / 16` rounded up unless given.
    bias : bool
        Whether W_in and W_out have a bias.
    conv_bias : bool
        Whether the convolution has a bias.
    out_proj : bool
        Whether the channels are projected back to embed_dim.
    chunk_size : int
        Tokens in a chunk; changes speed and rounding only.
    weights : mapping of str to array, optional
        Named as in transformers' `MambaMixer`; random by default. A is `-exp(A_log)`.
    seed : int
        Seed of the random weights.

    Raises
    ------
    ArgumentError, ShapeError
        The sizes, or the weights, do not fit one another.

    Notes
    -----
    O(n inner_dim (embed_dim + state_size)) operations; a state of inner_dim * state_size numbers
    and the rows that the convolution sees. Source: Gu and Dao, "Mamba: Linear-Time Sequence
    Modeling with Selective State Spaces", arXiv 2312.00752.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Mamba
    >>> Mamba(16)(np.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    name = "mamba"
    paper = "Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces (2023)"
    formula = (
        "W_out (o * silu(z)), o_t = C_t . h_t + D v_t, h_t = exp(dt_t A) h_{t-1} + dt_t v_t B_t"
    )
    mixing_formula: ClassVar[str] = (
        "M[t,j] = sum_s C_t[s] exp(A[s] (dt_{j+1} + ... + dt_t)) dt_j B_j[s], and D for j = t"
    )

    def __init__(
        self,
        embed_dim: Size,
        *,
        inner_dim: Size | None = None,
        state_size: Size = 16,
        conv_kernel: Size = 4,
        time_step_rank: Size | None = None,
        bias: bool = False,
        conv_bias: bool = True,
        out_proj: bool = True,
        chunk_size: Size = 64,
        weights: Arrays | None = None,
        seed: Whole = 0,
    ) -> None:
        inner = 2 * embed_dim if inner_dim is None else inner_dim
        rank = -(-embed_dim // 16) if time_step_rank is None else time_step_rank
        self.inner_dim, self.state_size, self.time_step_rank = inner, state_size, rank
        self.conv_kernel, self.out_proj = conv_kernel, out_proj
        shapes: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (2 * inner, embed_dim),
            "conv1d.weight": (inner, 1, conv_kernel),
            "x_proj.weight": (rank + 2 * state_size, inner),
            "dt_proj.weight": (inner, rank),
            "dt_proj.bias": (inner,),
            "A_log": (inner, state_size),
            "D": (inner,),
        }
        if conv_bias:
            shapes["conv1d.bias"] = (inner,)
        if out_proj:
            shapes["out_proj.weight"] = (embed_dim, inner)
        if bias:
            shapes["in_proj.bias"] = (2 * inner,)
            shapes |= {"out_proj.bias": (embed_dim,)} if out_proj else {}
        super().__init__(shapes, weights, seed, embed_dim, chunk_size)

    def initial_weight(
        self, name: str, shape: tuple[int, ...], rng: np.random.Generator
    ) -> NDArray[Any]:
        """A from -1 to -state_size, and time steps from 0.001 to 0.1, as in the paper."""
        kind = {"dt_proj.bias": "dt_bias"}.get(name, name)
        weight = initial_state_space_weight(kind, shape, rng)
        return super().initial_weight(name, shape, rng) if weight is None else weight

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is kept of the past: the rows that the convolution still sees, and h."""
        inner = self.inner_dim
        return {"conv": (self.conv_kernel - 1, inner), "scan": (inner, self.state_size)}

    def project(self, x: Any, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Value, step, B and C of the scan, and the gate z."""
        inner, rank, states = self.inner_dim, self.time_step_rank, self.state_size
        both = self.linear("in_proj", x)
        bias = self.weight("conv1d.bias", x) if "conv1d.bias" in self.weights else None
        weight = self.weight("conv1d.weight", x)
        mixed, state["conv"] = causal_convolution(both[..., :inner], weight, state["conv"], bias)
        value = silu(mixed)
        parts = self.linear("x_proj", value)
        inputs = {
            "value": value,
            "step": softplus(self.linear("dt_proj", parts[..., :rank])),
            "B": parts[..., rank : rank + states],
            "C": parts[..., rank + states :],
        }
        return inputs, both[..., inner:]

    def mix(self, inputs: Mapping[str, Any], state: dict[str, Any]) -> Any:
        """The selective scan, in chunks."""
        value, a = inputs["value"], self._a(inputs["value"])
        rows = (value, inputs["step"], a, inputs["B"], inputs["C"])
        out, state["scan"] = chunk(*rows, state["scan"], self.chunk_size)
        return out + self.weight("D", value) * value

    def mixing(self, inputs: Mapping[str, Any]) -> Any:
        """The hidden attention of each channel, D on the diagonal."""
        value = inputs["value"]
        weights = token_weights(inputs["step"], self._a(value), inputs["B"], inputs["C"])
        n = value.shape[-2]
        return weights + self.weight("D", value)[:, None, None] * array_namespace(value).eye(n)

    def join(self, out: Any, gate: Any) -> Any:
        """The gated channels, projected back."""
        rows = out * silu(gate)
        return self.project_back("out_proj", rows, gate) if self.out_proj else rows

    def _a(self, x: Any) -> Any:
        return -array_namespace(x).exp(self.weight("A_log", x))

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of the recurrence token by token; chunks do more in fewer products."""
        e, c = symbols(e=self.embed_dim, c=self.inner_dim)
        s, r, k = symbols(s=self.state_size, r=self.time_step_rank, k=self.conv_kernel)
        tokens = batch * tokens
        channels = tokens * c
        states = channels * s
        ledger = projection("in_proj", tokens, e, 2 * c, "in_proj.bias" in self.weights)
        ledger += step("conv", multiply=channels * k, add=channels * k)
        ledger += activation_cost("conv", channels)
        ledger += projection("x_proj", tokens, c, r + 2 * s)
        ledger += projection("dt_proj", tokens, r, c, True) + activation_cost("dt_proj", channels)
        ledger += step(
            "state", multiply=3 * states + channels, exp=states, add=states, space=batch * c * s
        )
        ledger += step("read", multiply=states + channels, add=states, space=channels)
        ledger += activation_cost("gate", channels) + step("gate", multiply=channels)
        if self.out_proj:
            ledger += projection("out_proj", tokens, c, e, "out_proj.bias" in self.weights)
        return ledger

    def widths(self) -> tuple[int, int]:
        """The widths of x and of the output."""
        e, c = symbols(e=self.embed_dim, c=self.inner_dim)
        return e, e if self.out_proj else c

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any) -> Self:
        """The mechanism with the weights of a `MambaMixer` of transformers.

        Parameters
        ----------
        module : transformers.models.mamba.modeling_mamba.MambaMixer

        Raises
        ------
        UnsupportedError
            Its activation is not silu, or it is another module, as a comparison on random input
            shows.
        """
        require_silu(module)
        names = ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj")
        return cls._of_module(
            module,
            names,
            module.hidden_size,
            inner_dim=module.intermediate_size,
            state_size=module.ssm_state_size,
            conv_kernel=module.conv_kernel_size,
            time_step_rank=module.time_step_rank,
            bias=module.in_proj.bias is not None,
            conv_bias=module.conv1d.bias is not None,
        )

    @classmethod
    def example(cls) -> Self:
        """Four channels of V, which are B and C too; steps of 1, states halve, the gate is 1.

        Q and K take no part: in Mamba, B and C are made from the channels themselves.
        """
        d = EXAMPLE_HEAD_DIM
        weights = {
            "in_proj.weight": np.concatenate(
                [select_columns(range(8, 12)), np.zeros((d, EXAMPLE_WIDTH))]
            ),
            "in_proj.bias": np.repeat([0.0, GATE_OF_ONE], d),
            "conv1d.weight": np.ones((d, 1, 1)),
            "x_proj.weight": np.concatenate([np.zeros((1, d)), np.eye(d), np.eye(d)]),
            "dt_proj.weight": np.zeros((d, 1)),
            "dt_proj.bias": np.full(d, STEP_OF_ONE),
            "A_log": np.full((d, d), HALVING),
            "D": np.zeros(d),
        }
        return cls(
            EXAMPLE_WIDTH,
            inner_dim=d,
            state_size=d,
            conv_kernel=1,
            time_step_rank=1,
            bias=True,
            conv_bias=False,
            out_proj=False,
            weights=weights,
        )


def token_weights(step: Any, a: Any, b: Any, c: Any) -> Any:
    """How much of the input of token j reaches token i, (..., channels, n, n).

    `M[i,j] = sum_s c[i,s] exp(a[s] (step[j+1] + ... + step[i])) step[j] b[j,s]` in each channel.

    Notes
    -----
    O(n^2 channels) memory, for one number of the state after the other.
    Source: Ali et al., "The hidden attention of Mamba models", arXiv 2403.01590.
    """
    xp = array_namespace(step)
    between = sums_between(step.mT)
    weights = 0
    for s in range(a.shape[-1]):
        pairs = c[..., None, :, s, None] * b[..., None, None, :, s]
        # 0 times an infinite decay would be NaN.
        rates = xp.where(between == 0, between, a[:, s, None, None])
        weights = weights + xp.exp(between * rates) * pairs
    return xp.tril(weights * step.mT[..., None, :])


def recurrent(x: Any, step: Any, a: Any, b: Any, c: Any, state: Any = None) -> tuple[Any, Any]:
    """The selective scan token by token; see `chunk` for the shapes."""
    xp = array_namespace(x)

    def token(state: Any, x: Any, dt: Any, b: Any, c: Any) -> tuple[Any, Any]:
        state = xp.exp(dt.mT * a) * state + (dt * x).mT * b
        return c @ state.mT, state

    state = state_of_no_tokens(x, b) if state is None else state
    return in_chunks(token, (x, step, b, c), state, 1)


def chunk(
    x: Any, step: Any, a: Any, b: Any, c: Any, state: Any = None, chunk_size: int = 64
) -> tuple[Any, Any]:
    """The selective scan in chunks, in each of which segments are computed side by side.

    `h[t] = exp(step[t] a) h[t-1] + step[t] x[t] b[t]` and `output[t] = sum_s c[t,s] h[t,s]`.

    Parameters
    ----------
    x, step : arrays (..., n, channels)
        Inputs, and how long each of them acts.
    a : array (channels, state_size)
        Below zero.
    b, c : arrays (..., n, state_size)
    state : array (..., channels, state_size), optional
        What an earlier call returned.
    chunk_size : int

    Returns
    -------
    output : array (..., n, channels)
    state : array (..., channels, state_size)

    Notes
    -----
    O(n channels state_size) operations, and memory for the states of one chunk. Each state of a
    channel decays at its own rate, so that a chunk is not a matrix product as it is in Mamba-2.
    NumPy arrays, and tensors in main memory that carry no gradient, are computed token by token in
    memory that is used again.
    Source: Gu and Dao, "Mamba", arXiv 2312.00752, algorithm 2.
    """
    xp = array_namespace(x)
    start = state_of_no_tokens(x, b) if state is None else state
    views = host_views(x, step, a, b, c, start)
    if views is not None:
        out, state = _chunk_in_place(views, chunk_size)
        return like(out, x), like(state, x)
    state = start.mT
    # Channels are the last axis, in memory too: they are more than states and fill vectors better.
    a = xp.stack([a[:, s] for s in range(a.shape[1])])
    writes = with_axis_moved(b, -2, 0)[..., None]
    steps, inputs, reads = (with_axis_moved(r, -2, 0)[..., None, :] for r in (step, step * x, c))
    rows = []
    for where, length in segments(x.shape[-2], chunk_size):
        decay = in_segments(xp.exp(steps[where, ...] * a), length)
        increment = in_segments(writes[where, ...] * inputs[where, ...], length)
        _, *after = linear_scan(decay, increment, state)
        state = after[-1][-1, ...]
        rows.append(reads[where, ...] @ joined_segments(after))
    return with_axis_moved(xp.concat(rows)[..., 0, :], 0, -2), state.mT


def _chunk_in_place(
    arrays: tuple[NDArray[Any], ...], chunk_size: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """What `chunk` gives, token by token in memory that is used again.

    Half as many numbers move as in a scan of segments, which never writes in place.
    """
    x, step, a, b, c, state = arrays
    steps, inputs, writes, reads = (np.moveaxis(r, -2, 0) for r in (step, step * x, b, c))
    # Channels are the last axis, as in `chunk`.
    rates, last = np.ascontiguousarray(a.T), np.array(state.mT, order="C")
    shape = (min(chunk_size, len(steps)), *last.shape)
    decays, states = np.empty(shape, last.dtype), np.empty(shape, last.dtype)
    out = np.empty(x.shape, x.dtype)
    rows = np.moveaxis(out, -2, 0)
    for first in range(0, len(steps), chunk_size):
        now = slice(first, first + chunk_size)
        count = len(steps[now])
        np.multiply(steps[now][..., None, :], rates, out=decays[:count])
        np.exp(decays[:count], out=decays[:count])
        np.multiply(writes[now][..., None], inputs[now][..., None, :], out=states[:count])
        for decay, after in zip(decays[:count], states[:count], strict=True):
            np.multiply(decay, last, out=decay)
            np.add(after, decay, out=after)
            last = after
        rows[now] = (reads[now][..., None, :] @ states[:count])[..., 0, :]
        last = last.copy()
    return out, last.mT
