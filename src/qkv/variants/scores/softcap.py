"""Soft capping of scores with tanh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import numpy as np

from qkv._dynamo import as_constant, is_reading
from qkv.arguments.declarations import shown
from qkv.arguments.readable_checks import is_truth_value
from qkv.errors import ArgumentError
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import HOST_VALUES, Role, Variant


@dataclass(frozen=True, repr=False)
class Softcap(Variant):
    """`cap * tanh(score / cap)`.

    Parameters
    ----------
    cap : float
        Bound on the absolute score, positive; a value, not structure.

    Raises
    ------
    ArgumentError
        If the cap is not a positive number.

    Notes
    -----
    Source: Gemma 2 (2024), section 2, after Bello et al. (2017).

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = 100 * np.eye(2)
    >>> qkv.inspect(x, x, x, qkv.Softcap(1.0)).weights[0].round(3)
    array([0.731, 0.269])
    """

    roles: ClassVar[Mapping[str, Role]] = {"cap": "value"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True
    constant_fields: ClassVar[Mapping[str, str]] = {
        "cap": "learn it in ScoreMod(lambda s, b, h, i, j: cap * np.tanh(s / cap))"
    }

    cap: float

    def __post_init__(self) -> None:
        if not isinstance(self.cap, HOST_VALUES) and is_reading():
            return
        try:
            cap = as_constant(self.cap)
            cap = cap.detach() if hasattr(cap, "detach") else cap
            positive = isfinite(cap) and cap > 0 and not is_truth_value(cap)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            # Torch and JAX tell the value of a number that they trace only when the call runs.
            positive = isinstance(error, TypeError | RuntimeError) and _is_traced(self.cap)
        if not positive:
            raise _not_positive(self.cap)

    def lower(self, builder: Builder) -> None:
        number = float(self.cap)
        if not (isfinite(number) and number > 0):  # It was traced when this was made.
            raise _not_positive(number)
        cap = builder.scalar(number, "cap")
        scaled: object = np.tanh(builder.score / cap)
        builder.mod(cap * scaled)

    def naive(self, dense: Dense) -> None:
        dense.scores = self.cap * np.tanh(dense.scores / self.cap)

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Softcap]:
        return (cls(2.0), cls(50.0))


def _not_positive(cap: object) -> ArgumentError:
    return ArgumentError(
        f"Softcap cap={shown(cap)} is not a positive number.",
        action="Pass the largest absolute score, as in Softcap(50.0).",
    )


def _is_traced(number: object) -> bool:
    is_number = hasattr(number, "dtype") and getattr(number, "shape", None) == ()
    return is_number and not isinstance(number, np.ndarray | np.generic)
