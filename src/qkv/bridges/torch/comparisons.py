"""Comparisons with numbers that are variables of a graph, while Dynamo reads them.

Dynamo makes a variable of an integer that has changed between two calls, and of a size. It takes
`==` of such a variable and an object for False, and `!=` for True, without asking the object; `<`
ends with an error of its own. A mask of `kv_pos == n` would allow nothing, in silence.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from qkv._dynamo import constant_result

__all__ = ["let_compare"]

_REFLECTED = {"lt": "gt", "le": "ge", "eq": "eq", "ne": "ne", "gt": "lt", "ge": "le"}


@constant_result
def let_compare(kind: type) -> bool:
    """Have Dynamo ask objects of this class when it compares them with a variable of its graph.

    False if this torch has other tables of comparisons.
    """
    try:
        from torch._dynamo.variables import UserDefinedObjectVariable
        from torch._dynamo.variables.builtin import BuiltinVariable
        from torch._dynamo.variables.tensor import SymNodeVariable

        handlers = BuiltinVariable._binop_handlers()
        chosen = BuiltinVariable.call_function_handler_cache
    except (ImportError, AttributeError):
        return False
    for name, reflected in _REFLECTED.items():
        comparison = getattr(operator, name)
        for types, ask in (
            ((UserDefinedObjectVariable, SymNodeVariable), _asking_left(kind, name)),
            ((SymNodeVariable, UserDefinedObjectVariable), _asking_right(kind, reflected)),
        ):
            if all(known != types for known, _ in handlers[comparison]):
                handlers[comparison].insert(0, (types, ask))
                # What Dynamo has chosen for these types before is looked up again.
                chosen.pop((comparison, *types), None)
    return True


def _asking_left(kind: type, name: str) -> Callable[..., Any]:
    """What compares an object of a class with a number; other objects are left to Dynamo."""

    def compare(translator: Any, asked: Any, number: Any) -> Any:
        if asked.python_type() is not kind:
            return None
        return asked.call_method(translator, f"__{name}__", [number], {})

    return compare


def _asking_right(kind: type, name: str) -> Callable[..., Any]:
    ask = _asking_left(kind, name)
    return lambda translator, number, asked: ask(translator, asked, number)
