"""The exercises of the classical texts, with answers that are checked.

`qkv.exercises.check("003.2", answer)` says whether an answer is right, and why not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from qkv.arguments.declarations import checked, shown
from qkv.errors import ArgumentError
from qkv.exercises.answers import NAMES, verdict_on
from qkv.exercises.verdict import Verdict

__all__ = ["EXERCISES", "Exercise", "Verdict", "check"]


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question, the form of its answer, and how it is worked out.

    Attributes
    ----------
    name : str
        As `check` takes it.
    title, question : str
    answer : str
        What to pass to `check`.
    hint, solution : str
        A first step, and all of them.
    solved : str
        A right answer, as it is typed into the page of the lab.

    Examples
    --------
    >>> import qkv
    >>> qkv.exercises.EXERCISES[1].name
    '003.2'
    """

    name: str
    title: str
    question: str
    answer: str
    hint: str
    solution: str
    solved: str


def _read() -> tuple[Exercise, ...]:
    file = resources.files("qkv.exercises").joinpath("exercises.json")
    return tuple(Exercise(**entry) for entry in json.loads(file.read_text(encoding="utf-8")))


EXERCISES = _read()
"""All of them, in order."""


@checked
def check(name: str, answer: Any) -> Verdict:
    """Whether an answer is right, and why.

    Parameters
    ----------
    name : str
        The exercise, such as "003.2".
    answer : object
        What the exercise asks for: numbers, nested lists, or arrays of any library; or a text as it
        is typed into the page of the lab, such as "c = 3 sqrt(2)", "1 0.5; 0 1" or "no, no". Two
        correct decimals are enough where numbers are computed by hand.

    Returns
    -------
    Verdict
        True or false as a condition; printed, it says why.

    Raises
    ------
    ArgumentError
        If there is no such exercise.

    Examples
    --------
    >>> import qkv
    >>> print(qkv.exercises.check("003.10", 1_000_000))
    wrong: this is n^2, the number of scores; each takes 4 d operations.
    >>> bool(qkv.exercises.check("003.10", qkv.exercises.EXERCISES[9].solved))
    True
    """
    if name not in NAMES:
        raise ArgumentError(
            f"there is no exercise {shown(name)}.",
            [("exercises", ", ".join(NAMES))],
            "Name one of these.",
        )
    return verdict_on(name, answer)
