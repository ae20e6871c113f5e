"""The language model that runs in the page has the digits of Python's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.inspection.heads.head_scores import MEANINGS, THRESHOLD
from qkv.samples import language_model

from .conftest import lab_server

pytestmark = pytest.mark.browser

SCRIPT = Path(__file__).parents[3] / "lab" / "test" / "language.mjs"
TEXTS = ["Mr. Darcy was not of the party; and Ünder £5, she\nsaid, no. \U0001f600", "She", ""]
TOLERANCE = 1e-10
"""The largest difference of logits and losses: both are float64, and only sum in other orders."""


SENTENCE = "The party was \N{HOT BEVERAGE} at \N{HOT BEVERAGE} five"
"""The language model does not know the cup."""


def computed(asked: list[dict[str, Any]]) -> Any:
    """What the script of the page computes of texts."""
    node = shutil.which("node")
    assert node is not None
    answer = subprocess.run(
        [node, str(SCRIPT)], input=json.dumps(asked), capture_output=True, check=True, text=True
    )
    return json.loads(answer.stdout)


def test_tokens_scores_and_weights_are_those_of_python() -> None:
    model = language_model()
    asked = [
        {"text": text, "off": ["2.1", "0.3"], "temperature": 0.7}
        for text in (*TEXTS, "Elizabeth could not help smiling. " * 9)
    ]
    for given, found in zip(asked, computed(asked), strict=True):
        ids, changes = model.encode(str(given["text"])), {(2, 1): "off", (0, 3): "off"}
        assert found["ids"] == ids
        if not ids:
            continue
        logits = model.logits(ids, changes)
        np.testing.assert_allclose(found["logits"], logits, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(found["losses"], model.loss(ids, changes), atol=TOLERANCE)
        warm = model.next_probabilities(ids, 0.7, changes)
        np.testing.assert_allclose(found["next"], warm, rtol=0, atol=TOLERANCE)
        # The heads of layer 0 read what no head has changed.
        weights = model.inspect(ids, keep="weights")[0].weights[0]
        for head, rows in enumerate(found["weights"][0]):
            full = [row + [0.0] * (len(ids) - len(row)) for row in rows]
            np.testing.assert_allclose(full, weights[head], rtol=0, atol=1e-6)


@pytest.mark.parametrize("host", ["lab", "served"])
def test_a_typed_sentence_and_a_head_that_is_off(host: str, request: pytest.FixtureRequest) -> None:
    lab = request.getfixturevalue(host)
    model, text = language_model(), "The ladies were not at all"
    page = lab.open("language")
    page.wait_for_selector(".smallheads canvas")
    page.fill(".own-text textarea", text)
    ids = model.encode(text)
    tokens = "all => all.map((each) => each.textContent.replaceAll('␣', ' '))"

    def seen(temperature: float, changes: Any) -> None:
        p = model.next_probabilities(ids, temperature, changes)
        best = np.argsort(-p, kind="stable")[:8]
        np.testing.assert_allclose(
            lab.numbers('[data-name="next"]'), p[best], rtol=0, atol=TOLERANCE
        )
        names = page.eval_on_selector_all('[data-name="next"] .token', tokens)
        assert names == model.tokens(best.tolist())

    seen(1.0, {})
    assert page.locator(".smallheads canvas").count() == 16
    page.focus("#temperature")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    seen(0.8, {})
    page.uncheck('input[aria-label="Head 2.1 is on"]')
    page.uncheck('input[aria-label="Head 3.0 is on"]')
    off: dict[tuple[int, int], str] = {(2, 1): "off", (3, 0): "off"}
    seen(0.8, off)
    losses = [model.loss(ids).mean(), model.loss(ids, off).mean()]
    np.testing.assert_allclose(lab.numbers('[data-name="loss"]'), losses, atol=TOLERANCE)
    page.click("text=All heads on")
    seen(0.8, {})
    page.click("text=Add the most probable")
    added = model.tokens([int(model.logits(ids)[-1].argmax())])[0]
    assert page.input_value(".own-text textarea") == text + added


def test_the_weights_of_a_head_that_is_chosen(lab: Any) -> None:
    model, text = language_model(), "She was very happy"
    page = lab.open("language", text=text, llayer=1, lhead=2, lquery=2)
    ids = model.encode(text)
    row = model.inspect(ids, keep="weights")[1].weights[0, 2, 2]
    shown = lab.numbers('[data-name="reads"]')
    np.testing.assert_allclose(shown, np.sort(row[:3])[::-1][: len(shown)], rtol=0, atol=1e-6)
    page.fill(".own-text textarea", "")
    assert page.query_selector(".smallheads") is None


def test_the_kinds_of_heads_are_those_of_inspect(lab: Any) -> None:
    model = language_model()
    texts = (
        *TEXTS[:2],
        "Elizabeth could not help smiling. " * 4,
        "to to to to to",
        "I a",
        SENTENCE,
    )
    seen = set()
    asked = [{"text": text, "off": [], "temperature": 1, "threshold": THRESHOLD} for text in texts]
    for text, found in zip(texts, computed(asked), strict=True):
        for row, kind in zip(
            model.inspect(text).rows(), chain.from_iterable(found["kinds"]), strict=True
        ):
            assert kind == row["kind"], (text, row["layer"], row["head"])
            seen.add(kind)
        counted = model.inspect(text)[0].scores.counted
        assert found["counts"] == {name: counted[name].sum() for name in found["counts"]}
    assert seen == {None, "induction", "duplicate", "previous", "own", "sink"}
    counted = model.inspect(texts[2])[0].scores.counted
    page = lab.open("language", text=texts[2], llayer=1, lhead=1)
    page.wait_for_selector(".smallheads canvas")
    notes = page.locator(".smallheads small").all_inner_texts()
    for note, row in zip(notes, model.inspect(texts[2]).rows(), strict=True):
        kind, _, share = note.partition(" ")
        assert kind == (row["kind"] or "")
        assert not kind or abs(float(share) - row[kind]) < 0.0051
        assert not kind or counted[kind].sum() >= 3
    once = "The nurse told her that she was late because she had slept"
    page = lab.open("language", text=once, llayer=0, lhead=1)
    page.wait_for_selector(".smallheads canvas")
    assert page.locator(".smallheads small").nth(1).inner_text() == "induction 1.00\xa0of\xa01"
    assert "over the one token that has such a key" in page.inner_text("main")
    page = lab.open("language", text=texts[2], llayer=1, lhead=1)
    words = page.inner_text("main")
    assert "puts 0.4 or more of its weight on the token before," in words
    assert all(f"{kind}: {meaning}" in words for kind, meaning in MEANINGS.items())


def test_tokens_that_the_model_does_not_know_are_counted(lab: Any) -> None:
    page = lab.open("language", text=SENTENCE)
    ids = language_model().encode(SENTENCE)
    assert ids.count(0) == 2
    said = (
        f"2 of these {len(ids)} tokens are unknown to the model, which reads each of them as “�”."
    )
    assert page.inner_text('[data-name="unknown"]') == said
    page.fill(".own-text textarea", "I \N{GRINNING FACE}")
    said = "1 of these 3 tokens is unknown to the model, which reads it as “�”."
    assert page.inner_text('[data-name="unknown"]') == said
    page.fill(".own-text textarea", "She was happy")
    assert page.query_selector('[data-name="unknown"]') is None
    page = lab.open("tour", sentence="I \N{GRINNING FACE}")
    assert page.inner_text('[data-name="unknown"]') == said


@pytest.mark.parametrize(
    ("panel", "place", "most"), [("language", "textarea", 4096), ("tour", "input", 200)]
)
def test_a_text_that_fills_its_field_is_said_to(
    lab: Any, panel: str, place: str, most: int
) -> None:
    """What is pasted beyond is gone, and the model reads the last tokens of the rest."""
    page = lab.open(panel)
    page.fill(f".own-text {place}", "He was. " * most)
    assert f"the first {most:,} characters" in page.inner_text('[data-name="full"]')
    page.fill(f".own-text {place}", "w" * (most - 1))
    assert page.query_selector('[data-name="full"]') is None


def begins_with_the_sentence(page: Any) -> None:
    """Each panel that reads a text has read the sentence of the command line."""
    words = "all => all.map((each) => each.textContent).join('').replaceAll('␣', ' ')"
    read = SENTENCE.replace("\N{HOT BEVERAGE}", "�")
    for panel in ("inspect", "language"):
        page.click(f'nav a[href="#{panel}"]')
        page.wait_for_selector(f'main[data-panel="{panel}"] .words')
        assert page.eval_on_selector_all(".words span", words) == read
    assert page.input_value(".own-text textarea") == SENTENCE
    page.click('nav a[href="#tour"]')
    page.wait_for_selector(".tourpicture")
    assert page.input_value(".own-text input") == SENTENCE


def test_panels_begin_with_the_sentence_of_the_command(opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.html"
    command = [sys.executable, "-m", "qkv", "lab", SENTENCE, "--export", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    lab = opened(path)
    lab.page.goto(lab.address)
    said = (
        "Heads of this model can be switched off in the panel Language model, which also reads a "
        "text of yours."
    )
    assert lab.page.inner_text('[data-name="no-what-if"]') == said
    begins_with_the_sentence(lab.page)
    assert lab.errors == []


@pytest.fixture
def sentence_address() -> Iterator[str]:
    with lab_server(SENTENCE) as address:
        yield address


def test_the_server_gives_the_sentence_to_its_panels(chromium: Any, sentence_address: str) -> None:
    page = chromium.new_page()
    page.goto(sentence_address)
    begins_with_the_sentence(page)
    page.close()


def test_a_page_with_the_model_is_small(file_page: Path) -> None:
    assert file_page.stat().st_size < 4e6


def test_words_of_the_field_are_explained_where_they_are_first_seen(lab: Any) -> None:
    page = lab.open("language")
    assert "−log p, in natural logarithms" in page.inner_text('[data-name="how-good"]')
    assert "Kneser-Ney smoothing, which gives" in page.inner_text('[data-name="how-good"]')
    page = lab.open("heatmap")
    assert "lse is log Σ e^score" in page.inner_text("main")
    for panel, what in (("heatmap", "Entropy is −Σ w log w"), ("scaling", "Entropy is in nats")):
        assert what in lab.open(panel).inner_text("main")
        assert "natural logarithm" in page.inner_text("main")


def test_tokens_beside_the_numbers_of_all_heads_are_quoted(lab: Any) -> None:
    page = lab.open("language", text="It was, as usual", off="0.0 0.1 1.1")
    said = page.inner_text('main p:has-text("With all heads:")')
    assert said.count("“") == said.count("”") == 3
