"""The language of score mods and masks as Python sees it.

An `Expr` has Python's operators and answers NumPy's functions, so that a score mod reads like the
formula in its paper, and builds a node of `qkv.problem.language.expressions`:

    np.where(q_pos >= kv_pos, cap * np.tanh(score / cap), -np.inf)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from qkv.errors import ArgumentError
from qkv.problem.language import score_functions as functions
from qkv.problem.language.expressions import (
    Const,
    Kind,
    Load,
    Node,
    as_node,
    constant,
    operation,
    text,
)

_Operator: TypeAlias = Callable[[Any, Any], "Expr"]


def _operators(name: str) -> tuple[_Operator, _Operator]:
    """The operator of an operation, and the one whose left operand is the other one."""

    def of_left(self: Expr, other: Any) -> Expr:
        return build(name, self, other)

    def of_right(self: Expr, other: Any) -> Expr:
        return build(name, other, self)

    return of_left, of_right


class Expr:
    """A node with Python's operators; what score mods and `lower` compute with."""

    __hash__ = None  # type: ignore[assignment]  # Python's way to forbid hashing
    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return f"Expr({text(self.node)})"

    def __bool__(self) -> bool:
        raise ArgumentError(
            "a condition on positions or scores has no single truth value.",
            [("condition", text(self.node))],
            "Write np.where(condition, a, b) instead of if, and &, |, ~ instead of and, or, not.",
        )

    def _refuse_number(self) -> Any:
        raise ArgumentError(
            "a position or score has no single value here.",
            [("expression", text(self.node))],
            "Use operators and np.where, np.exp, np.tanh, ... rather than float(), int() or math.",
        )

    __float__ = __int__ = __len__ = __iter__ = _refuse_number

    def __index__(self) -> Any:
        raise ArgumentError(
            "a position or score is used as an index of a list, or where Python wants an integer.",
            [("expression", text(self.node))],
            "Make a list an array outside of the function, as in w = np.array(values), and index "
            "that; compute with operators and functions of NumPy or torch, not with range() or "
            "math.",
        )

    def __pow__(self, exponent: Any) -> Any:
        return Expr(functions.power(self, exponent))

    def __rpow__(self, base: Any) -> Any:
        return Expr(functions.power(base, self))

    def _refuse_operator(self, *_: Any) -> Any:
        raise ArgumentError(
            "an operator is not part of the expression language.",
            [("expression", text(self.node)),
             ("has", "+ - * / // % ** abs, comparisons, & | ~, and NumPy's functions")],
            "Write it with these.",
        )  # fmt: skip

    __matmul__ = __rmatmul__ = __divmod__ = __rdivmod__ = _refuse_operator
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __round__ = _refuse_operator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and NumPy look for optional methods of any object.
            raise AttributeError(name)
        if name in functions.NAMES:  # Methods of torch's tensors.
            return partial(_called, name, self)
        if name == "device":  # FlexAttention's noop_mask hands it to `new_ones`.
            return None
        raise ArgumentError(
            f".{name} is not part of the expression language.",
            [("expression", text(self.node))],
            "Use operators and NumPy's functions of positions and scores.",
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            return NotImplemented
        if ufunc is np.sign and as_node(inputs[0]).kind == "float":  # NaN, where torch has 0
            return _called("where", inputs[0] == inputs[0], _called("sign", *inputs), inputs[0])
        return _called(ufunc.__name__, *inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _called(func.__name__, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """torch's functions and operators, by their names."""
        return _called(func.__name__, *args, **(kwargs or {}))

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("sub")
    __mul__, __rmul__ = _operators("mul")
    __truediv__, __rtruediv__ = _operators("div")
    __floordiv__, __rfloordiv__ = _operators("floordiv")
    __mod__, __rmod__ = _operators("mod")
    __and__, __rand__ = _operators("and")
    __or__, __ror__ = _operators("or")
    __lt__, __gt__ = _operators("lt")
    __le__, __ge__ = _operators("le")

    # `object` declares that comparisons return bool; here they return expressions.
    def __eq__(self, other: Any) -> Expr:  # type: ignore[override]
        return build("eq", self, other)

    def __ne__(self, other: Any) -> Expr:  # type: ignore[override]
        return build("ne", self, other)

    def __xor__(self, other: Any) -> Expr:
        return _called("logical_xor", self, other)

    def __rxor__(self, other: Any) -> Expr:
        return _called("logical_xor", other, self)

    def __neg__(self) -> Expr:
        return build("neg", self)

    def __abs__(self) -> Expr:
        return build("abs", self)

    def __invert__(self) -> Expr:
        return build("not", self)


def _called(name: str, *args: Any, **kwargs: Any) -> Expr:
    """A function by the name that NumPy or torch has for it."""
    return Expr(as_node(functions.call(name, *args, **kwargs)))


def build(name: str, *args: Any) -> Expr:
    """`operation` on anything that `as_node` takes."""
    return Expr(operation(name, *map(as_node, args)))


def whole_array(shape: tuple[int, ...]) -> ArgumentError:
    """The error for an array that is used whole, where entries are what scores are made of."""
    entry = f"w[{', '.join(['0'] * len(shape))}]"
    return ArgumentError(
        f"an array of shape {shape} is used whole in a function of scores and positions.",
        action=f"Write {entry} for its only entry."
        if all(size == 1 for size in shape)
        else "Index it first, with one position for each dimension, and compute with the entry, as "
        "in w[head] * 2, np.exp(w[head]) or torch.exp(w[head]).",
    )


class _Whole:
    """What an array refuses while it is not indexed."""

    __slots__ = ()
    shape: Any

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise whole_array(self.shape)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _refuse
    __matmul__ = __rmatmul__ = __divmod__ = __rdivmod__ = __and__ = __rand__ = __or__ = _refuse
    __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refuse
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __lt__ = __le__ = __gt__ = _refuse
    __ge__ = __eq__ = __ne__ = _refuse
    # Without these, an array of one false entry would be true, as everything with a length is.
    __bool__ = __float__ = __int__ = __index__ = _refuse
    __array_ufunc__ = __array_function__ = as_number = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise whole_array(next(arg.shape for arg in args if isinstance(arg, _Whole)))

    def __getattr__(self, name: str) -> Any:
        # What others look for in any object, to find out what it is.
        if name.startswith("__") or name in ("node", "dtype"):
            raise AttributeError(name)
        raise whole_array(self.shape)


class Table(_Whole):
    """An array inside the language: indexed by expressions, one integer for each dimension."""

    __hash__ = None  # type: ignore[assignment]  # Python's way to forbid hashing
    __slots__ = ("kind", "name", "shape")

    shape: tuple[int, ...]

    def __init__(self, name: str, kind: Kind, shape: tuple[int, ...]) -> None:
        self.name = name
        self.kind = kind
        self.shape = shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        # By `__getitem__` alone, which has no last index, Python would never come to an end.
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if 0 < len(indices) < len(self.shape):
            return _Row(self, indices)
        return self.entry(*indices)

    def entry(self, *indices: Any) -> Expr:
        """The entry with one index for each dimension."""
        if len(indices) != len(self.shape):
            raise ArgumentError(
                f"a table of {self.ndim} dimensions was read with {len(indices)} indices.",
                [("table", f"{self.name} {self.shape}")],
                "Give one integer index for each dimension.",
            )
        nodes = []
        for i, size in zip(indices, self.shape, strict=True):
            node = as_node(i)
            if node.kind != "int":
                raise ArgumentError(
                    f"a table index is {node.kind}, not an integer.",
                    [("table", self.name), ("index", text(node))],
                    "Use np.floor(x), which gives an integer.",
                )
            if isinstance(node, Const) and -size <= node.value < 0:
                node = constant(node.value + size)
            nodes.append(node)
        return Expr(Load(self.name, self.kind, tuple(nodes)))


class _Row(_Whole):
    """Part of a table: what is left when fewer indices were given than it has dimensions."""

    __hash__ = None  # type: ignore[assignment]  # Python's way to forbid hashing
    __slots__ = ("_indices", "_table")

    def __init__(self, table: Table, indices: tuple[Any, ...]) -> None:
        self._table, self._indices = table, indices

    @property
    def shape(self) -> tuple[int, ...]:
        rest: tuple[int, ...] = self._table.shape[len(self._indices) :]
        return rest

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        # By `__getitem__` alone, which has no last index, Python would never come to an end.
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return self._table[(*self._indices, *more)]
