"""The page that `qkv inspect --html` writes: every head, and from each map to the text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.cli import main
from qkv.samples import real_sample

from .conftest import Lab

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def sample_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the arrays that come with qkv."""
    path = tmp_path_factory.mktemp("inspect") / "sample.html"
    assert main(["inspect", "--html", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def tiny_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "tiny.html"
    assert main(["inspect", "--model", "tiny", "--html", str(path)]) == 0
    return path


def plainly(lab: Lab) -> Any:
    """The page as a double click on the file opens it."""
    lab.page.goto(lab.address)
    lab.page.wait_for_selector('main[data-panel="inspect"]')
    return lab.page


def is_in_sight(page: Any, selector: str) -> bool:
    found: bool = page.eval_on_selector(
        selector,
        """(each) => {
            const box = each.getBoundingClientRect();
            return box.top >= 0 && box.top < innerHeight && box.right <= innerWidth + 1;
        }""",
    )
    return found


def test_every_head_of_the_sample_opens(opened: Any, sample_page: Path) -> None:
    lab = opened(sample_page)
    page = plainly(lab)
    sample = real_sample()
    weights = np.asarray(qkv.inspect(sample.q, sample.k, sample.v).weights[...])
    assert len(weights) > 8
    for head, w in enumerate(weights):
        page.click(f'.heads td[data-column="{head}"]')
        assert f"Head {head}" in page.inner_text("main")
        page.fill(".field input[type=number]", "75")
        page.keyboard.press("Enter")
        bars = page.locator('.bars[aria-label="Best keys"] data').all()
        shown = [float(bar.get_attribute("value") or "nan") for bar in bars]
        np.testing.assert_allclose(shown, -np.sort(-w[75])[:4], atol=1e-6)
        page.wait_for_selector('canvas[data-missing="0"]')
    # The title has the number of the layer in its model, and the page counts no other.
    assert "layer 1 of 0..5" in page.inner_text("main .lead")
    assert "layer 0" not in page.inner_html("main").lower()
    assert lab.errors == []


def test_every_score_of_the_heads_is_explained(opened: Any, tiny_page: Path) -> None:
    """A student who has not met entropy or a sink reads what it is where it is chosen."""
    lab = opened(tiny_page)
    page = lab.open("inspect")
    for label in page.locator('fieldset:has(legend:text-is("Heads coloured by")) label').all():
        label.click()
        said = page.inner_text('[data-name="about-score"]')
        assert re.match(r"(Weight on|How |The |Entropy)[^.]+\. (Mean|The largest) of ", said), said
    assert lab.errors == []


def test_what_is_being_typed_outlives_a_redraw(opened: Any, sample_page: Path) -> None:
    lab = opened(sample_page)
    page = plainly(lab)
    field = page.locator(".field input[type=number]")
    field.press_sequentially("75")
    typed = field.input_value()
    assert typed != page.locator(".words .here").get_attribute("data-index")
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_selector(f'[data-theme="{theme}"]')
        assert field.input_value() == typed
    field.fill("1000")
    field.press("Enter")
    assert field.input_value() == "105"
    field.fill("")
    field.press("Enter")
    assert field.input_value() == "105"
    assert page.locator(".words .here").get_attribute("data-index") == "105"
    assert lab.errors == []


def test_every_head_of_a_model_opens(opened: Any, tiny_page: Path) -> None:
    lab = opened(tiny_page)
    page = plainly(lab)
    assert "random characters" in page.inner_text(".lead")
    for layer in range(2):
        for head in range(4):
            page.click(f'.heads td[data-row="{layer}"][data-column="{head}"]')
            assert f"Layer {layer}, head {head}" in page.inner_text("main")
            page.wait_for_selector('.bars[aria-label="Best keys"]')
            page.wait_for_selector('canvas[data-missing="0"]')
    assert lab.errors == []


@pytest.mark.parametrize("width", [1440, 390])
def test_a_click_on_a_map_leads_to_the_text(opened: Any, sample_page: Path, width: int) -> None:
    lab = opened(sample_page, width=width, height=844)
    page = plainly(lab)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.click('.heads td[data-column="6"]')
    assert is_in_sight(page, ".words")
    page.wait_for_selector('canvas[data-missing="0"]')
    page.locator(".mapholder canvas").scroll_into_view_if_needed()
    page.click(".mapholder canvas", position={"x": 60, "y": 120})
    assert is_in_sight(page, ".words")
    query = int(page.input_value(".field input[type=number]"))
    assert query > 0
    here = page.locator(".words .here")
    assert here.get_attribute("data-index") == str(query)
    assert here.inner_text() == real_sample().tokens[query]
    page.click('.words [data-index="30"]')
    assert page.input_value(".field input[type=number]") == "30"
    page.locator(".words").press("ArrowRight")
    assert page.input_value(".field input[type=number]") == "31"
    assert lab.errors == []


def test_keys_lead_from_the_maps_to_the_text(opened: Any, sample_page: Path) -> None:
    page = plainly(opened(sample_page))
    for place in ('.heads td[tabindex="0"]', ".mapholder canvas"):
        page.locator(place).focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.classList.contains('words')")


def test_a_file_says_where_heads_can_be_switched_off(
    opened: Any, tiny_page: Path, sample_page: Path
) -> None:
    page = plainly(opened(tiny_page))
    assert page.query_selector(".whatif") is None
    assert page.inner_text('[data-name="no-what-if"]') == (
        "Switching off heads of this model, and another text for it, need Python, "
        "qkv lab --model NAME; "
        "those of the panel Language model can be switched off here, and it reads a text of yours."
    )
    page.click('[data-name="no-what-if"] a')
    page.wait_for_selector('main[data-panel="language"] input[aria-label="Head 0.0 is on"]')
    # Arrays have no model that could be run again.
    assert plainly(opened(sample_page)).query_selector('[data-name="no-what-if"]') is None


def test_means_over_different_queries_say_how_many(opened: Any, tiny_page: Path) -> None:
    """Previous and own, duplicate and induction can add up to more than one in a row."""
    lab = opened(tiny_page)
    page = plainly(lab)
    heads = page.locator('[aria-label="All heads in numbers"] thead th').all_inner_texts()
    under = dict(text.split("\n")[:2] for text in heads if "\n" in text)
    assert under["sink"] == "of 64"
    assert under["previous"] == "of 63"
    assert int(under["induction"].removeprefix("of ")) < 64
    assert "not parts of one whole" in page.inner_text("main")
    page.click('label:has-text("induction")')
    assert f"the {under['induction'][3:]} queries" in page.inner_text('[data-name="about-score"]')
    # The bars are those of one query: with the rest they are one.
    page = lab.open("inspect", layer=1, head=2, query=45)
    bars = lab.numbers('.bars[aria-label="Best keys"]')
    [rest] = lab.numbers('.bars[aria-label="Best keys"] + p')
    assert sum(bars) + rest == pytest.approx(1, abs=1e-6)


def test_blanks_of_tokens_are_seen(opened: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 3))
    path = tmp_path / "page.html"
    tokens = ["The", " cat", "  ", "sat "]
    path.write_text(qkv.inspect(x, x, x).to_html(tokens), encoding="utf-8")
    page = plainly(opened(path))
    assert page.locator(".words span").all_inner_texts() == ["The", "␣cat", "␣␣", "sat␣"]
    bars = "".join(page.locator('.bars[aria-label="Best keys"] dt').all_inner_texts())
    assert "␣cat" in bars


def test_a_page_says_how_many_queries_it_has(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkv.lab.document._MOST_ROWS", 5)
    x = np.random.default_rng(0).normal(size=(12, 3))
    path = tmp_path / "page.html"
    path.write_text(qkv.inspect(x, x, x).to_html(), encoding="utf-8")
    lab = opened(path)
    page = lab.open("inspect", query=4)
    assert page.query_selector(".failure") is None
    page = lab.open("inspect", query=5)
    assert "the first 5 of 12 queries are in this page" in page.inner_text(".failure")


@pytest.mark.parametrize(("q_len", "kv_len", "missing"), [(3, 0, "keys"), (0, 3, "queries")])
def test_a_record_without_keys_or_queries_says_so(
    opened: Any, tmp_path: Path, q_len: int, kv_len: int, missing: str
) -> None:
    q, k = np.zeros((2, q_len, 4)), np.zeros((2, kv_len, 4))
    path = tmp_path / "empty.html"
    path.write_text(qkv.inspect(q, k, k).to_html(), encoding="utf-8")
    lab = opened(path)
    said = plainly(lab).inner_text("main")
    assert f"{q_len} queries, {kv_len} keys" in said
    assert said.endswith(f"Without {missing} there are no weights to show.")
    assert lab.errors == []


@pytest.mark.parametrize(("lengths", "factor"), [(0, 1.0), (3, np.nan)])
def test_a_record_without_a_weight_says_so(
    opened: Any, tmp_path: Path, lengths: int, factor: float
) -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 5, 4))
    record = qkv.inspect(q * factor, k, v, qkv.KeyLengths(lengths))
    (tmp_path / "record.html").write_text(record.to_html(), encoding="utf-8")
    lab = opened(tmp_path / "record.html")
    page = lab.open("inspect")
    assert "There are no weights to show" in page.inner_text('[data-name="empty"]')
    assert "undefined" not in page.inner_text("main")
    assert ("query holds NaN" in page.inner_text("main")) == np.isnan(factor)
    assert lab.errors == []


def test_queries_of_another_text_are_not_named_by_the_keys(opened: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    record = qkv.ModelRecord("translator")
    record.texts, record.decoder_texts = list("source"), list("target")
    for of_queries in ("decoder_input_ids", None):
        query, key = (rng.normal(size=(1, 2, 6, 8)) for _ in range(2))
        sequences = of_queries, "input_ids"
        record.add(query, key, name="cross", one_sequence=False, sequences=sequences)
    path = tmp_path / "page.html"
    path.write_text(record.to_html(), encoding="utf-8")
    lab = opened(path)

    def sides(layer: int) -> tuple[str, str]:
        page = lab.open("inspect", layer=layer, query=3)
        page.wait_for_selector(".lines text.from")
        assert page.inner_text(".words") == "source"
        assert not page.query_selector_all(".words .here")
        queries, keys = (page.locator(f".lines text.{side}") for side in ("from", "to"))
        return "".join(queries.all_text_contents()), "".join(keys.all_text_contents())

    assert sides(0) == ("target", "source")
    assert lab.page.inner_text("[data-name=query-token]") == "query g"
    assert sides(1) == ("012345", "source")
    assert not lab.page.query_selector("[data-name=query-token]")
