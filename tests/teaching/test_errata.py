"""Errata against the goldens, and against what their own code shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.errata import ERRATA, Erratum, erratum, markdown

ROOT = Path(__file__).parents[2]
CASES = json.loads((ROOT / "tests/golden/goldens.json").read_text(encoding="utf-8"))["cases"]
OF_GOLDENS = [(case, wrong) for case in CASES.values() for wrong in case.get("errata", ())]


@pytest.mark.parametrize("entry", ERRATA, ids=lambda entry: entry.name)
def test_its_code_runs(entry: Erratum) -> None:
    assert "assert" in entry.shown_by or "raises" in entry.shown_by
    exec(compile(entry.shown_by, entry.name, "exec"), {})
    assert entry.printed != entry.right
    assert entry.why.endswith(".")


def test_there_are_twenty_one_and_their_names_differ() -> None:
    assert len({entry.name for entry in ERRATA}) == len(ERRATA) == 21
    assert len(OF_GOLDENS) == 11


@pytest.mark.parametrize("index", range(11))
def test_goldens_are_among_them(index: int) -> None:
    """The first eleven are those of the goldens, in their order, with numbers recomputed there."""
    (case, wrong), entry = OF_GOLDENS[index], ERRATA[index]
    found = re.match(r"(raw|weights|output)(\[\d\])+", wrong["what"])
    if not found:
        shared = set(re.findall(r"\w{6,}", f"{wrong['what']} {wrong.get('printed')}".lower()))
        assert shared & set(re.findall(r"\w{6,}", f"{entry.what} {entry.printed}".lower()))
        return
    indices = tuple(map(int, re.findall(r"\[(\d)\]", wrong["what"])))
    exact = np.array(case["exact"][found[1]])[indices[0]]
    right = [float(x) for x in entry.right.split(", ")]
    digits = max(len(x.partition(".")[2]) for x in entry.right.split(", "))
    assert np.round(exact, digits).tolist() == right
    printed = np.array([float(x) for x in entry.printed.split(", ")])
    assert printed[list(indices[1:]) or slice(None)] == pytest.approx(wrong["printed"])
    assert printed.tolist() != right


def test_the_page_is_that_of_the_list() -> None:
    assert (ROOT / "docs/errata.md").read_text(encoding="utf-8") == markdown()


def test_one_by_its_name() -> None:
    assert qkv.errata.erratum("exp-500") in ERRATA
    with pytest.raises(qkv.ArgumentError, match="no erratum is called 'exp-5'"):
        erratum("exp-5")
