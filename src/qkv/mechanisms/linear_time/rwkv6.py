"""RWKV-6 time mixing: linear attention whose state decays by what the tokens say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import NotNegative, Size, Whole
from qkv.ledger import Count, Ledger, matmul, step, symbols
from qkv.mechanisms.base.arrays.head_rows import join_heads, split_heads
from qkv.mechanisms.base.arrays.namespace import array_namespace, with_axis_moved
from qkv.mechanisms.base.arrays.normalization import layer_norm
from qkv.mechanisms.base.arrays.rows import Arrays
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM, EXAMPLE_WIDTH, select_columns
from qkv.mechanisms.base.operations import projection
from qkv.mechanisms.linear_time.recurrences.activations import silu
from qkv.mechanisms.linear_time.recurrences.chunks import (
    decays_between,
    in_chunks,
    state_of_no_tokens,
)
from qkv.mechanisms.linear_time.recurrences.recurrent import (
    RecurrentMechanism,
    activation_cost,
    head_dim_of,
    token_shift,
)

__all__ = ["RWKV6", "chunk", "read_of_earlier", "recurrent", "token_weights"]

MIXED = ("w", "k", "v", "r", "g")
"""The projections of a mixture of this token and the last one."""

PROJECTIONS = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}


class RWKV6(RecurrentMechanism):
    """RWKV-6 (Finch) time mixing: a matrix state for each head, and decays that depend on tokens.

        x^s_t = x_t + (x_{t-1} - x_t) * (mu_s + lora_s(x_t + (x_{t-1} - x_t) * mu_x)), s in wkvrg
        r, k, v, g = R x^r, K x^k, V x^v, silu(G x^g),   w = exp(-exp(d + tanh(x^w A) B))
        o_t = r_t (S_{t-1} + (u * k_t)^T v_t),   S_t = diag(w_t) S_{t-1} + k_t^T v_t
        out = O (g * norm(o))

    RWKV-4 decays at a fixed rate and keeps one number for each channel. Here the tokens say
    what is forgotten, and a head keeps head_dim**2 numbers.

    Parameters
    ----------
    embed_dim : int
        Width of x.
    num_heads : int
    head_dim : int, optional
        `embed_dim // num_heads` unless given.
    mix_rank, decay_rank : int
        Ranks of the corrections of the mixtures and of the decay.
    norm_epsilon : float
        What is added to the variance of the outputs of a head.
    out_proj : bool
        Whether the heads are projected back to embed_dim.
    chunk_size : int
        Tokens in a chunk; changes speed and rounding only.
    weights : mapping of str to array, optional
        Named as in the authors' `RWKV_Tmix_x060`: `time_maa_*`, `time_decay*`, `time_faaaa`,
        `receptance.weight`, `key.weight`, `value.weight`, `gate.weight`, `output.weight`,
        `ln_x.weight` and `ln_x.bias`; random by default.
    seed : int
        Seed of the random weights.

    Raises
    ------
    ArgumentError, ShapeError
        The sizes, or the weights, do not fit one another.

    Notes
    -----
    O(n (chunk_size + head_dim) head_dim) operations for each head, and the projections.
    Source: Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence",
    arXiv 2404.05892.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import RWKV6
    >>> RWKV6(16, num_heads=2)(np.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    name = "rwkv6"
    paper = "Peng et al., Eagle and Finch (2024)"
    formula = "O (g * norm(r_t (S_{t-1} + (u k_t)^T v_t))), S_t = diag(w_t) S_{t-1} + k_t^T v_t"
    mixing_formula: ClassVar[str] = (
        "M[t,j] = sum_d r_t[d] k_j[d] w_{j+1}[d] ... w_{t-1}[d]; with u in place of w for j = t"
    )

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        head_dim: Size | None = None,
        mix_rank: Size = 32,
        decay_rank: Size = 64,
        norm_epsilon: NotNegative = 64e-5,
        out_proj: bool = True,
        chunk_size: Size = 64,
        weights: Arrays | None = None,
        seed: Whole = 0,
    ) -> None:
        head_dim = head_dim_of(embed_dim, num_heads, head_dim)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.mix_rank, self.decay_rank = mix_rank, decay_rank
        self.norm_epsilon, self.out_proj = norm_epsilon, out_proj
        hidden = num_heads * head_dim
        shapes: dict[str, tuple[int, ...]] = {
            f"time_maa_{s}": (1, 1, embed_dim) for s in ("x", *MIXED)
        }
        shapes |= {
            "time_maa_w1": (embed_dim, 5 * mix_rank),
            "time_maa_w2": (5, mix_rank, embed_dim),
            "time_decay": (1, 1, hidden),
            "time_decay_w1": (embed_dim, decay_rank),
            "time_decay_w2": (decay_rank, hidden),
            "time_faaaa": (num_heads, head_dim),
            **{f"{side}.weight": (hidden, embed_dim) for side in PROJECTIONS.values()},
            "ln_x.weight": (hidden,),
            "ln_x.bias": (hidden,),
        }
        if out_proj:
            shapes["output.weight"] = (embed_dim, hidden)
        super().__init__(shapes, weights, seed, embed_dim, chunk_size)

    def initial_weight(
        self, name: str, shape: tuple[int, ...], rng: np.random.Generator
    ) -> NDArray[Any]:
        """Decays from slow to fast over the channels; the norm starts as the identity."""
        if name == "time_decay":
            return (-6 + 5 * np.linspace(0, 1, shape[-1]) ** 0.85).reshape(shape)
        if name == "ln_x.weight":
            return np.ones(shape)
        if name.startswith("time_maa_") and len(shape) == 3 and shape[0] == 1:
            return rng.random(shape)
        return super().initial_weight(name, shape, rng)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is kept of the past: the last row, and S of each head."""
        return {
            "shift": (1, self.embed_dim),
            "scan": (self.num_heads, self.head_dim, self.head_dim),
        }

    def project(self, x: Any, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Receptance, key, value and the logarithm of the decay of every head, and the gate."""
        xp = array_namespace(x)
        shifted, state["shift"] = token_shift(x, state["shift"])
        past = shifted - x
        mixed = x + past * self.weight("time_maa_x", x)[0, 0, :]
        low = xp.tanh(mixed @ self.weight("time_maa_w1", x))
        up = self.weight("time_maa_w2", x)
        rank = self.mix_rank
        sides = {}
        for i, s in enumerate(MIXED):
            correction = low[..., i * rank : (i + 1) * rank] @ up[i, ...]
            sides[s] = x + past * (self.weight(f"time_maa_{s}", x)[0, 0, :] + correction)
        hidden = xp.tanh(sides["w"] @ self.weight("time_decay_w1", x))
        exponent = self.weight("time_decay", x)[0, 0, :] + hidden @ self.weight("time_decay_w2", x)
        rows = {name: self.linear(name, sides[s]) for s, name in PROJECTIONS.items()}
        gate = silu(rows.pop("gate"))
        inputs = {name: split_heads(row, self.num_heads) for name, row in rows.items()}
        return inputs | {"log_decay": split_heads(-xp.exp(exponent), self.num_heads)}, gate

    def mix(self, inputs: Mapping[str, Any], state: dict[str, Any]) -> Any:
        """The recurrence of every head, in chunks."""
        bonus = self._bonus(inputs["key"])
        out, state["scan"] = chunk(
            **inputs, bonus=bonus, state=state["scan"], chunk_size=self.chunk_size
        )
        return out

    def mixing(self, inputs: Mapping[str, Any]) -> Any:
        """Receptance times key, decayed on the way."""
        rows = {name: array for name, array in inputs.items() if name != "value"}
        return token_weights(**rows, bonus=self._bonus(inputs["key"]))

    def join(self, out: Any, gate: Any) -> Any:
        """The heads normalised one by one, gated, and projected back."""
        rows = join_heads(layer_norm(out, self.norm_epsilon))
        rows = (rows * self.weight("ln_x.weight", out) + self.weight("ln_x.bias", out)) * gate
        return self.project_back("output", rows, gate) if self.out_proj else rows

    def _bonus(self, x: Any) -> Any:
        return self.weight("time_faaaa", x)[:, None, :]

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of the recurrence token by token; chunks do more in fewer products."""
        e, h, d = symbols(e=self.embed_dim, h=self.num_heads, d=self.head_dim)
        r, s = symbols(r=self.mix_rank, s=self.decay_rank)
        tokens = batch * tokens
        each, channels = tokens * e, tokens * h * d
        ledger = step("token_shift", subtract=each, multiply=6 * each, add=11 * each)
        ledger += matmul("mix_down", tokens, e, 5 * r) + step("mix_down", tanh=5 * tokens * r)
        ledger += matmul("mix_up", tokens, r, e) * 5
        ledger += matmul("decay_down", tokens, e, s) + step("decay_down", tanh=tokens * s)
        ledger += matmul("decay_up", tokens, s, h * d)
        ledger += step("decay", add=channels, exp=2 * channels, subtract=channels)
        for side in PROJECTIONS.values():
            ledger += projection(side, tokens, e, h * d)
        states = channels * d
        ledger += step("state", multiply=2 * states, add=states, space=batch * h * d * d)
        ledger += step("bonus", multiply=channels + states, add=states)
        ledger += step("read", multiply=states, add=states - channels, space=channels)
        rows = tokens * h
        ledger += step("norm", multiply=2 * channels, add=3 * channels - rows, subtract=channels,
                      divide=channels + 2 * rows, sqrt=rows)  # fmt: skip
        ledger += activation_cost("gate", channels) + step("gate", multiply=channels)
        if self.out_proj:
            ledger += projection("output", tokens, h * d, e)
        return ledger

    def widths(self) -> tuple[int, int]:
        """The widths of x and of the output."""
        e, h, d = symbols(e=self.embed_dim, h=self.num_heads, d=self.head_dim)
        return e, e if self.out_proj else h * d

    @classmethod
    def example(cls) -> Self:
        """Receptance, key and value are Q, K and V; states halve, a bonus of 1, no shift."""
        width, heads = EXAMPLE_WIDTH, EXAMPLE_HEAD_DIM
        weights: dict[str, Any] = {f"time_maa_{s}": np.zeros((1, 1, width)) for s in ("x", *MIXED)}
        weights |= {
            "time_maa_w1": np.zeros((width, 5)),
            "time_maa_w2": np.zeros((5, 1, width)),
            "time_decay": np.full((1, 1, heads), math.log(math.log(2))),
            "time_decay_w1": np.zeros((width, 1)),
            "time_decay_w2": np.zeros((1, heads)),
            "time_faaaa": np.ones((1, heads)),
            "receptance.weight": select_columns(range(4)),
            "key.weight": select_columns(range(4, 8)),
            "value.weight": select_columns(range(8, 12)),
            "gate.weight": np.full((heads, width), 0.25),
            "ln_x.weight": np.ones(heads),
            "ln_x.bias": np.zeros(heads),
        }
        return cls(width, head_dim=heads, mix_rank=1, decay_rank=1, out_proj=False, weights=weights)


def token_weights(receptance: Any, key: Any, log_decay: Any, bonus: Any) -> Any:
    """How much of the value of j reaches token i, (..., n, n); O(n^2 head_dim) memory."""
    xp = array_namespace(receptance)
    past = decays_between(log_decay.mT)
    # What token i reads has not decayed by its own number yet.
    past = with_axis_moved(xp.concat([past[..., :1, :], past[..., :-1, :]], axis=-2), -3, -1)
    weights = xp.sum(receptance[..., :, None, :] * past * key[..., None, :, :], axis=-1)
    own = xp.sum(receptance * bonus * key, axis=-1)[..., None]
    return xp.tril(weights, k=-1) + xp.tril(xp.triu(own + xp.zeros_like(weights)))


def recurrent(
    receptance: Any, key: Any, value: Any, log_decay: Any, bonus: Any, state: Any = None
) -> tuple[Any, Any]:
    """The same token by token: `output[t] = receptance[t] (S[t-1] + (bonus key[t])^T value[t])`.

    Then `S[t] = exp(log_decay[t])^T S[t-1] + key[t]^T value[t]`, a decay for every row of S.
    """
    xp = array_namespace(receptance)

    def token(state: Any, r: Any, k: Any, v: Any, log: Any) -> tuple[Any, Any]:
        new = k.mT @ v
        return r @ (state + bonus.mT * new), xp.exp(log).mT * state + new

    state = state_of_no_tokens(key, value) if state is None else state
    return in_chunks(token, (receptance, key, value, log_decay), state, 1)


def chunk(
    receptance: Any,
    key: Any,
    value: Any,
    log_decay: Any,
    bonus: Any,
    state: Any = None,
    chunk_size: int = 64,
) -> tuple[Any, Any]:
    """The same in chunks of matrix products.

    Parameters
    ----------
    receptance, key : arrays (..., n, head_dim)
    value : array (..., n, v_head_dim)
    log_decay : array (..., n, head_dim)
        Zero or below.
    bonus : array (..., 1, head_dim)
        What the token's own key is multiplied by.
    state : array (..., head_dim, v_head_dim), optional
        What an earlier call returned.
    chunk_size : int

    Returns
    -------
    output : array (..., n, v_head_dim)
    state : array (..., head_dim, v_head_dim)

    Notes
    -----
    O(n (chunk_size + head_dim) v_head_dim) operations. Every exponential is of zero or less.
    Source: Peng et al., "Eagle and Finch", arXiv 2404.05892, section 4; the chunks are those of
    Yang et al., "Gated linear attention", arXiv 2312.06635, section 4.
    """
    xp = array_namespace(receptance)

    def tokens(state: Any, r: Any, k: Any, v: Any, log: Any) -> tuple[Any, Any]:
        own = xp.sum(r * bonus * k, axis=-1, keepdims=True) * v
        earlier, state = read_of_earlier(r, k, v, log, state)
        return own + earlier, state

    state = state_of_no_tokens(key, value) if state is None else state
    return in_chunks(tokens, (receptance, key, value, log_decay), state, chunk_size)


def read_of_earlier(r: Any, k: Any, v: Any, log: Any, state: Any) -> tuple[Any, Any]:
    """What the tokens of a chunk read of earlier ones and of the state, and the state after them.

    That is `chunk` for one chunk, without a bonus.
    """
    xp, n = array_namespace(v), v.shape[-2]
    # Rows of zeros make n a power of two; their keys are zero and they do not decay.
    missing = (1 << (n - 1).bit_length()) - n
    r, k, v, log = (_padded(a, missing) for a in (r, k, v, log))
    earlier, before, after, whole = _earlier_tokens(r, k, v, log)
    output = earlier + (r * xp.exp(before)) @ state
    state = xp.exp(whole).mT * state + (k * xp.exp(after)).mT @ v
    return output[..., :n, :], state


def _earlier_tokens(r: Any, k: Any, v: Any, log: Any) -> tuple[Any, Any, Any, Any]:
    """The part of each output that comes from earlier tokens of its chunk, and sums of decays.

    Tokens in pairs, then pairs in fours, and so on: the second half of each block reads the first
    in one matrix product. Decays are counted from the boundary of the halves, so that both factors
    of the product are exponentials of zero or less, however strong the decay.

    Returns
    -------
    output : array (..., n, v_head_dim)
    before, after : arrays (..., n, head_dim)
        The sums of log over the tokens before, and after, each token of the chunk.
    whole : array (..., 1, head_dim)
        The sum over all of them.
    """
    xp = array_namespace(r)
    output, before, after = xp.zeros_like(v), xp.zeros_like(log), xp.zeros_like(log)
    whole = log
    half = 1
    while half < v.shape[-2]:
        early, late = (..., 0, slice(None), slice(None)), (..., 1, slice(None), slice(None))
        since, until, sums = _halves(before, half), _halves(after, half), _halves(whole, 1)
        query = _halves(r, half)[late] * xp.exp(since[late])
        key = _halves(k, half)[early] * xp.exp(until[early])
        read = query @ key.mT @ _halves(v, half)[early]
        output = output + _joined(xp.zeros_like(read), read, v)
        before = _joined(since[early], since[late] + sums[early], log)
        after = _joined(until[early] + sums[late], until[late], log)
        whole = (sums[early] + sums[late])[..., 0, :]
        half *= 2
    return output, before, after, whole


def _halves(a: Any, half: int) -> Any:
    """(..., n, d) as (..., n / (2 half), 2, half, d)."""
    return array_namespace(a).reshape(
        a, (*a.shape[:-2], a.shape[-2] // (2 * half), 2, half, a.shape[-1])
    )


def _joined(early: Any, late: Any, like: Any) -> Any:
    """The halves of blocks in their order again, in the shape of `like`."""
    xp = array_namespace(like)
    return xp.reshape(xp.stack([early, late], axis=-3), like.shape)


def _padded(a: Any, rows: int) -> Any:
    if not rows:
        return a
    xp = array_namespace(a)
    zeros = xp.broadcast_to(xp.zeros_like(a[..., :1, :]), (*a.shape[:-2], rows, a.shape[-1]))
    return xp.concat([a, zeros], axis=-2)
