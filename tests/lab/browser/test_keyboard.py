"""The lab without a pointer."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import PANELS

pytestmark = pytest.mark.browser

FOCUSED = """() => {
    const at = document.activeElement;
    return [at.tagName, at.getAttribute("role"), at.dataset.row, at.dataset.column,
            at.closest("table")?.getAttribute("aria-label") ?? at.innerText ?? ""];
}"""


def press(page: Any, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def tab_to(page: Any, selector: str) -> int:
    """How many tab stops lie before an element; it has the focus then."""
    for stops in range(1, 80):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return stops
    raise AssertionError(f"no tab stop is {selector}")


def test_a_grid_is_one_tab_stop_with_arrow_keys(lab: Any) -> None:
    page = lab.open("heatmap")
    tab_to(page, 'table[aria-label="weights matrix"] td')
    press(page, "ArrowDown", "ArrowRight", "ArrowRight")
    assert page.evaluate(FOCUSED)[1:4] == ["gridcell", "1", "2"]
    page.wait_for_selector('[data-cell="1,2"]')
    page.wait_for_function(
        """() => [...document.querySelectorAll('[role="status"]')]
            .some((each) => each.textContent === "“cat” reads “sat”: 0.2442")"""
    )
    press(page, "Home", "Control+End")
    assert page.evaluate(FOCUSED)[2:4] == ["4", "4"]
    press(page, "ArrowDown")
    assert page.evaluate(FOCUSED)[2:4] == ["4", "4"]
    press(page, "Tab")
    assert page.evaluate(FOCUSED)[4] != "weights matrix"
    stops = page.query_selector_all('table[aria-label="weights matrix"] [tabindex="0"]')
    assert len(stops) == 1


def test_a_cell_is_edited(lab: Any) -> None:
    page = lab.open("start")
    tab_to(page, 'table[aria-label="K"] td')
    press(page, "ArrowDown", "Enter")
    page.keyboard.insert_text("x")
    press(page, "Escape")
    assert lab.grid("K")[1, 0] == 1
    press(page, "4", "2", "Enter")
    assert lab.grid("K")[1, 0] == 42
    assert page.evaluate(FOCUSED)[1:4] == ["gridcell", "2", "0"]
    press(page, "-", "2", "Enter")
    assert lab.grid("K")[2, 0] == -2


def test_every_panel_is_reached(lab: Any) -> None:
    page = lab.open("start")
    for _ in PANELS[1:]:
        press(page, "]")
    assert page.get_attribute("main", "data-panel") == "exercises"
    page.wait_for_function(
        """() => [...document.querySelectorAll('[role="status"]')]
            .some((each) => each.textContent === "Exercises")"""
    )
    # Some keyboards have brackets with Alt.
    page.dispatch_event("body", "keydown", {"key": "[", "altKey": True, "bubbles": True})
    assert page.get_attribute("main", "data-panel") == "errata"
    page.go_back()
    page.wait_for_selector('main[data-panel="exercises"]')
    tab_to(page, 'nav a[href="#tiles"]')
    press(page, "Enter")
    assert page.get_attribute("main", "data-panel") == "tiles"


def test_the_way_back_leads_to_what_was_typed_last(lab: Any) -> None:
    page = lab.open("start")
    page.click('table[aria-label="Q"] td[data-row="0"][data-column="0"]')
    press(page, "7")
    # The cell takes the number as it loses the focus, a moment before the panel changes.
    page.click('nav a[href="#heatmap"]')
    page.wait_for_selector('main[data-panel="heatmap"]')
    page.go_back()
    page.wait_for_selector('main[data-panel="start"]')
    assert lab.grid("Q")[0, 0] == 7


def test_the_queries_end_at_the_last(lab: Any) -> None:
    page = lab.open("heatmap", token=3)
    press(page, *"jjj")
    page.wait_for_selector('[data-cell="4,0"]')
    page.wait_for_function(
        """() => [...document.querySelectorAll('[role="status"]')]
            .some((each) => each.textContent === "query “mat”")"""
    )
    press(page, "k")
    page.wait_for_selector('[data-cell="3,0"]')


def test_keys_that_the_list_names(lab: Any) -> None:
    page = lab.open("heatmap")
    press(page, "m")
    assert page.is_checked('label:has-text("causal") input')
    press(page, "s")
    assert page.is_checked('label:has-text("not divided") input')
    press(page, "j", "j", "k")
    page.wait_for_selector('[data-cell="1,0"]')
    press(page, "d")
    assert "0.952574126822" in page.inner_text('table[aria-label="weights matrix"]')
    press(page, "t")
    page.wait_for_selector('.qkv-lab[data-theme="light"]')
    press(page, "t")
    page.wait_for_selector('.qkv-lab[data-theme="dark"]')
    press(page, "?")
    listed = page.inner_text("dialog[open]")
    assert all(key in listed for key in ("[ and ]", "j and k", "Enter", "Esc"))
    press(page, "Escape")
    assert not page.is_visible("dialog[open]")


def test_keys_wait_while_a_dialog_is_open(lab: Any) -> None:
    page = lab.open("heatmap")
    for name in ("Share", "Keys"):
        page.click(f'header button:has-text("{name}")')
        page.wait_for_selector("dialog[open]")
        press(page, "m", "]", "d")
        press(page, "Escape")
        page.wait_for_selector("dialog[open]", state="detached")
        assert page.is_checked('label:has-text("none") input')
        assert page.url.endswith("#heatmap")
        assert page.get_attribute("main", "data-panel") == "heatmap"


def test_choices_and_the_slider(lab: Any) -> None:
    page = lab.open("pipeline")
    tab_to(page, "fieldset.tokens input")
    press(page, "ArrowRight", "ArrowRight")
    assert page.is_checked('.tokens label:has-text("sat") input')
    page = lab.open("scaling", dk=512)
    tab_to(page, "#dk")
    press(page, "ArrowRight")
    assert page.get_attribute("#dk", "aria-valuetext") == "d_k 513"
    press(page, "PageDown")
    assert page.get_attribute("#dk", "aria-valuetext") == "d_k 257"


def test_the_map(lab: Any) -> None:
    page = lab.open("inspect", layer=1, head=1, query=40, kkey=0)
    page.wait_for_selector('canvas[data-missing="0"]')
    tab_to(page, ".mapholder canvas")
    press(page, "ArrowRight", "ArrowRight", "ArrowDown")
    assert page.inner_text('.readout [data-name="query"]').endswith(" 41")
    assert page.inner_text('.readout [data-name="key"]').endswith(" 2")
    press(page, "+")
    page.wait_for_function("() => location.hash.includes('zoom=')")
    press(page, "0")
    page.wait_for_function("() => !location.hash.includes('zoom=')")


def test_lines_of_code(lab: Any) -> None:
    page = lab.open("code")
    tab_to(page, '.code [role="option"]')
    press(page, "ArrowDown", "ArrowDown")
    assert "scores = Q @ K.T" in page.evaluate("document.activeElement.innerText")
    assert "dot product" in page.evaluate("document.activeElement.innerText")


@pytest.mark.parametrize(
    ("panel", "place"),
    [
        ("heatmap", 'table[aria-label="weights matrix"] td'),
        ("inspect", "canvas[data-keys]"),
        ("inspect", ".words"),
        ("code", '[role="option"]'),
        ("scaling", '[type="range"]'),
        ("pipeline", '[type="radio"]'),
    ],
)
def test_shortcuts_work_wherever_nothing_is_written(lab: Any, panel: str, place: str) -> None:
    """A grid takes arrows, digits and Enter, a map and a slider arrows; others are the page's."""
    page = lab.open(panel)
    page.wait_for_selector(place)
    tab_to(page, place)
    press(page, "?")
    page.wait_for_selector("dialog[open]")
    press(page, "Escape", "m")
    page.wait_for_function("() => location.hash.includes('mask=')")
    press(page, "]")
    page.wait_for_selector(f'main:not([data-panel="{panel}"])')
