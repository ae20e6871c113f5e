"""All heads as pictures, and lines between tokens, beside weights of Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.samples import language_model, tiny_model

from .test_keyboard import press, tab_to

pytestmark = pytest.mark.browser

DRAWN = """(canvas) => {
    const { width, height } = canvas;
    const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
    return Array.from({ length: height }, (_, i) => Array.from({ length: width }, (__, j) => {
        const [r, g, b, a] = data.slice(4 * (i * width + j), 4 * (i * width + j) + 4);
        return a ? 0.2126 * r + 0.7152 * g + 0.0722 * b : 255;
    }));
}"""
"""How light each point of a canvas is; where it is empty, as light as paper."""

LINES = """(all) => all.map(({ dataset, style }) =>
    [dataset.line, style.strokeWidth, style.opacity])"""

LEAST = 0.04
"""Weights below it have no line."""


def lines(page: Any) -> dict[tuple[int, int], tuple[float, float]]:
    """Width and opacity of each line, by query and key."""
    found = page.eval_on_selector_all(".lines line[data-line]", LINES)
    return {
        tuple(map(int, place.split("."))): (float(width), float(opacity))
        for place, width, opacity in found
    }


def require_picture(lightness: list[list[float]], weights: Any) -> None:
    """The larger a weight, the darker its point."""
    shades = np.rint(255 * np.sqrt(weights)).ravel()
    drawn = np.array(lightness).ravel()
    order = np.argsort(shades, kind="stable")
    assert (np.diff(drawn[order]) <= 0.5).all()
    assert drawn[shades == 0].tolist() == [255] * int((shades == 0).sum())
    assert len(set(drawn)) > 3


@pytest.mark.parametrize("host", ["lab", "served"])
def test_every_head_of_a_model_is_a_picture(host: str, request: pytest.FixtureRequest) -> None:
    lab = request.getfixturevalue(host)
    page = lab.open("inspect", layer=1, head=1, theme="light")
    page.wait_for_function("() => document.querySelectorAll('.glance canvas').length === 8")
    model = tiny_model()
    record = model.inspect(model.repeated_sequence(), keep="weights")
    for layer in range(2):
        for head in range(4):
            picture = page.locator(f'.glance [data-place="{layer}.{head}"] canvas')
            weights = np.asarray(record[layer].weights[0, head])
            require_picture(picture.evaluate(DRAWN), weights)
    page.click('.glance [data-place="0.3"]')
    assert "Layer 0, head 3" in page.inner_text("main")


def test_pictures_are_one_tab_stop_with_arrow_keys(lab: Any) -> None:
    page = lab.open("inspect", layer=0, head=0)
    tab_to(page, ".glance button[data-place]")
    press(page, "ArrowDown", "ArrowRight", "ArrowRight")
    assert page.evaluate("document.activeElement.dataset.place") == "1.2"
    assert page.get_attribute('.glance [data-place="1.2"]', "aria-pressed") == "true"
    assert "Layer 1, head 2" in page.inner_text("main")
    press(page, "End", "ArrowRight", "ArrowDown")
    assert page.evaluate("document.activeElement.dataset.place") == "1.3"
    press(page, "Home", "ArrowUp")
    assert page.evaluate("document.activeElement.dataset.place") == "0.0"
    assert page.locator('.glance button[tabindex="0"]').count() == 1
    press(page, "Enter")
    assert page.evaluate("document.activeElement.classList.contains('words')")


def test_lines_go_to_the_best_keys(lab: Any) -> None:
    page = lab.open("inspect", layer=1, head=0, query=48)
    page.wait_for_selector(".lines line")
    model = tiny_model()
    record = model.inspect(model.repeated_sequence(), keep="weights")
    weights = np.asarray(record[1].weights[0, 0])
    found = lines(page)
    wanted = {
        (query, int(key)): float(weights[query, key])
        for query in range(36, 60)
        for key in np.argsort(-weights[query])[:4]
        if weights[query, key] >= LEAST
    }
    keys = {key for _, key in found}
    assert len(keys) == 24
    assert {key for query, key in wanted if query == 48} <= keys
    assert set(found) == {place for place in wanted if place[1] in keys}
    for place, (width, opacity) in found.items():
        assert width == pytest.approx(0.5 + 4 * wanted[place], abs=1e-5)
        assert (opacity == 1) is (place[0] == 48)
    # A click on a query chooses it, and pointing at a key shows who reads it.
    page.click('.lines .from[data-index="50"]')
    assert page.input_value(".field input[type=number]") == "50"
    page.hover('.lines .to[data-index="19"]')
    strong = {place for place, (_, opacity) in lines(page).items() if opacity == 1}
    assert strong == {place for place in lines(page) if place[1] == 19} != set()


def test_lines_of_a_long_text_reach_its_beginning(opened: Any, tmp_path: Path) -> None:
    """Query 700 reads key 3, and no other key of the first half is in sight."""
    n = 900
    q = np.zeros((n, 4), np.float32)
    k = np.zeros((n, 4), np.float32)
    k[np.arange(n), 0] = np.linspace(0, 1, n)
    q[:, 1], k[3, 1] = 40, 0
    q[700, 2], k[3, 2] = 60, 1
    path = tmp_path / "page.html"
    tokens = [f"w{i}" for i in range(n)]
    path.write_text(qkv.inspect(q, k, k, qkv.Causal()).to_html(tokens), encoding="utf-8")
    lab = opened(path)
    page = lab.open("inspect", query=700)
    page.wait_for_selector(".lines line")
    assert list(lines(page)) == [(700, 3)]
    assert page.text_content(".lines .to") == "w3 3"
    assert page.locator(".lines .from").count() == 24
    assert "Of 900 queries 291, evenly spaced," in page.inner_text(".glance")
    assert page.locator(".glance canvas").first.evaluate("c => [c.width, c.height]") == [64, 64]
    assert lab.errors == []


def test_lines_of_the_language_model(lab: Any) -> None:
    model, text = (
        language_model(),
        "It was a truth. She was not at all sure of it, and he was gone.",
    )
    ids = model.encode(text)
    assert 16 < len(ids) <= 24
    page = lab.open("language", text=text, llayer=2, lhead=1, lquery=7)
    weights = np.asarray(model.inspect(ids, keep="weights")[2].weights[0, 1])
    places = {(int(i), int(j)) for i, j in zip(*np.nonzero(weights >= LEAST), strict=True)}
    found = lines(page)
    assert set(found) == places
    assert {query for (query, _), (_, opacity) in found.items() if opacity == 1} == {7}
    page.locator(".smallheads button[aria-pressed=true]").focus()
    press(page, "ArrowLeft")
    page.wait_for_selector('h3:has-text("Layer 2, head 0")')
