"""The pages of mechanisms are what the script makes, and explain all that they use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qkv.mechanisms import MECHANISMS, SlidingWindow
from qkv.mechanisms.background import background
from scripts import script_module

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "mechanisms"

WORDS = {
    *("over", "the", "of", "it", "or", "in", "and", "for", "else", "by", "pair", "turns"),
    *("largest", "scores", "blocks", "window", "first", "last", "random", "keys", "values"),
    *("sqrt", "exp", "sum", "sum_j", "sum_s", "softmax_j", "log", "inf", "elu", "diag", "T"),
}
"""Words and functions in formulas."""


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    module = script_module(ROOT / "tools" / "mechanism_pages.py")
    return dict(module.pages())


def test_pages_are_what_the_script_makes(made: dict[str, str]) -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == made.keys()
    stale = [
        name for name, text in made.items() if (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    assert not stale, "run python tools/mechanism_pages.py"


def test_the_index_links_every_mechanism(made: dict[str, str]) -> None:
    for name in MECHANISMS:
        assert f"({name}.md)" in made["README.md"]


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_symbol_of_a_formula_is_explained(name: str) -> None:
    about = background(name)
    explained = set(re.findall(r"\w+", " ".join(symbol.name for symbol in about.symbols)))
    formula = MECHANISMS[name].formula.replace("_{t-1}", "_t").replace("e^g", "exp(g_t)")
    used = set(re.findall(r"[^\W\d]\w*", formula))
    assert used - explained - WORDS == set()
    assert about.invented_against.endswith(".")


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_calculation_scales_where_the_formula_does(name: str, made: dict[str, str]) -> None:
    """A reader who follows the formula by hand gets the numbers of the page."""
    if "Scale: s =" in made[f"{name}.md"]:
        assert re.search(r"sqrt\(d\)|temperature", MECHANISMS[name].formula)


OTHERS = {"sliding-window": [SlidingWindow(4, left=1, right=1)]}
"""Mechanisms whose closed forms have letters that those of the example lack."""


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_size_of_a_closed_form_is_explained(name: str) -> None:
    every = [MECHANISMS[name].example(), *OTHERS.get(name, [])]
    steps = [count for mechanism in every for count in mechanism.cost(5).steps.values()]
    used = {size for count in steps for size in re.findall(r"[a-z]\w*", count.formula)}
    assert used == background(name).sizes.keys()
