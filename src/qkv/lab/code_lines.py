"""The code panel: readable source, and what each line of it makes for a token."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.mechanisms import MECHANISMS
from qkv.mechanisms.registry import mechanism_class
from qkv.samples import shared_example

__all__ = ["class_lines", "listings"]

Line = dict[str, str | None]
"""`numpy` and `torch`, either of which may lack the line; a `note`; and the variable it `shows`."""


@lru_cache(maxsize=1)
def listings() -> dict[str, Any]:
    """Short code for NumPy and torch, explained line by line, with values for each token.

    The values are what the NumPy lines make when they are run on the shared example, as the
    mechanism of the same name has it.
    """
    file = resources.files("qkv.lab").joinpath("code.json")
    written: dict[str, list[Line]] = json.loads(file.read_text(encoding="utf-8"))
    example = shared_example()
    found = {
        name: {**_columns(lines), "values": _values(lines, _arguments(name), len(example.tokens))}
        for name, lines in written.items()
    }
    return {
        "listings": found,
        "mechanisms": list(MECHANISMS),
    }


def class_lines(mechanism: str) -> dict[str, Any]:
    """Source of the class of a mechanism, which takes arrays of NumPy, torch and JAX.

    Raises
    ------
    ArgumentError
        There is no mechanism of that name.
    """
    lines = inspect.getsource(mechanism_class(mechanism)).splitlines()
    return {"mechanism": mechanism, "lines": lines}


def _columns(lines: list[Line]) -> dict[str, list[str | None]]:
    return {part: [line[part] for line in lines] for part in ("numpy", "torch", "note", "shows")}


def _arguments(name: str) -> dict[str, Any]:
    """What the lines of a listing are given, by the names that they use."""
    example = shared_example()
    if name in ("scaled-dot-product", "causal"):
        return {"Q": example.q, "K": example.k, "V": example.v}
    mechanism: Any = mechanism_class(name).example()
    matrices = {f"W_{side}": mechanism.weights[f"{side}_proj.weight"].T for side in "qkv"}
    out = np.eye(matrices["W_v"].shape[-1])
    sequences = dict(zip(("x", "context"), mechanism.example_arguments(), strict=False))
    return {**matrices, **sequences, "W_o": out, "num_heads": mechanism.num_heads}


def _values(lines: list[Line], arguments: dict[str, Any], rows: int) -> list[list[str] | None]:
    """Of each line, for each row, what its variable is after it has run."""
    return [
        None if value is None else [_text(np.asarray(value), row, rows) for row in range(rows)]
        for value in _run(lines, arguments)
    ]


def _run(lines: list[Line], arguments: dict[str, Any]) -> Iterator[Any]:
    """The variable of each line after the line; those of a class run as those of one function."""
    scope = {"np": np, "self": SimpleNamespace(), **arguments}
    for line in lines:
        statement = (line["numpy"] or "").strip().replace("return ", "output = ")
        if not statement.startswith(("class ", "def ")):
            exec(statement, scope)  # These lines come with the package.
        yield scope.get(line["shows"] or "")


def _text(array: NDArray[Any], row: int, rows: int) -> str:
    """What belongs to a row, of one head after another; of other sequences all, of numbers all."""
    if array.ndim > 1 and array.shape[-2] == rows:
        array = array[..., row, :]
    parts = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    return " | ".join(", ".join(map(_number, part.tolist())) for part in parts)


def _number(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(int(value))
