"""The base of mechanisms with a recurrent state of fixed size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from qkv.arguments.declarations import Size, Whole
from qkv.errors import ArgumentError, ShapeError
from qkv.ledger import Ledger, step
from qkv.mechanisms.base.arrays.namespace import array_namespace, like, values, widened
from qkv.mechanisms.base.arrays.rows import Arrays, Rows
from qkv.mechanisms.base.explanations.attention_steps import token_lines
from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Line, Step, numbers
from qkv.mechanisms.base.modules.comparing import closest
from qkv.mechanisms.base.modules.loading import named_weights, refuse_other_parameters
from qkv.mechanisms.linear_time.recurrences.stateful import StatefulMechanism

__all__ = [
    "RecurrentMechanism",
    "activation_cost",
    "grouped_heads",
    "head_dim_of",
    "repeated_heads",
    "token_shift",
]


class RecurrentMechanism(StatefulMechanism):
    """A mechanism that reads tokens in order into a state; linear in time and memory.

    A subclass makes the inputs of its recurrence (`project`), runs it in chunks (`mix`), says to
    which matrix of token weights that amounts (`mixing`), and makes the output (`join`).

    Parameters
    ----------
    shapes, weights, seed
        As for `Mechanism`.
    embed_dim : int
        Width of x.
    chunk_size : int
        Tokens in a chunk. Any number gives the same output up to rounding.
    """

    one_sequence_only = True
    mixing_formula: ClassVar[str]
    block_size: ClassVar[int] = 512

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        weights: Arrays | None,
        seed: Whole,
        embed_dim: Size,
        chunk_size: Size,
    ) -> None:
        self.embed_dim, self.chunk_size = embed_dim, chunk_size
        super().__init__(shapes, weights, seed)

    @abstractmethod
    def project(self, x: Any, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """The arrays of the recurrence by name, and the gate of the output or None.

        What it reads of earlier tokens is in `state`, where it puts what later tokens will read.
        Tokens are the last axis but one of each. `value` holds what the state is made of:
        `(..., num_heads, n, v_head_dim)`, or `(..., n, channels)` where each channel is a head.
        """

    @abstractmethod
    def mix(self, inputs: Mapping[str, Any], state: dict[str, Any]) -> Any:
        """The output of the heads, in the shape of `value`; it reads and replaces its `state`."""

    @abstractmethod
    def mixing(self, inputs: Mapping[str, Any]) -> Any:
        """The matrix M `(..., num_heads, n, n)` for which `mix` gives `M @ value`."""

    @abstractmethod
    def join(self, out: Any, gate: Any) -> Any:
        """The output of the mechanism from that of the heads."""

    def __call__(self, x: Rows, /) -> Any:
        """Mix the tokens of `x`.

        Parameters
        ----------
        x : array (..., n, embed_dim)

        Returns
        -------
        array (..., n, width)
            In the library, dtype and device of `x`.

        Raises
        ------
        ShapeError
            `x` has no tokens, or its rows are not of length embed_dim.
        """
        return self.step(x)[0]

    def next_tokens(self, state: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
        """The output of one block of tokens, and the state after them."""
        inputs, gate = self.projected(x, state)
        out = self.join(self.mix(inputs, state), gate)
        state = {name: widened(array) for name, array in state.items()}
        return array_namespace(x).astype(out, x.dtype, copy=False), state

    def projected(self, x: Any, state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """What `project` gives, in the type in which the recurrence runs."""
        inputs, gate = self.project(x, state)
        return {name: widened(array) for name, array in inputs.items()}, gate

    def project_back(self, name: str, rows: Any, gate: Any) -> Any:
        """The gated rows in the type of the gate, which is that of x, through a projection."""
        return self.linear(name, array_namespace(gate).astype(rows, gate.dtype, copy=False))

    def token_mixing(self, x: Rows, /) -> Any:
        """The matrix M `(..., num_heads, n, n)` for which a head gives `M @ value`.

        Values only, without a gradient. O(n^2) memory for each head, of which there is one for
        each channel if channels decay on their own.
        """
        self.check(x)
        look, given = self.detached(), values(x, "x")
        return like(look.mixing(look.projected(given, look.initial_state(given))[0]), x)

    @classmethod
    def _of_module(cls, module: Any, names: Sequence[str], *sizes: Any, **options: Any) -> Self:
        """The mechanism with the weights of those names, compared on random input.

        Parameters
        ----------
        module : module of transformers
            Called with x alone.
        names : sequence of str
            All parameters that it may have, as `named_weights` takes them.
        *sizes, **options
            For the class.
        """
        refuse_other_parameters(module, names, cls.name)
        options["weights"] = named_weights(module, names)
        mechanism = cls(*sizes, **options)
        width = mechanism.embed_dim
        return closest(module, [(cls.name, mechanism)], lambda copied, x: copied(x), width)

    def sequences(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """x for all three, if it is `(..., n, embed_dim)`."""
        self.check(x)
        return super().sequences(x, key, value)

    def steps(self, token: ExplainedToken) -> list[Step]:
        """The recurrence as what it amounts to: a weighted sum over the token and earlier ones."""
        x, row = token.query, token.index
        seen = token.tokens[: row + 1]
        state = self.initial_state(x)
        inputs, gate = self.projected(x, state)
        steps = [
            Step(f"Project, {name}", f"{name} of each token",
                 token_lines(seen, _by_token(array, row)))
            for name, array in inputs.items()
        ]  # fmt: skip
        weights = self.mixing(inputs)[:, row, : row + 1]
        shown = tuple(Line(t, w.tolist()) for t, w in zip(seen, weights.T, strict=True))
        steps.append(
            Step("Token weights, one for each head or channel", self.mixing_formula, shown)
        )
        value = inputs["value"]
        value = value.T[..., None] if value.ndim == 2 else value
        parts = weights[..., None] * value[:, : row + 1, :]
        lines = [
            Line(token, np.ravel(parts[:, j, :]).tolist(), numbers(weights[:, j]) + " * value")
            for j, token in enumerate(seen)
        ]
        total = Line("o", np.ravel(parts.sum(1)).tolist(), "their sum")
        steps.append(Step("Weighted sum", "o = sum_j M[i,j] value[j]", (*lines, total)))
        output = self.join(self.mix(inputs, state), gate)[row]
        gated = () if gate is None else (Line("gate", np.ravel(gate[row]).tolist()),)
        steps.append(Step("Output", self.formula, (*gated, Line("out", output.tolist()))))
        return steps

    def check(self, x: Any) -> None:
        """Refuse an x that is not `(..., n, embed_dim)` with a token or more.

        Raises
        ------
        ShapeError
            With the shape that was given.
        """
        array_namespace(x)
        if x.ndim < 2 or x.shape[-1] != self.embed_dim or x.shape[-2] == 0:
            raise ShapeError(
                f"{self.name} reads (..., n, {self.embed_dim}) with a token or more.",
                [("x", str(tuple(x.shape)))],
                f"Pass x as (..., n, {self.embed_dim}).",
            )


def head_dim_of(width: int, num_heads: int, head_dim: int | None) -> int:
    """`head_dim` if it is given, else `width // num_heads`.

    Raises
    ------
    ArgumentError
        `width` cannot be divided into `num_heads` heads.
    """
    if head_dim is None and width % num_heads:
        raise ArgumentError(
            f"a width of {width} cannot be divided into num_heads={num_heads} heads.",
            action="Choose a multiple of num_heads, or pass head_dim.",
        )
    return width // num_heads if head_dim is None else head_dim


def token_shift(x: Any, before: Any) -> tuple[Any, Any]:
    """Each row of `x` replaced by the row before it, and the first by `before` (..., 1, width).

    The last row comes with them, as `before` of the rows that follow. It is a copy, because a
    caller who decodes in one buffer writes the next token over it.

    Examples
    --------
    >>> shifted, before = token_shift(np.array([[1.0], [2.0], [3.0]]), np.zeros((1, 1)))
    >>> shifted.T, before
    (array([[0., 1., 2.]]), array([[3.]]))
    """
    xp = array_namespace(x)
    shifted = xp.concat([xp.astype(before, x.dtype, copy=False), x[..., :-1, :]], axis=-2)
    return shifted, xp.astype(x[..., -1:, :], x.dtype, copy=True)


def repeated_heads(heads: Any, times: int) -> Any:
    """`(..., h, n, d)` as `(..., h * times, n, d)`, each head `times` times in a row.

    Examples
    --------
    >>> repeated_heads(np.array([[[1.0]], [[2.0]]]), 2).ravel()
    array([1., 1., 2., 2.])
    """
    return heads if times == 1 else array_namespace(heads).repeat(heads, times, axis=-3)


def grouped_heads(heads: Any, groups: int) -> Any:
    """`(..., h, n, d)` as `(..., groups, h / groups, n, d)`.

    Examples
    --------
    >>> grouped_heads(np.zeros((6, 5, 4)), 2).shape
    (2, 3, 5, 4)
    """
    shape = (*heads.shape[:-3], groups, heads.shape[-3] // groups, *heads.shape[-2:])
    return array_namespace(heads).reshape(heads, shape)


def activation_cost(name: str, count: int) -> Ledger:
    """The ledger of `count` numbers through sigmoid, silu or softplus.

    Counted as one exponential, one addition, one division and one multiplication each.
    """
    return step(name, exp=count, add=count, divide=count, multiply=count)


def _by_token(array: Any, row: int) -> Any:
    """`(..., n, d)` as rows for the tokens up to `row`, heads side by side."""
    return np.moveaxis(array[..., : row + 1, :], -2, 0).reshape(row + 1, -1)
