"""What torch's compiler (Dynamo) may read of this package.

Dynamo interprets Python: it reads functions, replaces arrays by stand-ins without memory, and runs
what it made of them later. A function that hands the address of an array to compiled code must not
be read in this way, since the address would be that of a stand-in, or of memory that has been freed
when the code runs. So Dynamo is told to read only the modules that turn a call into an operator of
torch. At any other function of this package it ends its graph and calls the function as it is; with
`fullgraph` it raises an error. It is told when it is imported, whoever imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from qkv._imports import when_imported

__all__ = [
    "READABLE", "as_constant", "ends_graph", "is_reading", "made_outside", "unreadable", "watch",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])

_RULES = "torch._dynamo.trace_rules"
"""The module that says which files Dynamo reads."""

READABLE = (
    "__init__.py", "_api.py", "_dynamo.py", "arguments/array_errors.py",
    "arguments/declarations.py", "arguments/readable_checks.py", "arrays/__init__.py",
    "backends/__init__.py", "backends/torch",
    "bridges/__init__.py", "bridges/learnable.py", "bridges/torch/__init__.py",
    "bridges/torch/calls.py", "bridges/torch/comparisons.py", "bridges/torch/compiled.py",
    "bridges/torch/operands.py",
    "bridges/torch/operations", "bridges/torch/score_mods.py",
    "call/__init__.py", "call/binding", "errors.py", "hf", "mechanisms", "positions", "torch",
    "variants",
)  # fmt: skip
"""Files and folders that Dynamo may read: they hand no address to compiled code."""


def ends_graph(function: Function, name: str | None = None, reason: str | None = None) -> Function:
    """Mark a function at which Dynamo ends its graph, so that torch's error says why.

    `name` is the public name of the function, and `reason` takes the place of the whole reason. The
    attributes are those that `torch.compiler.disable` sets on what it returns.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason or (
        f"{name or f'qkv.{function.__name__}'} computes on the memory of its arrays, which a graph "
        "does not have. Call it outside of the compiled function, or compile without "
        "fullgraph=True; qkv.attention of tensors is part of graphs, and torch differentiates it"
    )
    return function


def made_outside(name: str, does: str) -> Callable[[Function], Function]:
    """Mark a constructor that Dynamo cannot read, so that torch's error says what to do."""
    reason = f"{name} {does}, which a graph does not have. Call it outside of the compiled function"
    return lambda function: ends_graph(function, reason=reason)


def constant_result(function: Function) -> Function:
    """Do what `torch.compiler.assume_constant_result` does, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch's own mark
    return function


@constant_result
def is_reading() -> bool:
    """Whether Dynamo is reading the function that asks.

    Dynamo runs this while it reads, and keeps the result as a constant. A function leaves out then
    what Dynamo cannot read, such as the signatures of functions.
    """
    translator = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), _TRANSLATOR, None)
    try:
        return translator is not None and translator.current_tx() is not None
    except AttributeError:  # It has none in this thread.
        return False


_TRANSLATOR = "InstructionTranslator"


_SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"


def as_constant(number: Any) -> Any:
    """Make a number a constant of the graph: another number makes another graph.

    Dynamo replaces a number that has changed by a variable of its graph. This package makes text of
    numbers and branches on them, neither of which can be done with a variable.
    """
    if (type(number) is int or type(number) is float) and is_reading():
        # Looked up, since variants may not import torch; Dynamo has imported it.
        return sys.modules[_SYMBOLIC_SHAPES].guard_scalar(number)
    return number


def unreadable(folder: Path, readable: Sequence[str] = READABLE) -> Iterator[Path]:
    """The files and folders that Dynamo is not to read; a folder stands for all that is in it."""
    root = Path(__file__).parent
    for path in sorted(folder.iterdir()):
        name = path.relative_to(root).as_posix()
        if name in readable or (path.is_file() and path.suffix != ".py"):
            continue
        if any(entry.startswith(f"{name}/") for entry in readable):
            yield from unreadable(path, readable)
        elif path.name != "__pycache__":
            yield path


def _tell(rules: Any) -> None:
    """Add what is not to be read to the files that Dynamo skips.

    A torch without these names, which are not documented, reads everything, as it did before.
    """
    skipped, update = getattr(rules, "SKIP_DIRS", None), getattr(rules, "_recompile_re", None)
    if skipped is None or update is None:
        return
    for path in unreadable(Path(__file__).parent):
        skipped.append(path.as_posix() + ("/" if path.is_dir() else ""))
    update()


def watch() -> None:
    """Tell Dynamo what it may read: now if it has been imported, else when it is."""
    when_imported(_RULES, _tell)
