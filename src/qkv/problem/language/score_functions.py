"""Functions of scores and positions, by the names that NumPy and torch have for them.

Each is written with the operations of `qkv.problem.language.expressions`, so that every backend has
it and its derivative.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError
from qkv.problem.language.elementary import (
    build,
    cosine,
    expm1,
    is_whole,
    log1p,
    logarithm,
    sigmoid,
    sine,
    whole_power,
)
from qkv.problem.language.expressions import OPERATIONS, Const, Node, as_node

__all__ = ["ARRAY_AT_POSITION", "NAMES", "call", "power"]

ARRAY_AT_POSITION = "an array is indexed with an expression"
"""The error of a tensor that is indexed with an expression; NumPy has its own for arrays."""
_MAX_POWER = 64
"""The largest exponent that is written as products."""


def power(base: Any, exponent: Any) -> Node:
    """`base ** exponent`: of any base for whole constant exponents, else of bases from 0 on."""
    node, of_base = as_node(exponent), as_node(base)
    for each in (node, of_base):
        if isinstance(each, Const) and not math.isfinite(each.value):
            raise ArgumentError(
                f"a power of {each.value} is not part of the expression language.",
                action="Write np.where(condition, a, b) with the values that it would have.",
            )
    if isinstance(node, Const):
        value = node.value
        if value == 0.5:
            return build("sqrt", base)
        if value == int(value) and abs(value) <= _MAX_POWER:
            product = _product(base, abs(int(value)))
            if isinstance(value, float):
                product = build("mul", product, 1.0)
            return build("div", 1.0, product) if value < 0 else product
        return build("exp", build("mul", exponent, build("log", base)))
    if isinstance(of_base, Const) and of_base.value > 0:
        if node.kind != "float" and is_whole(of_base.value):
            return whole_power(of_base.value, node)
        return build("exp", build("mul", exponent, math.log(of_base.value)))
    raise ArgumentError(
        "a power has an exponent that is not a constant, and a base that is not a positive one.",
        action="Write np.exp(y * np.log(x)) for x ** y with x > 0.",
    )


def _product(base: Any, times: int) -> Node:
    """`base` multiplied with itself, by squares."""
    product: Any = None
    while times:
        if times % 2:
            product = base if product is None else build("mul", product, base)
        times //= 2
        base = build("mul", base, base) if times else base
    return as_node(1) if product is None else as_node(product)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """The larger of x and `min`; of that, the smaller of it and `max`."""
    x = x if min is None else build("max", x, min)
    return x if max is None else build("min", x, max)


def _clip(x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
    """NumPy's `clip`, which has two names for each bound."""
    return _clamp(x, min if a_min is None else a_min, max if a_max is None else a_max)


def _of_numbers(name: str) -> Callable[..., Any]:
    """`fmax` or `fmin`: the larger or smaller of two, the other one if one is NaN."""

    def chosen(x: Any, y: Any) -> Any:
        either = build("where", build("ne", y, y), x, build(name, x, y))
        return build("where", build("ne", x, x), y, either)

    return chosen


def _relu(x: Any, inplace: bool = False) -> Any:
    if inplace:
        raise _in_place("relu")
    return build("max", x, 0)


def _sign(x: Any) -> Any:
    less = build("where", build("lt", x, 0), -1, 0)
    return build("where", build("lt", 0, x), 1, less)


def _turned(name: str) -> Callable[..., Any]:
    return lambda a, b: build(name, b, a)


def _divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """torch's `div`, whose rounding keeps integers integers."""
    if rounding_mode not in (None, "floor", "trunc"):
        raise ArgumentError(
            f"rounding_mode={shown(rounding_mode)} is not known.", action="Use 'floor' or 'trunc'."
        )
    if rounding_mode is None:
        return build("div", x, y)
    if rounding_mode == "trunc":
        negative = build("lt", build("mul", _sign(x), y), 0)
        down = _divide(build("abs", x), build("abs", y), "floor")
        return build("where", negative, build("neg", down), down)
    if as_node(x).kind == as_node(y).kind == "int":
        return build("floordiv", x, y)
    return build("mul", build("floor", build("div", x, y)), 1.0)


def _where(condition: Any, first: Any, second: Any) -> Any:
    return build("where", condition, first, second)


def _where_xor(first: Any, second: Any) -> Any:
    return build("where", first, build("not", second), second)


def _filled(number: int) -> Callable[..., Any]:
    """A tensor of one entry, with which functions of FlexAttention begin."""

    def entry(
        x: Any, *sizes: Any, size: Any = (), dtype: Any = None, device: Any = None,
        requires_grad: bool = False,
    ) -> Any:  # fmt: skip
        shape = np.ravel(sizes or size).astype(int).tolist()
        if shape:
            raise ArgumentError(
                f"a tensor of shape {tuple(shape)} is made inside of a function of positions.",
                action="Make it outside of the function, and index it there with positions.",
            )
        kind = _kind(_type_name(as_node(x) if dtype is None else dtype))
        return bool(number) if kind == "bool" else float(number) if kind == "float" else number

    return entry


def _cast(x: Any, wanted: Any) -> Any:
    """`x` as numbers of a type of NumPy or torch, or of the type of an array or expression."""
    node, name = as_node(x), _type_name(wanted)
    kind = _kind(name)
    if kind == node.kind == "bool" or kind == node.kind == "float":
        return node
    if kind == "bool":
        return build("ne", node, 0)
    if kind == "float":
        return build("mul", node, 1.0)
    if name not in ("int", "int32", "int64"):
        raise ArgumentError(
            f"a score or position is turned into {name}, which cannot hold every position.",
            action="Use a floating type, bool, int32 or int64.",
        )
    if node.kind == "float":
        below = build("neg", build("floor", build("neg", node)))
        return build("where", build("lt", node, 0), below, build("floor", node))
    return build("where", node, 1, 0) if node.kind == "bool" else node


def _kind(name: str) -> str:
    """The kind of numbers that a type of this name has."""
    return "bool" if name == "bool" else "float" if "float" in name else "int"


def _type_name(wanted: Any) -> str:
    """What a type is called, or that of an array; of an expression or table, its kind."""
    kind = getattr(getattr(wanted, "node", wanted), "kind", None)
    if kind in ("bool", "int", "float"):
        return str(kind)
    dtype = getattr(wanted, "dtype", None)
    # Types of JAX have a descriptor in the place of an array's type.
    dtype = wanted if dtype is None or isinstance(wanted, type) else dtype
    name = str(dtype)
    if name.startswith("torch."):
        return name.removeprefix("torch.")
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return name


def _to(
    x: Any, *args: Any, dtype: Any = None, other: Any = None, device: Any = None,
    non_blocking: bool = False, copy: bool = False, memory_format: Any = None,
) -> Any:  # fmt: skip
    """torch's `to`, which takes a type, a device or an array at any place."""
    for wanted in (*args, dtype, other):
        is_array = any(hasattr(wanted, name) for name in ("node", "dtype", "kind"))
        if is_array or str(wanted).startswith("torch."):
            return _cast(x, wanted)
    return x


def _astype(x: Any, dtype: Any, copy: bool = True) -> Any:
    return _cast(x, dtype)


def _to_kind(name: str) -> Callable[..., Any]:
    kind = {"double": "float", "long": "int"}.get(name, name)
    return lambda x, memory_format=None: _cast(x, kind)


def _same(x: Any, memory_format: Any = None) -> Any:
    return x


_DIRECT = {
    "add": "add", "sub": "sub", "subtract": "sub", "mul": "mul", "multiply": "mul",
    "floor_divide": "floordiv", "floordiv": "floordiv", "remainder": "mod", "mod": "mod",
    "minimum": "min", "maximum": "max", "neg": "neg", "negative": "neg",
    "abs": "abs", "absolute": "abs", "fabs": "abs", "lt": "lt", "less": "lt",
    "le": "le", "less_equal": "le", "eq": "eq", "equal": "eq", "ne": "ne", "not_equal": "ne",
    "logical_and": "and", "logical_or": "or", "logical_not": "not", "bitwise_and": "and",
    "bitwise_or": "or", "bitwise_not": "not", "invert": "not", "and": "and", "or": "or",
    "exp": "exp", "log": "log", "sqrt": "sqrt", "tanh": "tanh", "floor": "floor", "truediv": "div",
}  # fmt: skip
_OTHERS: Mapping[str, Callable[..., Any]] = {
    "where": _where, "div": _divide, "divide": _divide, "true_divide": _divide,
    "clip": _clip, "clamp": _clamp, "clamp_min": lambda x, min: build("max", x, min),
    "clamp_max": lambda x, max: build("min", x, max),
    "fmin": _of_numbers("min"), "fmax": _of_numbers("max"),
    "gt": _turned("lt"), "greater": _turned("lt"), "ge": _turned("le"),
    "greater_equal": _turned("le"), "rsub": _turned("sub"), "rdiv": _turned("div"),
    "pow": power, "power": power, "float_power": power, "rpow": lambda x, base: power(base, x),
    "square": lambda x: build("mul", x, x),
    "exp2": lambda x: power(2.0, x), "expm1": expm1, "log1p": log1p,
    "log2": logarithm(2), "log10": logarithm(10),
    "rsqrt": lambda x: build("div", 1.0, build("sqrt", x)),
    "reciprocal": lambda x: build("div", 1.0, x),
    "ceil": lambda x: build("neg", build("floor", build("neg", x))),
    "sin": sine, "cos": cosine, "sigmoid": sigmoid, "relu": _relu,
    "sign": _sign,
    "logical_xor": _where_xor, "bitwise_xor": _where_xor,
    **{name: _to_kind(name) for name in ("float", "double", "int", "long", "bool")},
    "to": _to, "type_as": _cast, "astype": _astype,
    "new_ones": _filled(1), "new_zeros": _filled(0),
    "contiguous": _same, "clone": _same, "item": lambda x: x,
}  # fmt: skip
NAMES = frozenset({*_DIRECT, *_OTHERS})
"""Functions that scores and positions have."""
_UNLISTED = {
    "and", "or", "to", "type_as", "astype", "contiguous", "item", "new_ones", "new_zeros", "int",
    "long", "bool",
}  # fmt: skip


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """A function by the name that NumPy or torch has for it."""
    plain = name.strip("_")
    direct, other = _DIRECT.get(plain), _OTHERS.get(plain)
    if plain in NAMES and name == f"{plain}_":
        raise _in_place(name)
    if name.startswith("__r") and direct is not None:  # Its left operand returned NotImplemented.
        return build(direct, *reversed(args))
    if direct is not None:
        if kwargs:
            raise ArgumentError(
                f"{plain} takes no {', '.join(kwargs)} in the expression language.",
                action=f"Write {plain} without it.",
            )
        if len(args) != OPERATIONS[direct].arity:
            raise ArgumentError(
                f"{plain} is given {len(args)} arguments and takes {OPERATIONS[direct].arity} in "
                "the expression language.",
                action=f"Write {plain} with these alone.",
            )
        return build(direct, *args)
    if other is not None:
        try:
            inspect.signature(other).bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(
                f"{plain} is not given what it takes in the expression language: {error}.",
                action=f"Write {plain} without other arguments, and name none but those that it "
                "has in NumPy or torch.",
            ) from None
        return other(*args, **kwargs)
    if plain == "getitem":
        raise IndexError(ARRAY_AT_POSITION)
    raise ArgumentError(
        f"{name} is not part of the expression language.",
        [("has", ", ".join(sorted(NAMES - _UNLISTED)))],
        "Write it with these.",
    )


def _in_place(name: str) -> ArgumentError:
    return ArgumentError(
        f"{name} changes a score or position in place.",
        action=f"Write x = {name.strip('_')}(x) with a new value.",
    )
