"""What mechanisms share that keep a state of fixed size in place of the past."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from qkv.errors import ArgumentError, ShapeError
from qkv.inspection.explain import selected_indices
from qkv.ledger import Count, Ledger, step
from qkv.mechanisms.base.attention import one_sequence
from qkv.mechanisms.base.attention_steps import token_lines
from qkv.mechanisms.base.explanation import Explanation, Line, Step, numbers
from qkv.mechanisms.base.mechanism import Mechanism, positive_integers, token_names
from qkv.mechanisms.base.namespace import array_namespace, like, values
from qkv.mechanisms.base.operations import traffic

__all__ = ["RecurrentMechanism", "activation_cost", "head_dim_of", "repeated_heads", "token_shift"]


class RecurrentMechanism(Mechanism):
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

    mixing_formula: ClassVar[str]

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        weights: Mapping[str, Any] | None,
        seed: int,
        embed_dim: int,
        chunk_size: int,
    ) -> None:
        positive_integers(embed_dim=embed_dim, chunk_size=chunk_size)
        self.embed_dim, self.chunk_size = embed_dim, chunk_size
        super().__init__(shapes, weights, seed)

    @abstractmethod
    def project(self, x: Any) -> tuple[dict[str, Any], Any]:
        """The arrays of the recurrence by name, and the gate of the output or None.

        Tokens are the last axis but one of each. `value` holds what the state is made of:
        `(..., num_heads, n, v_head_dim)`, or `(..., n, channels)` where each channel is a head.
        """

    @abstractmethod
    def mix(self, inputs: Mapping[str, Any]) -> Any:
        """The output of the heads, in the shape of `value`."""

    @abstractmethod
    def mixing(self, inputs: Mapping[str, Any]) -> Any:
        """The matrix M `(..., num_heads, n, n)` for which `mix` gives `M @ value`."""

    @abstractmethod
    def join(self, out: Any, gate: Any) -> Any:
        """The output of the mechanism from that of the heads."""

    def __call__(self, x: Any, /) -> Any:
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
        self.check(x)
        inputs, gate = self.project(x)
        return self.join(self.mix(inputs), gate)

    def token_mixing(self, x: Any, /) -> Any:
        """The matrix M `(..., num_heads, n, n)` for which a head gives `M @ value`.

        Values only, without a gradient. O(n^2) memory for each head, of which there is one for
        each channel if channels decay on their own.
        """
        self.check(x)
        look = self.detached()
        return like(look.mixing(look.project(values(x, "x"))[0]), x)

    def explain(
        self, x: Any, /, tokens: Sequence[str] | None = None, index: int = 0
    ) -> Explanation:
        """The calculation of one token of `x` (n, embed_dim), step by step.

        The recurrence is shown as what it amounts to: a weighted sum over this token and those
        before it.

        Parameters
        ----------
        x : array (n, embed_dim)
        tokens : sequence of str (n,), optional
            Names of the rows; their numbers by default.
        index : int
            The token whose output is calculated, the first by default.
        """
        self.check(x)
        one_sequence(x)
        look = self.detached()
        names = token_names(tokens, x.shape[0])
        row = int(selected_indices(index, len(names), "index", "tokens")[0])
        seen = names[: row + 1]
        inputs, gate = look.project(values(x, "x"))
        steps = [
            Step(
                f"Project, {name}",
                f"{name} of each token",
                token_lines(seen, _by_token(array, row)),
            )
            for name, array in inputs.items()
        ]
        weights = look.mixing(inputs)[:, row, : row + 1]
        shown = tuple(Line(t, w.tolist()) for t, w in zip(seen, weights.T, strict=True))
        steps.append(Step("Token weights, one for each head", look.mixing_formula, shown))
        value = inputs["value"]
        value = value.T[..., None] if value.ndim == 2 else value
        parts = weights[..., None] * value[:, : row + 1, :]
        lines = [
            Line(token, np.ravel(parts[:, j, :]).tolist(), numbers(weights[:, j]) + " * value")
            for j, token in enumerate(seen)
        ]
        total = Line("o", np.ravel(parts.sum(1)).tolist(), "their sum")
        steps.append(Step("Weighted sum", "o = sum_j M[i,j] value[j]", (*lines, total)))
        output = look.join(look.mix(inputs), gate)[row]
        gated = () if gate is None else (Line("gate", np.ravel(gate[row]).tolist()),)
        steps.append(Step("Output", look.formula, (*gated, Line("out", output.tolist()))))
        return self.explanation(steps, names[row])

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

    def with_traffic(self, found: Ledger, tokens: int, width: int, dtype: str) -> Ledger:
        """Add the parameters that no product counts, and the bytes of x, weights and output.

        Parameters
        ----------
        found : Ledger
            Operations, with the parameters of projections.
        tokens : int
            Rows of x, over the whole batch.
        width : int
            Length of a row of the output.
        dtype : str
        """
        found += Ledger(parameters=Count(1) * (self.parameters - found.parameters))
        read = tokens * self.embed_dim + found.parameters
        return found + traffic(read, tokens * width, dtype)


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


def token_shift(x: Any) -> Any:
    """Each row replaced by the row before it, and the first by zeros.

    Examples
    --------
    >>> token_shift(np.array([[1.0], [2.0], [3.0]])).T
    array([[0., 1., 2.]])
    """
    xp = array_namespace(x)
    return xp.concat([xp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)


def repeated_heads(heads: Any, times: int) -> Any:
    """`(..., h, n, d)` as `(..., h * times, n, d)`, each head `times` times in a row.

    Examples
    --------
    >>> repeated_heads(np.array([[[1.0]], [[2.0]]]), 2).ravel()
    array([1., 1., 2., 2.])
    """
    return heads if times == 1 else array_namespace(heads).repeat(heads, times, axis=-3)


def activation_cost(name: str, count: int) -> Ledger:
    """The ledger of `count` numbers through sigmoid, silu or softplus.

    Counted as one exponential, one addition, one division and one multiplication each.
    """
    return step(name, exp=count, add=count, divide=count, multiply=count)


def _by_token(array: Any, row: int) -> Any:
    """`(..., n, d)` as rows for the tokens up to `row`, heads side by side."""
    return np.moveaxis(array[..., : row + 1, :], -2, 0).reshape(row + 1, -1)
