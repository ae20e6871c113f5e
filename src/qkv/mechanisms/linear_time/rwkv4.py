"""RWKV-4 time mixing: a softmax over the past in every channel, with decay for queries."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import Size, Whole
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.arrays.namespace import array_namespace, like, with_axis_moved
from qkv.mechanisms.base.arrays.rows import Arrays, Rows
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM, EXAMPLE_WIDTH, select_columns
from qkv.mechanisms.base.modules.comparing import closest
from qkv.mechanisms.base.modules.loading import named_weights, reads_module, refuse_other_parameters
from qkv.mechanisms.base.operations import projection
from qkv.mechanisms.linear_time.recurrences.activations import sigmoid
from qkv.mechanisms.linear_time.recurrences.recurrent import (
    RecurrentMechanism,
    activation_cost,
    token_shift,
)
from qkv.mechanisms.linear_time.recurrences.scan import (
    in_segments,
    joined_segments,
    linear_scan,
    segments,
)

__all__ = ["RWKV4", "chunk", "distance_bias", "recurrent", "token_weights"]

SUMS = ("numerator", "denominator", "largest")
"""What a channel keeps; see `chunk`."""


class RWKV4(RecurrentMechanism):
    """RWKV-4 time mixing: each channel is a weighted mean of its past, and decay replaces queries.

        r, k, v = R m(x, mu_r), K m(x, mu_k), V m(x, mu_v),   m(x, mu)_t = mu x_t + (1 - mu) x_{t-1}
        o_t = (sum_{j<t} exp(-(t-1-j) w + k_j) v_j + exp(u + k_t) v_t) / (the same without v)
        out = O (sigmoid(r) * o)

    Every product between channels is outside of the recurrence, so that a token costs the same
    however many came before it, where attention keeps and reads all of them.

    Parameters
    ----------
    embed_dim : int
        Width of x.
    hidden_dim : int, optional
        Channels of the recurrence, `embed_dim` unless given.
    out_proj : bool
        Whether the channels are projected back to embed_dim.
    chunk_size : int
        Tokens in a chunk; changes speed and rounding only.
    weights : mapping of str to array, optional
        Named as in transformers' `RwkvSelfAttention`; random by default. w is `exp(time_decay)`
        and u is `time_first`.
    seed : int
        Seed of the random weights.

    Raises
    ------
    ArgumentError, ShapeError
        The sizes, or the weights, do not fit one another.

    Notes
    -----
    O(n embed_dim hidden_dim) operations; a state of three numbers a channel and the last row.
    Source: Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", arXiv 2305.13048.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import RWKV4
    >>> RWKV4(16)(np.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    name = "rwkv4"
    paper = "Peng et al., RWKV: Reinventing RNNs for the Transformer Era (2023)"
    formula = "O (sigmoid(r_t) * sum_j p_tj v_j), p_t = softmax_j(k_j - (t - 1 - j) w, k_t + u)"
    block_size: ClassVar[int] = 4096
    mixing_formula: ClassVar[str] = (
        "softmax over j of k_j - (t - 1 - j) w, and k_t + u for t itself"
    )

    def __init__(
        self,
        embed_dim: Size,
        hidden_dim: Size | None = None,
        *,
        out_proj: bool = True,
        chunk_size: Size = 2048,
        weights: Arrays | None = None,
        seed: Whole = 0,
    ) -> None:
        hidden_dim = embed_dim if hidden_dim is None else hidden_dim
        self.hidden_dim, self.out_proj = hidden_dim, out_proj
        shapes: dict[str, tuple[int, ...]] = {"time_decay": (hidden_dim,)}
        shapes["time_first"] = (hidden_dim,)
        for side in ("key", "value", "receptance"):
            shapes[f"time_mix_{side}"] = (1, 1, embed_dim)
            shapes[f"{side}.weight"] = (hidden_dim, embed_dim)
        if out_proj:
            shapes["output.weight"] = (embed_dim, hidden_dim)
        super().__init__(shapes, weights, seed, embed_dim, chunk_size)

    def initial_weight(
        self, name: str, shape: tuple[int, ...], rng: np.random.Generator
    ) -> NDArray[Any]:
        """Decays from slow to fast over the channels, and mixes between this token and the last."""
        if name == "time_decay":
            return -5 + 8 * np.linspace(0, 1, shape[0]) ** 0.7
        if name == "time_first":
            return np.full(shape, math.log(0.3))
        return (
            rng.random(shape)
            if name.startswith("time_mix")
            else super().initial_weight(name, shape, rng)
        )

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is kept of the past: the last row, and the sums of each channel."""
        return {"shift": (1, self.embed_dim)} | dict.fromkeys(SUMS, (self.hidden_dim,))

    def initial_state(self, x: Rows) -> dict[str, Any]:
        """Sums of nothing, whose largest score is -inf."""
        state = super().initial_state(x)
        return state | {"largest": state["largest"] - math.inf}

    def project(self, x: Any, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Key and value of every channel, and the gate `sigmoid(receptance)`."""
        shifted, state["shift"] = token_shift(x, state["shift"])
        sides = {}
        for side in ("key", "value", "receptance"):
            mix = self.weight(f"time_mix_{side}", x)[0, 0, :]
            sides[side] = self.linear(side, x * mix + shifted * (1 - mix))
        return {"key": sides["key"], "value": sides["value"]}, sigmoid(sides["receptance"])

    def mix(self, inputs: Mapping[str, Any], state: dict[str, Any]) -> Any:
        """The weighted mean of every channel, in chunks."""
        key, value = inputs["key"], inputs["value"]
        start = tuple(state[name] for name in SUMS)
        out, end = chunk(key, value, *self._decay_and_bonus(key), start, self.chunk_size)
        state |= zip(SUMS, end, strict=True)
        return out

    def mixing(self, inputs: Mapping[str, Any]) -> Any:
        """The softmax weights of every channel."""
        return token_weights(inputs["key"], *self._decay_and_bonus(inputs["key"]))

    def join(self, out: Any, gate: Any) -> Any:
        """The gated channels, projected back."""
        rows = gate * out
        return self.project_back("output", rows, gate) if self.out_proj else rows

    def _decay_and_bonus(self, x: Any) -> tuple[Any, Any]:
        return array_namespace(x).exp(self.weight("time_decay", x)), self.weight("time_first", x)

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of the recurrence token by token; chunks do more in fewer products."""
        e, h = symbols(e=self.embed_dim, h=self.hidden_dim)
        tokens = batch * tokens
        ledger = step("token_shift", multiply=6 * tokens * e, add=3 * tokens * e, subtract=3 * e)
        for side in ("key", "value", "receptance"):
            ledger += projection(side, tokens, e, h)
        each = tokens * h
        ledger += step(
            "wkv", exp=4 * each, multiply=6 * each, add=5 * each, subtract=5 * each,
            compare=2 * each, divide=each, space=each,
        )  # fmt: skip
        ledger += activation_cost("gate", each) + step("gate", multiply=each)
        if self.out_proj:
            ledger += projection("output", tokens, h, e)
        return ledger

    def widths(self) -> tuple[int, int]:
        """The widths of x and of the output."""
        e, h = symbols(e=self.embed_dim, h=self.hidden_dim)
        return e, e if self.out_proj else h

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any) -> Self:
        """The mechanism with the weights of a `RwkvSelfAttention` of transformers.

        Parameters
        ----------
        module : transformers.models.rwkv.modeling_rwkv.RwkvSelfAttention

        Raises
        ------
        UnsupportedError
            The module is another, as a comparison on random input shows.
        """
        names = ["time_decay", "time_first", "output"]
        for side in ("key", "value", "receptance"):
            names += [side, f"time_mix_{side}"]
        weights = named_weights(module, names)
        hidden_dim, embed_dim = weights["key.weight"].shape
        refuse_other_parameters(module, names, cls.name)
        mechanism = cls(embed_dim, hidden_dim, weights=weights)
        return closest(module, [(cls.name, mechanism)], lambda copied, x: copied(x), embed_dim)

    @classmethod
    def example(cls) -> Self:
        """Key, value and receptance are K, V and Q; scores lose 1/2 a token, no bonus, no shift."""
        width = (1, 1, EXAMPLE_WIDTH)
        weights: dict[str, Any] = {
            "time_decay": np.full(EXAMPLE_HEAD_DIM, math.log(0.5)),
            "time_first": np.zeros(EXAMPLE_HEAD_DIM),
        }
        for side, start in (("receptance", 0), ("key", 4), ("value", 8)):
            weights[f"time_mix_{side}"] = np.ones(width)
            weights[f"{side}.weight"] = select_columns(range(start, start + EXAMPLE_HEAD_DIM))
        return cls(EXAMPLE_WIDTH, EXAMPLE_HEAD_DIM, out_proj=False, weights=weights)


def distance_bias(decay: Any, bonus: Any, rows: int, columns: int) -> Any:
    """The decay that is added to key j for the output of token i, in every channel.

    `-(i - 1 - j) decay` for j < i, `bonus` for j = i, and -inf for j > i.

    Parameters
    ----------
    decay, bonus : arrays (channels,)
    rows, columns : int

    Returns
    -------
    array (rows, columns, channels)

    Examples
    --------
    >>> distance_bias(np.array([0.5]), np.array([3.0]), 3, 3)[..., 0]
    array([[ 3. , -inf, -inf],
           [ 0. ,  3. , -inf],
           [-0.5,  0. ,  3. ]])
    """
    xp = array_namespace(decay)
    steps = np.arange(rows)[:, None, None] - np.arange(columns)[:, None]
    back = like(np.maximum(steps - 1, 0), decay)
    # 0 times an infinite decay would be NaN.
    past = -back * xp.where(back == 0, back, decay)
    past = past + like(np.where(steps < 0, -math.inf, 0.0), decay)
    return xp.where(like(steps, decay) == 0, bonus, past)


def token_weights(key: Any, decay: Any, bonus: Any) -> Any:
    """The softmax weights of every channel, (..., channels, n, n); O(n^2 channels)."""
    xp = array_namespace(key)
    n = key.shape[-2]
    bias = distance_bias(decay, bonus, n, n)
    # NaN of a later key would stay NaN in a sum with -inf.
    scores = xp.where(bias == -math.inf, bias, key[..., None, :, :] + bias)
    weights = xp.exp(scores - xp.max(scores, axis=-2, keepdims=True))
    weights = weights / xp.sum(weights, axis=-2, keepdims=True)
    return with_axis_moved(weights, -1, -3)


def recurrent(
    key: Any, value: Any, decay: Any, bonus: Any, state: tuple[Any, Any, Any] | None = None
) -> tuple[Any, tuple[Any, Any, Any]]:
    """The weighted mean of values token by token; see `chunk` for the shapes."""
    xp = array_namespace(key)
    numerator, denominator, largest = _no_tokens(key) if state is None else state
    rows = []
    for t in range(key.shape[-2]):
        k, v = key[..., t, :], value[..., t, :]
        top = xp.maximum(largest, k + bonus)
        past, own = xp.exp(largest - top), xp.exp(k + bonus - top)
        rows.append((past * numerator + own * v) / (past * denominator + own))
        top = xp.maximum(largest - decay, k)
        past, own = xp.exp(largest - decay - top), xp.exp(k - top)
        numerator, denominator = past * numerator + own * v, past * denominator + own
        largest = top
    return xp.stack(rows, axis=-2), (numerator, denominator, largest)


def chunk(
    key: Any,
    value: Any,
    decay: Any,
    bonus: Any,
    state: tuple[Any, Any, Any] | None = None,
    chunk_size: int = 2048,
) -> tuple[Any, tuple[Any, Any, Any]]:
    """The mean in chunks: scans for the largest score so far, and for the sums divided by its exp.

    Parameters
    ----------
    key, value : arrays (..., n, channels)
    decay : array (channels,)
        What a key loses for every token after it, above zero.
    bonus : array (channels,)
        What is added to the key of the token itself.
    state : tuple of arrays (..., channels), optional
        What an earlier call returned: the sums of weighted values and of weights, both divided by
        the exponential of the third, the largest score.
    chunk_size : int

    Returns
    -------
    output : array (..., n, channels)
    state : tuple of arrays

    Notes
    -----
    O(n channels) operations. Every exponential is of zero or less. Channels do not mix, so that
    there is no matrix product.
    Source: Peng et al., "RWKV", arXiv 2305.13048, equations 16 to 18 and appendix D.
    """
    xp = array_namespace(key)
    numerator, denominator, largest = _no_tokens(key) if state is None else state
    sums = xp.stack([numerator, denominator])
    # `linear_scan` runs along axis 0, so the tokens are moved there.
    keys, values = with_axis_moved(key, -2, 0), with_axis_moved(value, -2, 0)
    rows = []
    for where, length in segments(keys.shape[0], chunk_size):
        k, v = (xp.stack(in_segments(array[where, ...], length)) for array in (keys, values))
        loss = xp.broadcast_to(-decay, k.shape)
        tops = xp.stack(list(linear_scan(loss, k, largest, xp.maximum, operator.add)))
        before, tops = tops[:-1, ...], tops[1:, ...]
        decay_factors, weight = xp.exp(before - decay - tops)[:, :, None, ...], xp.exp(k - tops)
        added = xp.stack([weight * v, weight], axis=2)
        totals = xp.stack(list(linear_scan(decay_factors, added, sums)))
        past = totals[:-1, ...]
        top = xp.maximum(before, k + bonus)
        faded, own = xp.exp(before - top), xp.exp(k + bonus - top)
        read = (faded * past[:, :, 0, ...] + own * v) / (faded * past[:, :, 1, ...] + own)
        rows.append(joined_segments([read[token, ...] for token in range(length)]))
        sums, largest = totals[-1, -1, ...], tops[-1, -1, ...]
    return with_axis_moved(xp.concat(rows), 0, -2), (sums[0, ...], sums[1, ...], largest)


def _no_tokens(key: Any) -> tuple[Any, Any, Any]:
    zeros = array_namespace(key).zeros_like(key[..., 0, :])
    return zeros, zeros, zeros - math.inf
