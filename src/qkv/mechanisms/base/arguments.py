"""What callers pass to mechanisms: sizes, options, sequences and names of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qkv.declarations import shown
from qkv.errors import ArgumentError, ShapeError

__all__ = ["all_three", "one_sequence", "refuse_options", "token_names"]


def all_three(x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Query, key and value: the key is the query unless given, and the value is the key."""
    key = x if key is None else key
    return x, key, key if value is None else value


def one_sequence(*arrays: Any) -> None:
    """Refuse arrays with leading dimensions: an explanation is of one sequence.

    Raises
    ------
    ShapeError
        An array is not (n, width).
    """
    for array in arrays:
        if array.ndim != 2:
            raise ShapeError(
                f"explain shows one sequence (n, embed_dim); x has shape {tuple(array.shape)}.",
                action="Pass one of them, as in explain(x[0]).",
            )


def refuse_options(mechanism: str, options: Mapping[str, Any], *names: str) -> None:
    """Refuse options of `ProjectedAttention` that mean nothing in this mechanism.

    Raises
    ------
    ArgumentError
        Naming the first that is given.
    """
    for name in names:
        given = options.get(name)
        if given is not None and given is not False:
            raise ArgumentError(
                f"{mechanism} does not take {name}: it has no n x n scores to change.",
                action=f"Leave {name} out.",
            )


def token_names(tokens: Sequence[str] | None, n: int) -> tuple[str, ...]:
    """The names of `n` tokens, their numbers by default.

    Raises
    ------
    ArgumentError
        There are not `n` of them.
    """
    if tokens is None:
        return tuple(map(str, range(n)))
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or len(tokens) != n:
        raise ArgumentError(
            f"tokens={shown(tokens)} are not names of the {n} rows of x.",
            action="Pass one for each row.",
        )
    return tuple(tokens)
