"""Mechanisms that decode from a state whose size does not depend on the number of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from qkv.arguments.declarations import shown
from qkv.arrays import has_shape
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.mechanisms.base.arrays.namespace import array_namespace, like, widened
from qkv.mechanisms.base.arrays.rows import Rows
from qkv.mechanisms.base.mechanism import Mechanism
from qkv.mechanisms.linear_time.recurrences.chunks import in_chunks

__all__ = ["StatefulMechanism"]


class StatefulMechanism(Mechanism):
    """A mechanism that reads tokens in order and keeps a state of what it has read."""

    block_size: ClassVar[int]
    """Tokens that are computed at once, so that they need little memory and stay in the caches."""

    @property
    @abstractmethod
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the arrays of the state, for one sequence."""

    def initial_state(self, x: Rows) -> dict[str, Any]:
        """The state before the first token of `x`: zeros, in its library and on its device.

        It is in the dtype of `x`, in float32 for types of 16 bits, whose sums of products overflow
        or lose what is small.
        """
        shapes, wide = self.state_shapes.items(), widened(x)
        return {name: like(np.zeros((*x.shape[:-2], *shape)), wide) for name, shape in shapes}

    @abstractmethod
    def check(self, x: Any) -> None:
        """Refuse an x whose tokens `step` cannot read."""

    @abstractmethod
    def next_tokens(self, state: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
        """The output of one block of tokens, and the state after them."""

    def step(self, x: Rows, state: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Mix the next tokens of a sequence: one when decoding, several for a prompt.

        Parameters
        ----------
        x : array (..., n, embed_dim)
        state : mapping of str to array, optional
            What the last step returned; a sequence begins if there is none.

        Returns
        -------
        output : array (..., n, width)
            What a call with all tokens so far gives for these.
        state : dict of str to array
            Of a size that does not depend on how many tokens there were.

        Raises
        ------
        UnsupportedError
            The mechanism is not causal.
        ArgumentError, ShapeError
            The state is not one of this mechanism, or for another batch.

        Examples
        --------
        >>> from qkv.mechanisms import Mamba
        >>> layer, x = Mamba(8), np.eye(8)
        >>> first, state = layer.step(x[:5])
        >>> rest, state = layer.step(x[5:], state)
        >>> bool(np.allclose(np.concatenate([first, rest]), layer(x)))
        True
        """
        self.check(x)
        start = self.initial_state(x) if state is None else self._checked_state(state, x)
        mixed: tuple[Any, dict[str, Any]] = in_chunks(self.next_tokens, [x], start, self.block_size)
        return mixed

    def _checked_state(self, state: Any, x: Any) -> dict[str, Any]:
        """The state as `initial_state` makes it, if it has the right shapes."""
        shapes = {name: (*x.shape[:-2], *shape) for name, shape in self.state_shapes.items()}
        if not isinstance(state, Mapping) or state.keys() != shapes.keys():
            raise ArgumentError(
                f"the state of {self.name} has the entries {', '.join(shapes)}.",
                [("state", shown(list(state) if isinstance(state, Mapping) else state))],
                "Pass what its step returned.",
            )
        for name, shape in shapes.items():
            if not has_shape(state[name]):
                raise DTypeError(
                    f"{name} of the state is {shown(state[name])}, not an array.",
                    action="Pass what its step returned.",
                )
            array_namespace(state[name])
            if tuple(state[name].shape) != shape:
                raise ShapeError(
                    f"{name} of the state has shape {tuple(state[name].shape)}, not {shape}.",
                    [("x", str(tuple(x.shape)))],
                    "Pass what step returned for the tokens before, of the same sequences.",
                )
        wide = widened(x)
        return {name: like(array, wide, name) for name, array in state.items()}
