"""What the lab answers about small examples: their rows, code, and the teaching data."""

from __future__ import annotations

import base64
import inspect
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

from qkv.errata import ERRATA
from qkv.exercises import EXERCISES
from qkv.exercises.answers import numbers_of
from qkv.inspection.heads.head_scores import MEANINGS, THRESHOLD
from qkv.lab.parameters import Parameters
from qkv.lab.small_examples.code_lines import class_lines, listings
from qkv.lab.small_examples.examples import Example
from qkv.mechanisms.comparison import compare
from qkv.mechanisms.registry import mechanism_class
from qkv.samples.language import language_model_bytes
from qkv.teaching.saturation import scaling_curve

__all__ = ["SmallMethods"]


class SmallMethods:
    """Methods over small examples, and over data that comes with qkv."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = tuple(examples)

    def example(self, given: Parameters) -> dict[str, Any]:
        """The examples, with their rows and tokens."""
        return {"examples": [example.to_dict() for example in self.examples]}

    def scaling(self, given: Parameters) -> dict[str, Any]:
        """The curve of `qkv.scaling_curve`, and one query with five keys to look at."""
        return _scaling()

    def mechanisms(self, given: Parameters) -> dict[str, Any]:
        """All mechanisms on the shared example."""
        return _mechanisms()

    def code(self, given: Parameters) -> dict[str, Any]:
        """Listings with what each line makes; or the source of the class of a mechanism."""
        name = given.text("mechanism", 60)
        return class_lines(name) if name else listings()

    def language(self, given: Parameters) -> dict[str, Any]:
        """The file of the small language model, which the page computes itself, as base64."""
        file = base64.b64encode(language_model_bytes()).decode("ascii")
        return {"file": file, "meanings": MEANINGS, "threshold": THRESHOLD}

    def errata(self, given: Parameters) -> dict[str, Any]:
        """What the classical texts print wrongly."""
        return {"errata": [asdict(entry) for entry in ERRATA]}

    def exercises(self, given: Parameters) -> dict[str, Any]:
        """The exercises of the classical texts, with the numbers by which a page checks answers."""
        return {
            "exercises": [
                {**asdict(entry), "numbers": numbers.to_dict() if numbers else None}
                for entry in EXERCISES
                for numbers in (numbers_of(entry.name),)
            ]
        }


@lru_cache(maxsize=1)
def _scaling() -> dict[str, Any]:
    curve = scaling_curve()
    # The page takes the first d_k numbers of each row.
    longest = max(point.d_k for point in curve.points)
    query, *keys = np.random.default_rng(0).normal(size=(6, longest)).round(3).tolist()
    return {"curve": curve.to_dict(), "draw": {"query": query, "keys": keys}}


@lru_cache(maxsize=1)
def _mechanisms() -> dict[str, Any]:
    compared = compare().to_dict()
    families: dict[str, str] = {}
    for each in compared["mechanisms"]:
        mechanism = mechanism_class(each["mechanism"])
        package = import_module(mechanism.__module__.rpartition(".")[0])
        family = package.__name__.rpartition(".")[2].replace("_", " ")
        families[family] = (package.__doc__ or "").partition("\n")[0]
        each |= {"family": family, "about": _sentences(mechanism)}
    return {**compared, "families": families}


def _sentences(mechanism: type) -> list[str]:
    """What the docstring of a class says before its parameters, without formulas on lines alone."""
    text = (inspect.getdoc(mechanism) or "").partition("\n\nParameters\n")[0]
    paragraphs = text.split("\n\n")
    return [" ".join(part.split()) for part in paragraphs if not part.startswith(" ")]
