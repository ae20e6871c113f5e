"""What a reader just chose is in sight, at the width of a laptop and of a phone."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import PANELS

pytestmark = pytest.mark.browser

SIZES = [(1366, 768), (390, 844)]

SEEN = """(all) => all.length > 0 && all.every((each) => {
    const { left, right, top, bottom } = each.getBoundingClientRect();
    const [x, y] = [(left + right) / 2, (top + bottom) / 2];
    return each.contains(document.elementFromPoint(x, y)) && top >= 0 && bottom <= innerHeight;
})"""
"""Whether elements are in the window, and under nothing else."""


def is_seen(page: Any, selector: str) -> bool:
    found: bool = page.eval_on_selector_all(selector, SEEN)
    return found


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_panel_begins_at_its_top(opened: Any, width: int, height: int) -> None:
    lab = opened(width=width, height=height)
    page = lab.open("count")
    for go in ("key", "link"):
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        assert not is_seen(page, "#panel-title")
        if go == "key":
            page.keyboard.press("]")
        else:
            page.eval_on_selector('nav a[href="#errata"]', "(link) => link.click()")
        panel = "tiles" if go == "key" else "errata"
        page.wait_for_selector(f'main[data-panel="{panel}"]')
        page.wait_for_function("() => scrollY === 0")
        assert is_seen(page, "#panel-title")
    assert {"count", "tiles", "errata"} < set(PANELS)
    assert lab.errors == []


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_detail_of_a_mechanism_opens_in_sight(opened: Any, width: int, height: int) -> None:
    lab = opened(width=width, height=height)
    page = lab.open("mechanisms")
    for name in ("sliding-window", "grouped-query", "scaled-dot-product"):
        card = f'.multiples button:has(b:text-is("{name}"))'
        page.click(card)
        page.wait_for_selector(f'.chosen-mechanism h3:text-is("{name}")')
        assert is_seen(page, f"{card} b"), name
        assert is_seen(page, ".chosen-mechanism > header h3"), name
        assert is_seen(page, ".chosen-mechanism .formula"), name
        # The detail follows its card, also for who listens to the page.
        follows = 'li:has(button[aria-pressed="true"]) + li .chosen-mechanism'
        assert page.query_selector(follows) is not None
    assert lab.errors == []


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_what_is_counted_is_in_sight(opened: Any, width: int, height: int) -> None:
    """The ledger is in sight beside it, or the sum so far where there is no room for that."""
    lab = opened(width=width, height=height)
    page = lab.open("count", count=17)
    for step in range(19, 31):
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(f'.place:has-text("step {step} of 30")')
        cells = ".board td.written"
        assert is_seen(page, cells if page.query_selector(cells) else ".board td.read"), step
        assert is_seen(page, ".explained .formula"), step
        assert is_seen(page, ".explained [data-name=so-far]"), step
        if width > 1000:
            assert is_seen(page, '[aria-label="Ledger"] tr.here'), step
    assert page.inner_text("[data-name=so-far]") == "138 of 138 operations"
    assert lab.errors == []


def test_tokens_in_sentences_are_quoted(lab: Any) -> None:
    """“The reads The” would be a riddle."""
    page = lab.open("heatmap", token=0, key=1)
    assert page.inner_text(".arithmetic h3") == "“The” reads “cat”"
    page = lab.open("count", count=24)
    assert page.inner_text(".explained .formula") == "“sat”: find the largest score"
    page = lab.open("pipeline", token=2, step=10)
    assert "What “sat” reads" in page.inner_text("main")
