"""The problem that each mechanism solves, and the symbols of its formula."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from qkv.errata import Erratum, erratum

__all__ = ["Background", "Symbol", "background"]


class Symbol(NamedTuple):
    """One symbol of a formula.

    Attributes
    ----------
    name, shape, meaning : str
    """

    name: str
    shape: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Background:
    """Facts about a mechanism beyond its formula.

    Attributes
    ----------
    invented_against : str
        The limit of earlier mechanisms that it removes.
    symbols : tuple of Symbol
        Those of its formula, of one sequence and, where there are heads, of one head.
    sizes : dict of str to str
        Those of the closed forms of its cost, such as d for head_dim.
    errata : tuple of Erratum
        Wrong statements of teaching texts that concern it.
    """

    invented_against: str
    symbols: tuple[Symbol, ...]
    sizes: dict[str, str]
    errata: tuple[Erratum, ...]


def background(name: str) -> Background:
    """The background of a mechanism of `qkv.mechanisms.MECHANISMS`.

    Parameters
    ----------
    name : str
        Its command-line name.

    Examples
    --------
    >>> background("linformer").symbols[-1]
    Symbol(name='E, F', shape='(k, n)', meaning='Mixtures of keys and of values, k = num_mixtures.')
    """
    entry = _entries()[name]
    return Background(
        entry["invented_against"],
        tuple(Symbol(symbol, *of_symbol) for symbol, of_symbol in entry["symbols"].items()),
        dict(entry["sizes"]),
        tuple(map(erratum, entry["errata"])),
    )


@cache
def _entries() -> dict[str, Any]:
    file = resources.files("qkv.mechanisms").joinpath("background.json")
    return dict(json.loads(file.read_text(encoding="utf-8")))
