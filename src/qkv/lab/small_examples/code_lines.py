"""The code panel: readable source, and what each line of it makes for a token."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from importlib import resources
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.mechanisms import MECHANISMS, example_tokens
from qkv.mechanisms.registry import mechanism_class
from qkv.samples import shared_example

__all__ = ["class_lines", "listings"]

Made = tuple[Any, ...]
"""Arrays that one execution of a line makes."""
_NUMBERS = np.ndarray | np.generic | float | int
_MOST_SHOWN = 160
"""The most characters of a value that is shown; whole matrices are left out."""
Line = dict[str, str | None]
"""`numpy` and `torch`, either of which may lack the line; a `note`; and the variable it `shows`."""


@lru_cache(maxsize=1)
def listings() -> dict[str, Any]:
    """Short code for NumPy and torch, explained line by line, with values for each token.

    The values are what the NumPy lines make when they are run on the shared example, as the
    mechanism of the same name has it.
    """
    file = resources.files("qkv.lab.small_examples").joinpath("code.json")
    written: dict[str, list[Line]] = json.loads(file.read_text(encoding="utf-8"))
    example = shared_example()
    by_name = {
        name: {**_columns(lines), "values": _values(lines, _arguments(name), len(example.tokens))}
        for name, lines in written.items()
    }
    return {
        "listings": by_name,
        "mechanisms": list(MECHANISMS),
    }


@cache
def class_lines(mechanism: str) -> dict[str, Any]:
    """Source of the class of a mechanism, which takes arrays of NumPy, torch and JAX.

    The values are what its lines make for each of the shared tokens when the example of the
    mechanism is called and its token mixing is computed. Lines that do not run then have none.

    Raises
    ------
    ArgumentError
        There is no mechanism of that name.
    """
    cls = mechanism_class(mechanism)
    lines, first = inspect.getsourcelines(cls)
    example, arguments = cls.example(), cls.example_arguments()
    made = _made_by(cls, example.token_mixing, arguments) | _made_by(cls, example, arguments)
    rows = len(example_tokens())
    return {
        "mechanism": mechanism,
        "lines": [line.rstrip("\n") for line in lines],
        "values": [_of_rows(made.get(first + i, []), rows) for i in range(len(lines))],
    }


def _made_by(cls: type, call: Callable[..., object], arguments: Made) -> dict[int, list[Made]]:
    """The values that lines of a class assign or return in a call, for each time they run.

    The values of a statement of several lines belong to its first line.
    """
    lines, first = inspect.getsourcelines(cls)
    statements: dict[int, tuple[int, tuple[str, ...]]] = {}
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Assign | ast.Return):
            targets = node.targets if isinstance(node, ast.Assign) else [ast.Name("return")]
            parts = [part for target in targets for part in ast.walk(target)]
            names = tuple(part.id for part in parts if isinstance(part, ast.Name))
            for line in range(node.lineno, (node.end_lineno or 0) + 1):
                statements[first - 1 + line] = first - 1 + node.lineno, names
    by_line: dict[int, list[Made]] = {}
    file = inspect.getfile(cls)

    def enter(frame: FrameType, event: str, made: Any) -> Any:
        code = frame.f_code
        inside = code.co_filename == file and 0 <= code.co_firstlineno - first < len(lines)
        if not inside or code.co_name.startswith("<"):
            return None
        running = None

        def follow(frame: FrameType, event: str, made: Any) -> Any:
            nonlocal running
            next_one = statements.get(frame.f_lineno) if event == "line" else None
            if running is not None and next_one is not running:
                line, names = running
                values = {**frame.f_locals, "return": made}
                arrays = [values[name] for name in names if isinstance(values.get(name), _NUMBERS)]
                by_line.setdefault(line, []).append(tuple(map(np.array, arrays)))
            running = next_one
            return follow

        return follow

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call(*arguments)
    finally:
        sys.settrace(before)
    return by_line


def _of_rows(made: list[Made], rows: int) -> list[str] | None:
    """The numbers of each row, for a line that ran once for all rows or once for each."""
    each = made if len(made) == rows else [made[-1] if made else ()] * rows
    texts = ["; ".join(_text(array, row, rows) for array in each[row]) for row in range(rows)]
    return texts if all(0 < len(text) <= _MOST_SHOWN for text in texts) else None


def _columns(lines: list[Line]) -> dict[str, list[str | None]]:
    return {part: [line[part] for line in lines] for part in ("numpy", "torch", "note", "shows")}


def _arguments(name: str) -> dict[str, Any]:
    """The arguments of a listing, by the names that its lines use."""
    example = shared_example()
    if name in ("scaled-dot-product", "causal"):
        return {"Q": example.q, "K": example.k, "V": example.v}
    mechanism: Any = mechanism_class(name).example()
    matrices = {f"W_{side}": mechanism.weights[f"{side}_proj.weight"].T for side in "qkv"}
    out = np.eye(matrices["W_v"].shape[-1])
    sequences = dict(zip(("x", "context"), mechanism.example_arguments(), strict=False))
    return {**matrices, **sequences, "W_o": out, "num_heads": mechanism.num_heads}


def _values(lines: list[Line], arguments: dict[str, Any], rows: int) -> list[list[str] | None]:
    """The value of each line's variable after the line has run, for each row."""
    return [
        None if value is None else [_text(np.asarray(value), row, rows) for row in range(rows)]
        for value in _run(lines, arguments)
    ]


def _run(lines: list[Line], arguments: dict[str, Any]) -> Iterator[Any]:
    """The value of each line's variable after the line; a class is run as one function."""
    scope = {"np": np, "self": SimpleNamespace(), **arguments}
    for line in lines:
        statement = (line["numpy"] or "").strip().replace("return ", "output = ")
        if not statement.startswith(("class ", "def ")):
            exec(statement, scope)  # These lines come with the package.
        yield scope.get(line["shows"] or "")


def _text(array: NDArray[Any], row: int, rows: int) -> str:
    """A row of a value, for one head after another; the whole value if it has no such rows."""
    if array.ndim > 1 and array.shape[-2] == rows:
        array = array[..., row, :]
    parts = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    return " | ".join(", ".join(map(_number, part.tolist())) for part in parts)


def _number(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(int(value))
