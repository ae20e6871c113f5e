"""Errors in the classical teaching texts, each with the right statement and the reason.

`qkv.errata.ERRATA` holds all of them, `qkv.errata.erratum("cat-row")` one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from qkv.arguments.declarations import checked, shown
from qkv.errors import ArgumentError

__all__ = ["ERRATA", "Erratum", "erratum", "markdown"]


@dataclass(frozen=True, slots=True)
class Erratum:
    """One statement or number that its own inputs, or a run of the code, contradict.

    Attributes
    ----------
    name : str
        Short, for links.
    text : str
        Where it is printed.
    what : str
        Which number or statement is meant.
    printed : str
        As it is printed.
    right : str
        What holds instead.
    why : str
    shown_by : str
        Python statements that run only if the erratum is one.

    Examples
    --------
    >>> import qkv
    >>> qkv.errata.erratum("exp-500").right
    'exp(500) = 1.4e217; float64 overflows above exp(709.78)'
    """

    name: str
    text: str
    what: str
    printed: str
    right: str
    why: str
    shown_by: str


def _read() -> tuple[Erratum, ...]:
    file = resources.files("qkv.errata").joinpath("errata.json")
    return tuple(Erratum(**entry) for entry in json.loads(file.read_text(encoding="utf-8")))


ERRATA = _read()
"""All of them, in the order of the texts."""


_ABOUT = (
    "What their own inputs, or a run of the code, contradict. `qkv errata` prints this list, and "
    "`qkv.errata.ERRATA` holds it. A text is named by its kind, section and example, since more is "
    "not recorded of it. Each block of code runs only if the erratum is one."
)


@checked
def erratum(name: str) -> Erratum:
    """One erratum by its name.

    Parameters
    ----------
    name : str

    Raises
    ------
    ArgumentError
        If there is none of that name.

    Examples
    --------
    >>> from qkv.errata import erratum
    >>> erratum("permutation").printed
    'self-attention is permutation-invariant'
    """
    for entry in ERRATA:
        if entry.name == name:
            return entry
    raise ArgumentError(
        f"no erratum is called {shown(name)}.",
        [("errata", ", ".join(entry.name for entry in ERRATA))],
        "Name one of these.",
    )


def markdown() -> str:
    """The page `docs/errata.md`, one section for each erratum.

    Examples
    --------
    >>> from qkv.errata import markdown
    >>> "## cat-row" in markdown()
    True
    """
    parts = [
        "# Errata of the classical teaching texts",
        _ABOUT,
    ]
    for entry in ERRATA:
        parts += [
            f"## {entry.name}",
            f"{entry.text}: {entry.what}.",
            f"- Printed: {entry.printed}\n- Right: {entry.right}\n- Why: {entry.why}",
            f"```python\n{entry.shown_by}\n```",
        ]
    return "\n\n".join(parts) + "\n"
