"""The map of the weights: what a pointer, a wheel and a link do to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.samples import real_sample

from .conftest import Lab, served_lab

pytestmark = pytest.mark.browser

QUERY = ".field input[type=number]"


SEES = """([query, key]) => {
    const canvas = document.querySelector(".mapholder canvas").getBoundingClientRect();
    const view = new URLSearchParams(location.hash);
    const [x, y] = ["x", "y"].map((name) => Number(view.get(name)));
    return key >= x && key < x + canvas.width / 32 && query >= y && query < y + canvas.height / 32;
}"""
"""Whether a point is in a map of 32 pixels for each weight."""


IN_ITS_TEXT = """(each) => {
    const box = each.parentElement.getBoundingClientRect();
    const word = each.getBoundingClientRect();
    return word.top >= box.top && word.bottom <= box.bottom;
}"""
"""Whether a word is in sight inside of the text, which scrolls by itself."""


def is_marked(page: Any, query: int, key: int) -> None:
    page.wait_for_selector(f'canvas[data-marker="{query},{key}"]')


def test_what_was_clicked_stays_chosen(lab: Any) -> None:
    page = lab.open("inspect", layer=1, head=1, query=40, kkey=9)
    page.wait_for_selector('canvas[data-missing="0"]')
    canvas = page.locator(".mapholder canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 100, "y": 200})
    page.wait_for_selector('.readout[data-over="pointer"]')
    under = page.inner_text(".readout [data-name=query]")
    assert page.input_value(QUERY) == "40"
    is_marked(page, 40, 9)
    canvas.click(position={"x": 100, "y": 200})
    chosen = page.input_value(QUERY)
    assert under.split()[-1] == chosen != "40"
    canvas.hover(position={"x": 10, "y": 10})
    page.mouse.move(2, 2)
    page.wait_for_selector('.readout[data-over="chosen"]')
    assert page.input_value(QUERY) == chosen
    assert page.inner_text(".readout [data-name=query]").split()[-1] == chosen
    # The same for the grid of heads, which a pointer crosses on its way to the map.
    page.hover('.heads td[data-row="0"][data-column="3"]')
    assert "Layer 1, head 1" in page.inner_text("main")


def test_the_wheel_scrolls_the_page_and_zooms_with_ctrl(lab: Any) -> None:
    page = lab.open("inspect", layer=1, head=1)
    canvas = page.locator(".mapholder canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover()
    before = page.evaluate("scrollY")
    page.mouse.wheel(0, 120)
    page.wait_for_function(f"() => scrollY > {before}")
    assert "zoom" not in page.url
    canvas.hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -240)
    page.keyboard.up("Control")
    page.wait_for_function("() => location.hash.includes('zoom=')")
    assert page.evaluate("visualViewport.scale") == 1


def test_axes_have_labels(lab: Any) -> None:
    page = lab.open("inspect", layer=1, head=1)
    across, down = page.locator(".axis").all()
    assert "keys" in across.text_content()
    assert "queries" in down.text_content()
    canvas = page.locator(".mapholder canvas").bounding_box()
    for axis, along in ((across, "x"), (down, "y")):
        ticks = axis.locator("text:not(.axis-title)").all()
        assert len(ticks) > 3
        for tick in ticks:
            box = tick.bounding_box()
            size = "width" if along == "x" else "height"
            middle = box[along] + box[size] / 2 - canvas[along]
            # All 64 tokens are shown.
            assert abs(middle / canvas[size] * 64 - 0.5 - int(tick.text_content())) < 0.5


def test_a_link_leads_to_its_query(lab: Any) -> None:
    page = lab.open("inspect", layer=1, head=1, query=8, zoom=5)
    is_marked(page, 8, page.locator('.bars[aria-label="Best keys"] dt .faint').first.inner_text())
    page = lab.open("inspect", layer=1, head=1, query=60, kkey=50, zoom=5, x=0, y=0)
    is_marked(page, 60, 50)
    assert page.eval_on_selector(".words .here", IN_ITS_TEXT)
    page.wait_for_function(SEES, arg=[60, 50])


def test_a_link_scrolls_a_long_text_to_its_query(opened: Any, tmp_path: Path) -> None:
    """The text of the other tests is so short that its box never scrolls."""
    x = np.random.default_rng(0).normal(size=(400, 4))
    path = tmp_path / "long.html"
    path.write_text(qkv.inspect(x, x, x).to_html([f"w{i}" for i in range(400)]), encoding="utf-8")
    lab = opened(path)
    for query in (390, 5, 200):
        page = lab.open("inspect", query=query)
        page.wait_for_selector(f'.words .here:text-is("w{query}")')
        assert page.eval_on_selector(".words", "(box) => box.scrollHeight > 2 * box.clientHeight")
        assert page.eval_on_selector(".words .here", IN_ITS_TEXT), query
    assert lab.errors == []


def test_a_page_opens_with_its_query_in_sight(opened: Any) -> None:
    page = opened().open("inspect", layer=1, head=1, query=60, kkey=50, zoom=5)
    page.wait_for_function(SEES, arg=[60, 50])


@pytest.fixture
def bare(chromium: Any) -> Iterator[Lab]:
    """The page of `qkv lab` without a file or a model."""
    with served_lab(chromium) as lab:
        yield lab


def test_inspect_opens_the_sample_and_then_a_text_of_the_reader(bare: Lab) -> None:
    """Text, heads and map are of what the reader chose, and a change of a head is too."""
    page = bare.open("inspect")
    page.wait_for_selector(".words")
    sample = real_sample()
    assert page.locator(".words span").count() == len(sample.tokens)
    assert "Head 3" in page.inner_text("h3.part")
    assert page.query_selector(".failure") is None
    page.select_option(".examplebar select", "tiny")
    page.wait_for_selector(".whatif")
    page.wait_for_selector(".words")  # The best keys of the head are asked for after the model.
    assert page.locator(".words span").count() == 64
    text = "the cat sat. the cat sat."
    page.fill(".own-text textarea", text)
    page.click("text=Read it")
    page.wait_for_function(f"() => document.querySelectorAll('.words span').length === {len(text)}")
    assert f"{len(text)} queries" in page.inner_text(".lead")
    label = page.get_attribute(".mapholder canvas", "aria-label") or ""
    assert f"{len(text)} queries down" in label
    page.wait_for_selector('canvas[data-missing="0"]')
    page.click("text=Add this head")
    page.click("text=Run the model")
    page.wait_for_selector('[data-name="intervened"]')
    assert len(bare.table("Loss of each token")) == len(text)
    assert bare.errors == []


def test_a_text_that_was_read_stays_in_its_field(bare: Lab) -> None:
    """One word of it can be changed; also in another panel, and in a page loaded again."""
    page = bare.open("inspect")
    page.wait_for_selector(".shown")
    page.select_option(".examplebar select", "tiny")
    page.wait_for_selector(".whatif")
    text = "the cat sat. the cat sat."
    page.fill(".own-text textarea", text)
    page.click("text=Read it")
    page.wait_for_selector(f'.lead:has-text("{len(text)} queries")')
    assert page.input_value(".own-text textarea") == text
    page.fill(".own-text textarea", "not yet read")
    page.wait_for_load_state("networkidle")  # Answers about the text may still come.
    bare.open("start")
    bare.open("inspect")
    assert page.input_value(".own-text textarea") == "not yet read"
    page.reload()
    page.wait_for_selector(".own-text textarea")
    assert page.input_value(".own-text textarea") == text
    assert bare.errors == []


READ = """(text) => {
    const words = [...document.querySelectorAll(".words span")].map((each) => each.textContent);
    const key = document.querySelector('.bars[aria-label="Best keys"] dt .faint')?.textContent;
    const canvas = document.querySelector('canvas[data-missing="0"]');
    const isRead = words.join("").replaceAll("␣", " ") === text;
    return isRead && canvas?.dataset.marker.endsWith(`,${key}`);
}"""
"""Whether a text of single letters is shown, with the best key of its query marked in the map."""


def test_the_map_is_of_the_text_that_was_read(bare: Lab) -> None:
    """The map is that of the second of two texts of one length, as in a page that opens with it."""
    page = bare.open("inspect")
    page.wait_for_selector(".shown")
    page.select_option(".examplebar select", "tiny")
    page.wait_for_selector(".whatif")
    text = ""
    for text in ("the cat sat. the cat sat.", "a big dog ran. a big dog."):
        page.fill(".own-text textarea", text)
        page.click("text=Read it")
        page.wait_for_function(READ, arg=text)
    drawn = page.eval_on_selector(".mapholder canvas", "(canvas) => canvas.toDataURL()")
    page.reload()
    page.wait_for_function(READ, arg=text)
    assert drawn == page.eval_on_selector(".mapholder canvas", "(canvas) => canvas.toDataURL()")
    assert bare.errors == []


def test_inspect_offers_what_else_it_can_show(bare: Lab, tmp_path: Path) -> None:
    """The models that come with qkv, a file of the reader, and the command for another model."""
    page = bare.open("inspect")
    page.wait_for_selector(".shown")
    offered = page.eval_on_selector_all(".shown option", "all => all.map((each) => each.value)")
    assert offered == ["", "sample", "tiny", "language"]
    page.click(".shown summary")
    assert "qkv lab --model NAME" in page.inner_text(".shown details")
    path = tmp_path / "mine.npz"
    np.savez(path, **{name: np.eye(7) for name in "qkv"})
    page.set_input_files('.shown input[type="file"]', path)
    page.wait_for_selector('.lead:has-text("7 queries")')
    assert bare.errors == []


def test_a_tile_that_fails_is_not_asked_for_again_by_itself(served: Any) -> None:
    """A tile that was stopped would run again at once, and a lost server be asked forever."""
    asked = []
    answer = {"ok": False, "error": {"message": "it was stopped.", "action": ""}}

    def fail(route: Any) -> None:
        request = route.request.post_data_json
        if request["method"] != "tile":
            route.continue_()
            return
        asked.append(request)
        route.fulfill(json={**answer, "id": request["id"]})

    served.page.route("**/call", fail)
    page = served.open("inspect", layer=1, head=1, query=60, kkey=50)
    page.wait_for_selector("main .failure")
    page.wait_for_timeout(500)
    assert len(asked) == 1
    assert page.inner_text("main .failure p").strip() == "it was stopped."
    page.unroute("**/call")
    page.click("main .failure button")
    page.wait_for_selector('canvas[data-missing="0"]')
    assert page.query_selector("main .failure") is None
