"""Score mods of tensors while Dynamo, torch's compiler, reads the call.

Dynamo runs the function with symbols, which note the steps; a tensor that it indexes with a symbol
becomes an array of the call, so that a graph has it as an input, differentiates it and sees when
it is replaced. The steps are constants of the graph, from which the expression is made.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qkv._dynamo import as_constant, constant_result
from qkv.bridges.torch.comparisons import let_compare
from qkv.bridges.torch.operands import tensor_in_graph
from qkv.errors import ArgumentError, QkvError
from qkv.problem.language import score_functions
from qkv.problem.language.expressions import Var, as_node
from qkv.problem.language.nodes import in_words
from qkv.problem.language.replaced_values import global_names
from qkv.problem.language.symbols import Expr, Table

__all__ = ["begins_in_the_bridge", "read", "read_made_before"]

_PACKAGE = Path(__file__).parents[1]


def read(fn: Any, arguments: tuple[str, ...]) -> tuple[str, tuple[Tensor, ...]] | None:
    """The text of a function's expression, and its tensors; None if Dynamo cannot read it."""
    if not _can_be_read(_code_of(fn)) or not let_compare(_Symbol):
        return None
    reading = _Reading()
    symbols = [reading.note(("var", name)) for name in arguments]
    with reading:
        last = reading.word(fn(*symbols))
    # What is added to nothing is a constant to Dynamo, and no longer the result of a function.
    text = "" + _expression(tuple(reading.steps), last)
    return (text, tuple(reading.tensors)) if text else None


def read_made_before(
    text: str, fn: Any, arguments: tuple[str, ...]
) -> tuple[str, tuple[Tensor, ...]] | None:
    """Read a function that was made before Dynamo began, as `read` does; None if it stays whole.

    `text` is that of a function of constants. These are looked up while Dynamo reads, so that it
    makes another graph when one of them has changed.
    """
    if not text:
        return None if _calls_numpy(fn) else read(fn, arguments)
    paths = _paths_to_constants(fn)
    if paths is None:
        return None
    for path in paths:
        value = fn
        for is_attribute, name in path:
            value = getattr(value, name) if is_attribute else value[name]
        _look_at(as_constant(value))
    return "" + text, ()  # See `read`.


@constant_result
def _look_at(value: Any) -> None:
    """Dynamo looks again whether what it hands over as a constant is the same."""


def _find_paths(thing: Any, outer: tuple[Any, ...] = ()) -> list[tuple[Any, ...]] | None:
    """The paths to what a function reads, and to what the functions among it read.

    None if one is a number of NumPy, which Dynamo makes a tensor of.
    """
    if isinstance(thing, np.generic):
        return None
    if thing in outer:  # A recursive function refers to itself.
        return []
    # Functions are looked up too, as another one may have taken the place of one.
    paths: list[tuple[Any, ...]] = [] if isinstance(thing, (tuple, partial)) else [()]
    for path, value in _parts_of(thing):
        rest = _find_paths(value, (*outer, thing))
        if rest is None:
            return None
        paths += [(*path, *steps) for steps in rest]
    return paths


_paths_to_constants = constant_result(_find_paths)


def _parts_of(thing: Any) -> Iterator[tuple[tuple[tuple[bool, Any], ...], Any]]:
    """What a function, a partial one or a tuple holds, and how it is reached; nothing of others."""
    if isinstance(thing, tuple):
        for n, value in enumerate(thing):
            yield ((False, n),), value
    elif isinstance(thing, partial):
        yield ((True, "func"),), thing.func
        for n, value in enumerate(thing.args):
            yield ((True, "args"), (False, n)), value
        for name, value in thing.keywords.items():
            yield ((True, "keywords"), (False, name)), value
    elif isinstance(thing, FunctionType) and not _is_of_numpy(thing):
        for n, cell in enumerate(thing.__closure__ or ()):
            yield ((True, "__closure__"), (False, n), (True, "cell_contents")), cell.cell_contents
        for n, value in enumerate(thing.__defaults__ or ()):
            yield ((True, "__defaults__"), (False, n)), value
        for name, value in (thing.__kwdefaults__ or {}).items():
            yield ((True, "__kwdefaults__"), (False, name)), value
        for name in global_names(thing.__code__):
            if name in thing.__globals__:
                yield ((True, "__globals__"), (False, name)), thing.__globals__[name]


def _is_of_numpy(thing: Any) -> bool:
    module = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", "")
    return isinstance(thing, np.ufunc) or (module or "").partition(".")[0] == "numpy"


@constant_result
def _calls_numpy(fn: Any, outer: tuple[Any, ...] = ()) -> bool:
    """Whether a function reads NumPy or its functions, or calls one that does."""
    if isinstance(fn, MethodType):
        fn = fn.__func__
    elif not isinstance(fn, (FunctionType, partial)):
        fn = getattr(type(fn), "__call__", None)  # noqa: B004 - it is looked at, not tested
    if not isinstance(fn, (FunctionType, partial)) or fn in outer:
        return False
    return any(
        _is_of_numpy(value) or (callable(value) and _calls_numpy(value, (*outer, fn)))
        for _, value in _parts_of(fn)
    )


def _code_of(fn: Any) -> Any:
    """The code of a function, None if it is not written in Python."""
    if isinstance(fn, partial):
        fn = fn.func
    if isinstance(fn, MethodType):
        fn = fn.__func__
    elif not isinstance(fn, FunctionType):
        fn = type(fn).__call__
    return fn.__code__ if isinstance(fn, FunctionType) else None


def _readable(code: Any) -> bool:
    """Whether to run a function of this code with symbols: its functions are not NumPy's."""
    return code is not None and not {"np", "numpy"} & set(global_names(code))


def _outermost() -> Any:
    """The function that Dynamo began with."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.root_tx


@constant_result
def begins_in_the_bridge() -> bool:
    """Whether the graph that Dynamo writes begins inside of a call.

    It does where Dynamo met something that no graph can have, and comes back to what is inside of
    the call. A graph of that would be made anew for each variant that is made inside of the
    compiled function, until Dynamo has made as many as it may.
    """
    return _may_end_graphs() and _PACKAGE in Path(_outermost().f_code.co_filename).parents


def _may_end_graphs() -> bool:
    return not _outermost().one_graph


_can_be_read = constant_result(_readable)


class _Reading(TorchFunctionMode):
    """Steps and tensors of a function that is called with symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []
        self.tensors: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        name = func.__name__
        if (name == "__getitem__" or name == "getitem") and _has_symbol(args[1]):
            return _entry(self, args[0], args[1])
        if _has_symbol(args) or _has_symbol(tuple(named.values())):
            return self.call(name, *args, **named)
        return func(*args, **named)

    def note(self, step: tuple[Any, ...]) -> _Symbol:
        """Add a step."""
        self.steps.append(step)
        return _Symbol(self, len(self.steps) - 1)

    def call(self, name: str, *args: Any, **named: Any) -> _Symbol:
        """Add a call of a function."""
        words = tuple([self.word(arg) for arg in args])
        return self.note(("call", name, words, tuple([(n, self.word(named[n])) for n in named])))

    def load(self, tensor: Tensor, indices: tuple[Any, ...]) -> _Symbol:
        """Add an entry of a tensor."""
        number = -1
        for n, known in enumerate(self.tensors):
            if known is tensor:
                number = n
        if number < 0:
            number = len(self.tensors)
            self.tensors.append(tensor)
        kind = "float" if tensor.is_floating_point() else "int"
        if tensor.dtype == torch.bool:
            kind = "bool"
        return self.note(("load", number, kind, tuple([self.word(index) for index in indices])))

    def word(self, value: Any) -> tuple[str, Any]:
        """What stands for a value in a step."""
        if isinstance(value, _Symbol):
            return "step", value.number
        if isinstance(value, Tensor) and not value.ndim:
            return "step", self.load(value, ()).number
        if isinstance(value, (Tensor, _Row)):
            return "array", None
        return "constant", as_constant(value)


def _has_symbol(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_symbol, value))
    return isinstance(value, _Symbol)


def _entry(reading: _Reading, tensor: Tensor, index: Any) -> Any:
    """An entry of a tensor, or a row where there are fewer indices than dimensions."""
    given = index if isinstance(index, tuple) else (index,)
    symbols = tuple([i for i in given if isinstance(i, _Symbol)])
    # Constant indices are applied by the graph; the others are those of the table.
    if not isinstance(tensor, Tensor):
        tensor = tensor_in_graph(tensor)
    rest = tensor[tuple([slice(None) if isinstance(i, _Symbol) else i for i in given])]
    if rest.ndim != tensor.ndim - len(given) + len(symbols):
        raise ArgumentError(
            "a tensor is indexed with positions, and with what is not a number.",
            action="Index it with positions and integers, as in w[head, 0].",
        )
    return (
        reading.load(rest, symbols) if rest.ndim == len(symbols) else _Row(rest, symbols, reading)
    )


class _Row:
    """What is left of a tensor where there were fewer indices than it has dimensions."""

    def __init__(self, tensor: Tensor, indices: tuple[Any, ...], reading: _Reading) -> None:
        self.tensor, self.indices, self._reading = tensor, indices, reading

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return _entry(self._reading, self.tensor, (*self.indices, *more))


class _Symbol:
    """A score, a position, or what was made of them."""

    __hash__ = None  # type: ignore[assignment]  # Python's way to forbid hashing

    device = None
    """FlexAttention's noop_mask hands it to `new_ones`."""

    def __init__(self, reading: _Reading, number: int) -> None:
        self.reading, self.number = reading, number

    def _refuse(self) -> Any:
        raise TypeError(
            "a score or position has no single value; write torch.where(condition, a, b) in place "
            "of if, and &, | and ~ in place of and, or and not"
        )

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = _refuse


def _add_operators() -> None:
    """Give symbols Python's operators, and the methods that tensors have."""

    def forwards(name: str) -> Any:
        return lambda self, *others: self.reading.call(name, self, *others)

    def backwards(name: str) -> Any:
        return lambda self, other: self.reading.call(name, other, self)

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
        setattr(_Symbol, f"__{name}__", forwards(f"__{name}__"))
        setattr(_Symbol, f"__r{name}__", backwards(f"__{name}__"))
    for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
        setattr(_Symbol, f"__{name}__", forwards(f"__{name}__"))
    for name in score_functions.NAMES:
        setattr(_Symbol, name, _method(name))


def _method(name: str) -> Any:
    return lambda self, *args, **named: self.reading.call(name, self, *args, **named)


_add_operators()


# From here on Dynamo calls what it does not read.


def _text(steps: tuple[Any, ...], last: tuple[str, Any]) -> str:
    """The expression as text; empty if it is none, and the call may tell its caller outside."""
    try:
        return json.dumps(in_words(as_node(_value(last, _values(steps)))))
    except QkvError:
        if _may_end_graphs():
            return ""
        raise


_expression = constant_result(_text)


def _values(steps: tuple[Any, ...]) -> list[Any]:
    """What the steps give."""
    values: list[Any] = []
    for what, *rest in steps:
        if what == "var":
            values.append(Expr(Var(rest[0])))
        elif what == "load":
            number, kind, indices = rest
            # Sizes are looked at where the expression meets its arrays.
            table = Table(f"t{number}", kind, (0,) * len(indices))
            values.append(table.entry(*[_value(index, values) for index in indices]))
        else:
            name, args, named = rest
            given = [_value(arg, values) for arg in args]
            values.append(_called(name, *given, **{n: _value(w, values) for n, w in named}))
    return values


def _value(word: tuple[str, Any], values: Sequence[Any]) -> Any:
    what, step = word
    if what == "array":
        raise ArgumentError(
            "a score mod uses a tensor where a number is wanted.",
            action="Index it with positions, one for each dimension, as in w[head].",
        )
    return values[step] if what == "step" else step


def _called(name: str, *args: Any, **named: Any) -> Expr:
    """Python's operators, also those whose left side gave them up; else a function by its name."""
    plain = name.strip("_")
    if name.startswith("__"):
        if plain.startswith("r") and hasattr(operator, plain[1:]):
            plain, args = plain[1:], args[::-1]
        function = getattr(operator, f"__{plain}__", None)
        if function is not None:
            expression: Expr = function(*args)
            return expression
    return Expr(as_node(score_functions.call(name, *args, **named)))
