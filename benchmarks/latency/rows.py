"""Which variants are called: every one of the library, compositions of models, and a user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.problems.moved import Builder, Shape
from qkv.variants import (
    ALL,
    ALiBi,
    Bias,
    Causal,
    Prefix,
    RelativeBias,
    RoPE,
    ScoreMod,
    Sinks,
    SlidingWindow,
    Softcap,
)

__all__ = ["BASE", "CALL", "LAYERS", "STEPS", "STEP_STARTS", "Row", "row_of", "rows", "step"]

Variants: TypeAlias = Callable[[Shape, np.random.Generator], tuple[Any, ...]]

CALL = Shape((1,), 8, 8, 64, 64, 64, 64)
"""The call whose cost is measured: 64 tokens, 8 heads, head_dim 64."""

STEP_STARTS = (100, 300, 500, 700, 980)
STEPS = 10
"""Decoding steps are taken from each of these numbers of keys on, so many each."""

LAYERS = 4
"""Calls of one decoding step, with keys and values of their own."""


@dataclass(frozen=True)
class Row:
    """Variants under a name.

    Attributes
    ----------
    name : str
    variants : callable (shape, rng) -> tuple
        They fit a problem of that shape.
    """

    name: str
    variants: Variants


class OwnDecay:
    """A variant as a user writes one: a score that falls with distance, and a mask.

    It declares how it is read, without which every call is checked.
    """

    roles: ClassVar = {"decay": "value"}
    positions_only: ClassVar[bool] = True
    uses_batch_index: ClassVar[bool] = False

    def __init__(self, decay: NDArray[Any]) -> None:
        self.decay = decay

    def lower(self, builder: Builder) -> None:
        decay = builder.per_head(self.decay, "decay")
        builder.mask(builder.kv_pos <= builder.q_pos)
        builder.mod(builder.score - decay * abs(builder.q_pos - builder.kv_pos))


def _own_score(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
    return score - 0.1 * np.sqrt(abs(q_pos - kv_pos))


def _example(variant: Any) -> Variants:
    return lambda shape, rng: (variant.examples(shape, rng)[0],)


def _heads(shape: Shape, rng: np.random.Generator) -> NDArray[np.float32]:
    return rng.normal(size=shape.num_heads).astype(np.float32)


BASE = Row("Causal", _example(Causal))
"""Every other row is held against this one."""


@lru_cache(maxsize=1)
def rows() -> tuple[Row, ...]:
    """Every row, `BASE` first.

    Examples
    --------
    >>> len({row.name for row in rows()}) == len(rows())
    True
    """
    own = ScoreMod(_own_score)
    compositions: dict[str, Variants] = {
        "no variant": lambda shape, rng: (),
        "Causal, ALiBi": lambda shape, rng: (Causal(), ALiBi()),
        "Causal, Softcap": lambda shape, rng: (Causal(), Softcap(30.0)),
        "Causal, window": lambda shape, rng: (SlidingWindow(31, 0),),
        "Causal, Sinks": lambda shape, rng: (Causal(), Sinks(_heads(shape, rng))),
        "Causal, RoPE": lambda shape, rng: (RoPE(), Causal()),
        "RoPE, window, Sinks": lambda shape, rng: (
            RoPE(), SlidingWindow(31, 0), Sinks(_heads(shape, rng)),
        ),
        "Causal | Prefix": lambda shape, rng: (Causal() | Prefix(16),),
        "left padding": lambda shape, rng: (Causal(), ~Prefix(np.full(shape.batch_shape, 7))),
        "T5 decoder": lambda shape, rng: (
            RelativeBias(
                rng.normal(size=(32, shape.num_heads)).astype(np.float32), bidirectional=False
            ),
            Causal(),
        ),
        "Causal, Bias": lambda shape, rng: (
            Causal(), Bias(rng.normal(size=shape.scores).astype(np.float32)),
        ),
        "a user's score mod": lambda shape, rng: (own, Causal()),
        "a user's variant": lambda shape, rng: (OwnDecay(abs(_heads(shape, rng))),),
        "a boolean array": lambda shape, rng: (rng.random((shape.q_len, shape.kv_len)) < 0.5,),
    }  # fmt: skip
    examples = (Row(variant.__name__, _example(variant)) for variant in ALL)
    others = (Row(name, variants) for name, variants in compositions.items())
    return (BASE, *(row for row in (*examples, *others) if row.name != BASE.name))


def row_of(name: str) -> Row:
    """The row of exactly this name."""
    return next(row for row in rows() if row.name == name)


def step(kv_len: int) -> Shape:
    """One query row, which comes after all keys but its own."""
    return Shape((1,), 8, 8, 1, kv_len, 64, 64)
