"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv.errors import ArgumentError
from qkv.problem.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import Role, Variant


@dataclass(frozen=True, eq=False, repr=False)
class RoPE(Variant):
    """Rotate pairs of entries of each query and key row by an angle that grows with position.

    Parameters
    ----------
    base : float
        Pair i of n turns by `position * base ** (-i / n)` radians.
    layout : "half_split" or "interleaved"
        Pair i is entries (i, i + n) (GPT-NeoX, Llama in Hugging Face), or (2 i, 2 i + 1) (the
        paper, GPT-J).
    rotary_dim : int, optional
        Number of leading entries to rotate, even; all by default.
    inv_freq : array (rotary_dim / 2,), optional
        Radians per position of each pair, instead of `base`; scaled variants (Llama 3, YaRN)
        pass theirs.

    Notes
    -----
    `R(q_i) . R(k_j)` depends on `q_pos - kv_pos` alone. Cost: one pass over query and key. Source:
    Su et al., "RoFormer" (2021), equation 15.
    """

    roles: ClassVar[Mapping[str, Role]] = {
        "base": "static",
        "layout": "static",
        "rotary_dim": "static",
        "inv_freq": "value",
    }
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True
    constant_fields: ClassVar[tuple[str, ...]] = ("inv_freq",)

    base: float = 10000.0
    layout: Literal["half_split", "interleaved"] = "half_split"
    rotary_dim: int | None = None
    inv_freq: ArrayLike | None = None

    def __post_init__(self) -> None:
        if self.layout not in ("half_split", "interleaved"):
            raise ArgumentError(
                f"RoPE layout={self.layout!r} is not known.",
                action="Use 'half_split' (Hugging Face Llama) or 'interleaved' (GPT-J).",
            )
        if not self.base > 0:
            raise ArgumentError(
                f"RoPE base={self.base!r} is not positive.",
                action="Pass the model's rope_theta, as in RoPE(base=10000.0).",
            )

    def frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """Radians per position of each pair."""
        if self.inv_freq is not None:
            given = np.asarray(self.inv_freq, np.float64)
            if given.ndim != 1 or (
                self.rotary_dim is not None and self.rotary_dim != 2 * len(given)
            ):
                raise ArgumentError(
                    f"inv_freq has shape {given.shape}; rotary_dim={self.rotary_dim}.",
                    action="Pass one frequency for each pair: (rotary_dim / 2,).",
                )
            return given
        dim = head_dim if self.rotary_dim is None else self.rotary_dim
        if dim % 2 or dim < 0:
            raise ArgumentError(
                f"RoPE rotates pairs; {dim} entries are not a whole number of pairs.",
                action="Pass an even rotary_dim.",
            )
        return np.asarray(self.base ** (-np.arange(dim // 2) / max(dim // 2, 1)), np.float64)

    def lower(self, builder: Builder) -> None:
        builder.rotate(self.layout, self.frequencies(builder.shape.head_dim))

    def naive_rows(self, dense: Dense) -> None:
        frequencies = self.frequencies(dense.query.shape[1])
        dense.query = self._rotated(dense.query, dense.q_pos, frequencies)
        dense.key = self._rotated(dense.key, dense.kv_pos, frequencies)

    def _rotated(
        self, rows: NDArray[Any], positions: NDArray[Any], frequencies: NDArray[Any]
    ) -> NDArray[Any]:
        out = rows.astype(np.float64)
        n = len(frequencies)
        for row, position in enumerate(positions):
            for i, frequency in enumerate(frequencies):
                a, b = (i, i + n) if self.layout == "half_split" else (2 * i, 2 * i + 1)
                turn = np.exp(1j * float(position) * frequency)
                z = complex(rows[row, a], rows[row, b]) * turn
                out[row, a], out[row, b] = z.real, z.imag
        return out

    def naive(self, dense: Dense) -> None:
        """Nothing is left to do after the product."""

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[RoPE]:
        if shape.head_dim < 2:
            return (cls(rotary_dim=0),)
        even = shape.head_dim // 2 * 2
        half = max(2, shape.head_dim // 4 * 2)
        return (
            cls(rotary_dim=even),
            cls(layout="interleaved", rotary_dim=even),
            cls(base=500.0, rotary_dim=half),
        )
