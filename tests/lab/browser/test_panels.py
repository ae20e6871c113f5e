"""Every panel does what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv.lab
from qkv.errata import ERRATA
from qkv.mechanisms import MECHANISMS

from .conftest import PANELS

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_opens(lab: Any, panel: str) -> None:
    page = lab.open(panel)
    assert page.get_attribute('nav a[aria-current="page"]', "href") == f"#{panel}"
    assert page.query_selector(".failure") is None
    assert page.query_selector(".waiting") is None
    assert len(page.inner_text("main")) > 200


def test_cells_are_edited_and_everything_follows(lab: Any) -> None:
    page = lab.open("start")
    page.click('table[aria-label="Q"] td[data-row="0"][data-column="0"]')
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    assert lab.grid("Q")[0, 0] == 3
    rows = lab.grid("Q") @ lab.grid("K").T / 2
    weights = np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(lab.grid("Weights"), weights, rtol=1e-12)
    page.wait_for_function("() => location.hash.includes('own=')")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    np.testing.assert_allclose(lab.grid("Weights"), weights, rtol=1e-12)
    page.click('label:has-text("causal")')
    assert (np.triu(lab.grid("Weights"), 1) == 0).all()


HELD = "that a cell can hold, from -1e100 to 1e100"


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("abc", "“abc” is not a number: The, column 0 stays 1."),
        ("1e400", f"“1e400” is not a number {HELD}: The, column 0 stays 1."),
        ("-1e101", f"“-1e101” is not a number {HELD}: The, column 0 stays 1."),
        ("", "An empty cell is not a number: The, column 0 stays 1."),
        ("1/0", f"“1/0” is not a number {HELD}: The, column 0 stays 1."),
        ("1/", "“1/” is not a number: The, column 0 stays 1."),
        ("1/2/3", "“1/2/3” is not a number: The, column 0 stays 1."),
    ],
)
def test_a_cell_says_why_it_stays_as_it_is(lab: Any, typed: str, why: str) -> None:
    page = lab.open("start")
    cell = 'table[aria-label="Q"] td[data-row="0"][data-column="0"]'
    for leave in ("Enter", "Tab"):
        page.click(cell)
        page.fill('table[aria-label="Q"] input', typed)
        page.keyboard.press(leave)
        assert page.inner_text(".matrices .failure").startswith(why)
        assert lab.grid("Q")[0, 0] == 1
    page.click(cell)
    page.keyboard.press("Escape")
    assert page.query_selector(".matrices .failure") is None


@pytest.mark.parametrize(
    ("typed", "number"), [("1/3", 1 / 3), ("-2 / 8", -0.25), ("−0,5/2", -0.25), ("1e2/4", 25)]
)
def test_a_cell_takes_a_fraction(lab: Any, typed: str, number: float) -> None:
    page = lab.open("start")
    page.click('table[aria-label="Q"] td[data-row="0"][data-column="0"]')
    page.fill('table[aria-label="Q"] input', typed)
    page.keyboard.press("Enter")
    assert lab.grid("Q")[0, 0] == number
    assert page.query_selector(".matrices .failure") is None


def test_numbers_are_pasted(lab: Any) -> None:
    page = lab.open("start")
    page.click("text=Paste Q, K and V")
    for role, text in (("Q", "1 0\n0 1"), ("K", "[[1, 0], [0, 1]]"), ("V", "1;2")):
        page.fill(f'label:has-text("{role}, a line for each token") textarea', text)
    page.click("text=Use these")
    assert lab.grid("Output").shape == (2, 1)
    page.click("text=Paste Q, K and V")
    page.fill('label:has-text("Q, a line") textarea', "1 0\n0")
    page.click("text=Use these")
    assert "differ in length" in page.inner_text(".failure")
    assert lab.grid("Output").shape == (2, 1)


def in_sight(page: Any, selector: str) -> bool:
    """Whether an element lies in the part of the page that is seen."""
    place = page.locator(selector).bounding_box()
    return bool(place["y"] >= 0 and place["y"] + place["height"] <= page.viewport_size["height"])


@pytest.mark.parametrize("width", [1280, 390])
def test_why_numbers_of_ones_own_are_refused_is_in_sight(
    opened: Any, width: int, tmp_path: Path
) -> None:
    """The form is at the end of a long page: a reason at its beginning would not be seen."""
    lab = opened(width=width)
    page = lab.open("start")
    page.click("text=Paste Q, K and V")
    page.fill('label:has-text("Q, a line") textarea', "1 0\n0")
    page.click("text=Use these")
    assert page.inner_text(".failure") == "The rows of Q differ in length."
    assert in_sight(page, ".failure")
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"no archive")
    page.set_input_files('input[type="file"]', broken)
    page.wait_for_selector('.failure:has-text("broken.npz: ")')
    assert in_sight(page, ".failure")
    page.click('table[aria-label="Q"] td[data-row="0"][data-column="0"]')
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    assert page.query_selector(".failure") is None
    assert lab.errors == []


def test_the_pipeline_grows_by_steps(lab: Any) -> None:
    page = lab.open("pipeline", token=1, ex="three")
    assert page.inner_text(".place") == "step 1 of 11"
    for count, step in enumerate(["Multiply", "Add", "Scale", "Mask"]):
        page.keyboard.press("ArrowRight")
        assert page.inner_text('.track [aria-current="step"]') == step
        assert len(page.query_selector_all(".growing thead th")) == count + 2
    page.keyboard.press("End")
    assert page.inner_text('.track [aria-current="step"]') == "Mix"
    page.keyboard.press("ArrowLeft")
    assert page.inner_text('.track [aria-current="step"]') == "Divide"


def test_the_words_of_the_pipeline_are_true_of_equal_and_forbidden_scores(lab: Any) -> None:
    """The token "sat" of the shared example gives "cat" and itself the same, its largest weight."""

    def said(step: int, **view: Any) -> str:
        text: str = lab.open("pipeline", step=step, **view).inner_text(".explained p:last-child")
        return text

    assert said(5, token=2) == "Now the largest is 0, and none is above it."
    assert "goes to “cat” and to “sat”; the entropy" in said(8, token=2)
    assert "goes to each of 4 keys" in said(8, token=2, ex="own", own=_EQUAL)
    assert f"of at most log 5 = {np.log(5):.4f}." in said(8, token=2)
    assert f"of at most log 2 = {np.log(2):.4f}." in said(8, token=1, mask="causal")
    assert "−∞ becomes 0" in said(6, token=1, mask="causal")
    assert "−∞ becomes 0" not in said(6, token=4, mask="causal")
    assert "every score is −∞" in said(5, mask="padding", keys=0)


_EQUAL = json.dumps([list("abcd"), "1,1,1,1", "2,2,2,2", "1,2,3,4"])
"""Four tokens of one number each, whose keys are the same."""


def test_tiles_rescale(lab: Any) -> None:
    page = lab.open("tiles", block=1, token=0)
    assert page.inner_text(".place") == "block 1 of 5"
    page.click("text=Next")
    assert "The running max grows from 0 to 1" in page.inner_text(".explained")
    assert np.isclose(lab.numbers(".explained"), np.exp(-1), rtol=1e-12, atol=0).any()


def test_a_size_of_tiles_beyond_its_limits_is_said(lab: Any) -> None:
    page = lab.open("tiles")
    field = page.locator('label:has-text("Keys in a block, 1 to 5") input')
    said = page.locator(".examplebar + .row .limit")
    for typed, taken, words in (
        ("9", "5", "9 is more than 5, the largest number here; 5 is taken."),
        ("0", "1", "0 is less than 1, the smallest number here; 1 is taken."),
        ("2.6", "3", "2.6 is not a whole number; 3 is taken."),
    ):
        field.fill(typed)
        field.press("Enter")
        assert field.input_value() == taken
        assert said.inner_text() == words
        field.press("Tab")  # Leaving the field is not a second answer.
        assert said.inner_text() == words
    field.fill("2")
    field.press("Enter")
    assert said.count() == 0


def test_a_size_of_tiles_that_an_example_is_too_short_for_is_said(lab: Any) -> None:
    page = lab.open("tiles", block=5)
    assert page.locator('[data-name="too-long"]').count() == 0
    page.select_option(".examplebar select", "three")
    words = page.inner_text('[data-name="too-long"]')
    assert words == "Blocks of 5 keys were chosen; there are 3 keys here, so 3 are taken."


def test_mechanisms_say_how_they_differ_from_full_attention(lab: Any) -> None:
    page = lab.open("mechanisms")
    card = '.multiples button:has(b:text-is("{}")) .faint'
    assert page.inner_text(card.format("kv-cache-decoding")).startswith(
        "the same as causal attention, which differs by 0.77"
    )
    assert page.inner_text(card.format("sliding-window")).startswith("causal: differs by")
    assert page.inner_text(card.format("flash")) == "the same as full attention"
    page.click('.multiples button:has(b:text-is("kv-cache-decoding"))')
    page.wait_for_selector('.chosen-mechanism h3:text-is("kv-cache-decoding")')
    assert "no token reads a later one" in page.inner_text(".chosen-mechanism")
    page.click('.multiples button:has(b:text-is("differential"))')
    page.wait_for_selector('.chosen-mechanism h3:text-is("differential")')
    assert "orange is negative" in page.inner_text(".chosen-mechanism .legend")


def test_all_mechanisms_are_there(lab: Any) -> None:
    page = lab.open("mechanisms")
    names = [each.inner_text() for each in page.query_selector_all(".multiples b")]
    assert sorted(names) == sorted(MECHANISMS)
    families = page.eval_on_selector_all(".family > h3", "all => all.map((each) => each.innerText)")
    assert families == ["Lookup", "Heads", "Positions", "Sparse", "Linear time", "Streaming"]
    for name in ("differential", "causal"):
        page.click(f'.multiples button:has(b:text-is("{name}"))')
        page.wait_for_selector(f'.chosen-mechanism h3:text-is("{name}")')
        assert page.query_selector("section:has(h3:text-is('Heads')) .chosen-mechanism") is not None
    mathematics = page.query_selector(".chosen-mechanism math mfrac msqrt")
    assert mathematics.bounding_box()["height"] > 5
    assert "a token sees itself and what came before" in page.inner_text(".sentences")
    link = page.get_attribute(".chosen-mechanism a", "href")
    assert link == "https://arxiv.org/abs/1706.03762"
    page.click('.multiples button:has-text("grouped-query")')
    page.click('fieldset:has-text("Head") label:has-text("3")')
    assert lab.grid("Token mixing, head 3").shape == (5, 5)


def test_the_heads_of_a_model(lab: Any) -> None:
    page = lab.open("inspect", score="induction")
    scores = lab.grid("induction: layers down, heads across")
    assert scores.shape == (2, 4)
    layer, head = np.unravel_index(scores.argmax(), scores.shape)
    page.click(f'.heads td[data-row="{layer}"][data-column="{head}"]')
    assert f"Layer {layer}, head {head}" in page.inner_text("main")
    assert "induction" in page.inner_text(".kind")
    page.wait_for_selector('canvas[data-missing="0"]')
    assert "Attention is not explanation" in page.inner_text(".lead + p")


def test_a_map_shows_the_weight_under_the_pointer(lab: Any) -> None:
    page = lab.open("inspect", layer=1, head=1, query=40, kkey=9)
    page.wait_for_selector('canvas[data-missing="0"]')
    page.wait_for_function(
        "() => document.querySelector('.readout [data-name=weight]').innerText !== '…'"
    )
    [weight] = lab.numbers(".readout")
    keys = {row[0].split()[0]: row for row in bars(page)}
    assert abs(weight - float(keys["9"][1])) < 1e-6
    painted = page.evaluate(
        """() => {
            const canvas = document.querySelector(".mapholder canvas");
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(pixels.data.buffer)).size;
        }"""
    )
    assert painted > 10


def bars(page: Any) -> list[list[str]]:
    found: list[list[str]] = page.eval_on_selector_all(
        '.bars[aria-label="Best keys"] > div',
        "all => all.map((x) => [x.querySelector('dt').innerText, x.querySelector('data').value])",
    )
    return found


def test_lines_of_code_show_their_values(lab: Any) -> None:
    page = lab.open("code", token=1)
    assert page.inner_text('[role="option"] >> nth=2').splitlines()[0].strip() == "scores = Q @ K.T"
    assert lab.numbers('[data-line="2"]') == [3, 0, 2, 1, 0.5]
    page.click('label:has-text("torch")')
    assert "torch.exp" in page.inner_text(".code")
    assert lab.numbers('[data-line="2"]') == [3, 0, 2, 1, 0.5]


def test_every_listing_says_what_its_lines_do(lab: Any) -> None:
    page = lab.open("code", code="self", token=1)
    assert "class SelfAttention" in page.inner_text(".code")
    weights = '[role="option"]:has-text("weights = ") .values'
    assert page.inner_text(weights) == "0.4026, 0.0898, 0.2442, 0.1481, 0.1153"
    page.click('label:has-text("torch")')
    assert "torch.nn.Module" in page.inner_text(".code")
    assert page.inner_text(weights).startswith("0.4026")
    lab.open("code", code="causal", token=1)
    assert page.inner_text('[role="option"]:has-text("seen = ") .values') == "1, 1, 0, 0, 0"
    assert page.inner_text(".py-keyword >> nth=0") == "def"
    for line in page.query_selector_all('[role="option"]'):
        line.click()
        assert line.query_selector(".note").inner_text()
    lab.open("code", code="causal", ex="three")
    page.click('button:has-text("the shared example")')
    page.wait_for_selector('[role="option"]:has-text("seen = ") .values')


def test_no_erratum_is_displayed_as_right(lab: Any) -> None:
    page = lab.open("errata")
    assert len(page.query_selector_all(".errata > li")) == len(ERRATA)
    for erratum in ERRATA:
        place = f'.errata > li[data-name="{erratum.name}"]'
        assert page.inner_text(f"{place} .wrong del") == erratum.printed
        assert page.inner_text(f"{place} .right ins") == erratum.right
        assert "✗ printed" in page.inner_text(f"{place} .wrong")
        assert erratum.printed not in page.inner_text(f"{place} .right").splitlines()
    page = lab.open("scaling")
    wrong = page.locator(".claims .wrong s").all_inner_texts()
    assert wrong == [
        "With the divisor, the softmax is as sharp at every d_k.",
        "The largest score is subtracted because exp(500) overflows.",
    ]
    assert "overflows" not in "".join(page.locator(".claims li.right > p").all_inner_texts())


@pytest.mark.parametrize("host", ["lab", "served"])
def test_answers_are_checked(host: str, request: pytest.FixtureRequest) -> None:
    lab = request.getfixturevalue(host)
    page = lab.open("exercises")
    for name, answer, right in (
        ("003.1", "[[1, 0.5], [1, 0.73]]", True),
        ("003.2", "0.2 0.2 0.2 0.2 0.2", False),
        ("003.5", "true, false", True),
        ("003.10", "1000000", False),
    ):
        place = f'.exercise[data-name="{name}"]'
        page.fill(f"{place} textarea", answer)
        page.click(f"{place} button")
        said = page.locator(f"{place} .answer").inner_text()
        assert said.startswith("✓ right" if right else "✗ wrong")


def test_a_page_without_heads_says_how_to_get_them(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "small.html"
    path.write_text(qkv.lab.to_html(), encoding="utf-8")
    lab = opened(path)
    page = lab.open("start")
    assert "Not in this page: the panel Inspect" in page.inner_text('[data-name="absent"]')
    assert page.query_selector('nav a[href="#inspect"]') is None
    page.click('[data-name="absent"] a')
    page.wait_for_selector('main[data-panel="inspect"]')
    assert page.inner_text("#panel-title") == "Inspect"
    assert "qkv lab --model language --export" in page.inner_text("main")
    assert "#inspect" in page.url
    assert lab.errors == []


@pytest.mark.parametrize("host", ["lab", "served"])
def test_help_and_progress_of_an_exercise(host: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(host).open("exercises")
    place = '.exercise[data-name="003.8"]'
    page.wait_for_selector(".progress")
    page.evaluate("localStorage.clear()")
    page.reload()
    page.wait_for_selector(".progress")
    assert page.locator(".progress").inner_text().startswith("0 of 11 done.")
    page.click(f"{place} button:text-is('Hint')")
    assert page.locator(f"{place} .hint").inner_text().startswith("Hint. Its score is c / 2")
    assert page.locator(f"{place} .solution").count() == 0
    page.click(f"{place} button:text-is('Solution')")
    solved = page.locator(f"{place} .solution code").inner_text()
    page.fill(f"{place} textarea", solved)
    page.click(f"{place} button.main")
    page.wait_for_selector(f"{place} .answer.right")
    assert page.locator(f"{place} .done").inner_text() == "✓ done"
    page.reload()
    page.wait_for_selector(".progress")
    assert page.locator(".progress").inner_text().startswith("1 of 11 done.")
    page.click(".progress button")
    assert page.locator(".progress").inner_text().startswith("0 of 11 done.")


def test_a_table_is_copied(opened: Any) -> None:
    lab = opened(permissions=["clipboard-read", "clipboard-write"])
    page = lab.open("heatmap")
    page.click('button[aria-label="Copy weights matrix"]')
    rows = page.evaluate("navigator.clipboard.readText()").split("\n")
    assert rows[0].split("\t") == ["", "The", "cat", "sat", "on", "mat"]
    assert json.loads(rows[1].split("\t")[2]) == pytest.approx(0.297641942691882, abs=1e-15)


@pytest.mark.parametrize("word", ["casual", "constructor"])
def test_a_word_that_no_panel_knows_opens_the_panel(opened: Any, word: str) -> None:
    lab = opened()
    for panel in ("heatmap", "inspect"):
        lab.open(panel, mask=word, theme=word, ramp=word, reduce=word)
        assert lab.page.is_visible("main h2")
    lab.open("heatmap", mask=word)
    assert lab.page.is_checked('label:has-text("none") input')
    assert not lab.errors
