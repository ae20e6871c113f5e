"""Score mods: any function of the score, batch, head and positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from qkv._dynamo import is_reading
from qkv.errors import ArgumentError
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.problem.language.expressions import Var, as_node, text
from qkv.problem.language.reading import Reading, explained, signature_unless
from qkv.problem.language.replaced_values import with_replaced_values
from qkv.problem.language.symbols import Expr
from qkv.variants.base import Expression, FunctionText, Opaque, ReadFunction, Variant
from qkv.variants.captured import CapturedFunction, captured_values, is_plain, with_arrays


@dataclass(frozen=True, eq=False, repr=False)
class ScoreMod(Variant):
    """`score = fn(score, batch, head, q_pos, kv_pos)`.

    Parameters
    ----------
    fn : callable
        Written with operators and NumPy functions (np.where, np.exp, np.log, np.sqrt, np.tanh,
        np.minimum, np.maximum, np.clip, np.floor, np.abs); it is called once, with symbols.
        `batch` is the flat leading index. Arrays in its closure, defaults or globals may be indexed
        with symbols; they are read at call time. A result of exactly -inf forbids the pair.

    Raises
    ------
    ArgumentError
        If fn branches on a symbol, or uses what the language does not have.
    ShapeError
        If an array index could leave the array; np.clip proves it inside.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> decay = qkv.ScoreMod(lambda s, b, h, q, k: s - 0.1 * abs(q - k))
    >>> x = np.eye(2)
    >>> bool(np.isfinite(qkv.attention(x, x, x, decay)).all())
    True
    """

    fn: Callable[..., Any]

    positions_only: ClassVar[bool] = True
    read_by_backend: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ArgumentError(
                f"ScoreMod takes a function, not {type(self.fn).__name__}.",
                action="Pass fn(score, batch, head, q_pos, kv_pos).",
            )
        if is_reading():
            return  # The call checks it.
        signature = signature_unless(self.fn, 5)
        if signature is not None:
            is_mask = signature_unless(self.fn, 4) is None
            raise ArgumentError(
                f"the score mod takes {signature}, not five arguments.",
                action="Pass qkv.Mask(fn) if fn(batch, head, q_pos, kv_pos) says which pairs may "
                "attend; a score mod is fn(score, batch, head, q_pos, kv_pos)."
                if is_mask
                else "Write fn(score, batch, head, q_pos, kv_pos), whichever of them it uses.",
            )

    def __repr__(self) -> str:
        return f"ScoreMod({getattr(self.fn, '__name__', type(self.fn).__name__)})"

    def tree_flatten(self) -> tuple[Opaque, list[Any]]:
        """The function without its arrays, and these arrays.

        A function that reads attributes of objects is read now, since these may change.
        """
        arrays: list[Any] = []
        constants = captured_values(self.fn, arrays)
        if constants is not None or not is_plain(self.fn):
            return CapturedFunction(self.fn, constants, _ARGUMENTS), arrays
        reading = Reading(with_replaced_values)
        with explained(self.fn):
            result = reading.read(self.fn, *[Expr(Var(name)) for name in _ARGUMENTS])
        _check_result(result)
        return Expression(as_node(result)), reading.arrays

    @classmethod
    def tree_unflatten(cls, function: Opaque, arrays: Sequence[Any]) -> ScoreMod:
        """The score mod whose function reads these arrays."""
        if isinstance(function, Expression):
            return ExpressedScoreMod(function, tuple(arrays))
        made = object.__new__(cls)
        object.__setattr__(made, "fn", with_arrays(function, arrays))
        return made

    def with_functions(self, read: ReadFunction) -> Any:
        """See `qkv.variants.base.ReadFunction`."""
        text_and_arrays = read(self.fn, _ARGUMENTS)
        return None if text_and_arrays is None else FunctionText(*text_and_arrays, is_mask=False)

    def lower(self, builder: Builder) -> None:
        tables: dict[int, Any] = {}

        def symbol(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                if id(value) not in tables:
                    table = builder.table(value, "closure array")
                    tables[id(value)] = table if value.ndim else table[()]
                return tables[id(value)]
            if isinstance(value, np.generic):
                return builder.scalar(value, "closure value")
            return value

        with explained(self.fn):
            result = with_replaced_values(self.fn, symbol)(
                builder.score, builder.batch, builder.head, builder.q_pos, builder.kv_pos
            )
        _check_result(result)
        builder.mod(result)

    def naive(self, dense: Dense) -> None:
        with np.errstate(all="ignore"):
            for i, row in enumerate(dense.scores):
                q_pos = int(dense.q_pos[i])
                row[:] = self.fn(row.copy(), dense.batch, dense.head, q_pos, dense.kv_pos)
        dense.allowed &= ~np.isneginf(dense.scores)

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[ScoreMod]:
        per_head = rng.normal(size=shape.num_heads)
        by_distance = rng.normal(size=16).astype(np.float32)

        def curve(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
            # Smooth, since rounding would choose the side of a bend, and so the derivative.
            return np.exp(-0.5 * score * score) * per_head[head] + 0.1 * (batch + 1)

        def from_table(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
            near = by_distance[np.clip(q_pos - kv_pos, 0, 15)]
            return np.where((q_pos - kv_pos) % 3 == 1, -np.inf, score + near)

        return (cls(curve), cls(from_table))


_ARGUMENTS = ("score", "batch", "head", "q_pos", "kv_pos")


def _check_result(result: Any) -> None:
    if not isinstance(result, Expr | int | float | np.generic):
        raise ArgumentError(
            f"the score mod returned {type(result).__name__}, not a score.",
            action="Return an expression of score, batch, head, q_pos and kv_pos.",
        )


class ExpressedScoreMod(ScoreMod):
    """A score mod as an expression and its arrays."""

    read_by_backend: ClassVar[bool] = True

    expression: Expression
    arrays: tuple[Any, ...]

    def __init__(self, expression: Expression, arrays: tuple[Any, ...]) -> None:
        object.__setattr__(self, "expression", expression)
        object.__setattr__(self, "arrays", arrays)

    def __repr__(self) -> str:
        return f"ScoreMod({text(self.expression.thing)})"

    def tree_flatten(self) -> tuple[Opaque, list[Any]]:
        return self.expression, list(self.arrays)

    def lower(self, builder: Builder) -> None:
        builder.mod(self.expression.on_tables(builder, self.arrays))
