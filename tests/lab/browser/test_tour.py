"""The tour from a sentence to its next token: numbers of Python, keys, play and pause, motion."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from safetensors.numpy import load

import qkv
from qkv.samples import language_model
from qkv.samples.language import LanguageModel, language_model_bytes

from .test_keyboard import press, tab_to
from .test_pictures import SVG, saved
from .test_places import is_seen

pytestmark = pytest.mark.browser

TEXT = "He was a very pleasant young"
STEPS = (
    "tokens", "rows", "normed", "roles", "scores", "scaled", "mask", "weights", "values", "heads",
    "added", "layers", "next",
)  # fmt: skip
HEAD, SIZE = 3, 32
TOLERANCE = 1e-10
TABLE = '[aria-label="In numbers"]'


def quoted(tokens: list[str]) -> list[str]:
    return [f"“{token.replace(' ', '␣')}”" for token in tokens]


def turned(x: Any) -> Any:
    """RoPE from its definition: pairs as complex numbers."""
    half = x.shape[1] // 2
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(half) / half)
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], axis=1)


def first_layers(count: int) -> LanguageModel:
    """A model that ends after some layers."""
    data = language_model_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    weights = {
        name: array
        for name, array in load(data).items()
        if not name.startswith("layers.") or int(name.split(".")[1]) < count
    }
    return LanguageModel(weights, json.loads(header["__metadata__"]["about"]))


def require(lab: Any, step: str, wanted: Any) -> None:
    """The numbers of the step's table are these, row by row."""
    lab.open("tour", tour=STEPS.index(step))
    lab.page.wait_for_selector(f'[data-step="{step}"]')
    wanted = np.asarray(wanted, float)
    found = lab.numbers(f"{TABLE} tbody")
    np.testing.assert_allclose(np.reshape(found, wanted.shape), wanted, rtol=0, atol=TOLERANCE)


def test_the_numbers_are_those_of_python(lab: Any) -> None:
    model = language_model()
    ids = model.encode(TEXT)
    names = quoted(model.tokens(ids))
    lab.open("tour", tour=0)
    assert lab.table("In numbers") == [
        [name, str(index)] for name, index in zip(names, ids, strict=True)
    ]
    weights = load(language_model_bytes())
    table = {
        name: array * weights[f"{name}.scale"].astype(float)[:, None]
        for name, array in weights.items()
        if f"{name}.scale" in weights
    }
    divisor = lambda x: np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)  # noqa: E731
    learned = table["embedding.weight"][ids]
    rows = learned / divisor(learned)
    require(lab, "rows", learned[:, :4])
    require(lab, "normed", np.concatenate([divisor(learned), rows[:, :4]], axis=1))
    query, key, value, variants = next(model.attention_inputs(ids))
    q, k, v = turned(query[HEAD]), turned(key[HEAD]), value[HEAD]
    require(lab, "roles", np.stack([q[-1], k[-1], v[-1]])[:, :4])
    require_said(lab, divisor(rows[-1]))
    raw = q @ k.T
    require(lab, "scores", raw[-1])
    scaled = raw / np.sqrt(SIZE)
    require(lab, "scaled", np.stack([raw[-1], scaled[-1]], axis=1))
    require(lab, "mask", np.where(np.tri(len(ids), dtype=bool), scaled, -np.inf))
    exp = np.exp(scaled[-1] - scaled[-1].max())
    record = model.inspect(ids, keep="weights")
    w = np.asarray(record[0].weights[0])[:, -1]
    np.testing.assert_allclose(w[HEAD], exp / exp.sum(), atol=1e-6)
    require(lab, "weights", np.stack([scaled[-1], exp, exp / exp.sum()], axis=1))
    shares = (exp / exp.sum())[:, None] * v
    require(lab, "values", np.concatenate([shares, shares.sum(0)[None]])[:, :4])
    require_heads(lab, w)
    out = np.asarray(qkv.attention(query, key, value, *variants))
    mixed = table["layers.0.out_proj.weight"] @ out[:, -1].reshape(-1)
    x = rows[-1] + mixed
    wide = np.maximum(table["layers.0.up_proj.weight"] @ (x / divisor(x)), 0) ** 2
    written = table["layers.0.down_proj.weight"] @ wide
    added = [rows[-1], mixed, written, x + written]
    require(lab, "added", [[np.linalg.norm(row), *row[:4]] for row in added])
    require_said(lab, divisor(x))
    guesses = [first_layers(count).next_probabilities(ids) for count in range(5)]
    require(lab, "layers", [p.max() for p in guesses])
    tokens = [row[1] for row in lab.table("In numbers")]
    assert tokens == quoted(model.tokens([int(p.argmax()) for p in guesses]))
    best = np.argsort(-guesses[-1])[:5]
    require(lab, "next", guesses[-1][best])
    assert [row[0] for row in lab.table("In numbers")] == quoted(model.tokens(best.tolist()))


def require_said(lab: Any, divisor: Any) -> None:
    """Require that the text of this step has the number by which it divides the row."""
    assert np.abs(np.array(lab.numbers(".explained")) - divisor).min() < TOLERANCE


def require_heads(lab: Any, weights: Any) -> None:
    """A record keeps weights in float32."""
    lab.open("tour", tour=STEPS.index("heads"))
    found = np.reshape(lab.numbers(f"{TABLE} tbody"), weights.shape)
    np.testing.assert_allclose(found, weights, atol=1e-6)


def test_a_sentence_of_ones_own_that_grows(lab: Any) -> None:
    page = lab.open("start")
    page.click("text=Take the tour")
    page.wait_for_selector('main[data-panel="tour"]')
    field = "main .own-text input"
    page.fill(field, "")
    assert page.query_selector(".tourpicture") is None
    page.fill(field, "I")
    for step in STEPS:
        page.wait_for_selector(f'[data-step="{step}"]')
        press(page, "ArrowLeft") if step == "tokens" else None
        page.locator("main .stepper button.main").click() if step != "next" else None
    model = language_model()
    page.fill(field, "It is a truth universally acknowledged, that a young man")
    ids = model.encode(page.input_value(field))[-8:]
    best = model.tokens([int(model.logits(ids)[-1].argmax())])[0]
    page.click("text=and begin again")
    assert page.input_value(field).endswith(f"young man{best}")
    page.wait_for_selector('[data-step="tokens"]')
    assert len(lab.table("In numbers")) == 8
    assert page.evaluate("document.activeElement.innerText").startswith("Play")
    page.click("text=All of its heads")
    assert page.input_value('main[data-panel="language"] textarea').endswith(f"man{best}")


def test_keys_lead_through_the_tour(lab: Any) -> None:
    page = lab.open("tour")
    for step in STEPS[1:]:
        press(page, "ArrowRight")
        page.wait_for_selector(f'[data-step="{step}"]')
        assert page.get_attribute(".explained", "aria-live") == "polite"
        title = page.inner_text(".explained h3")
        assert title in (page.get_attribute(".tourpicture", "aria-label") or "")
    press(page, "ArrowRight", "ArrowLeft")
    page.wait_for_selector('[data-step="layers"]')
    press(page, "Home")
    page.wait_for_selector('[data-step="tokens"]')
    tab_to(page, ".tourbar button")
    assert page.evaluate("document.activeElement.innerText").startswith("Play")
    press(page, "?")
    assert "play, and pause" in page.inner_text("dialog[open]")


def step_of(page: Any) -> str:
    name: str = page.get_attribute(".explained", "data-step")
    return name


def test_it_plays_pauses_and_ends(opened: Any) -> None:
    """The clock of the page is one that the test moves."""
    lab = opened(reduced_motion="no-preference")
    page = lab.page
    page.clock.install()
    page.goto(f"{lab.address}#tour")
    page.wait_for_selector(".tourpicture")

    def wait(step: str) -> None:
        for _ in range(60):
            page.clock.run_for(1000)
            if step_of(page) != step:
                return

    wait("tokens")
    assert step_of(page) == "tokens"
    press(page, "p")
    assert page.inner_text(".tourbar button").startswith("Pause")
    for before, after in pairwise(STEPS[:6]):
        wait(before)
        assert step_of(page) == after
    press(page, "p")
    wait("scaled")
    assert step_of(page) == "scaled"
    # Who goes a step by hand reads on by hand.
    press(page, "p", "ArrowLeft")
    page.clock.run_for(100)
    assert page.inner_text(".tourbar button").startswith("Play")
    wait("scores")
    assert step_of(page) == "scores"
    press(page, "p")
    for before in STEPS[3:]:
        wait(before)
    assert step_of(page) == "next"
    assert page.inner_text(".tourbar button").startswith("Play")
    press(page, "p")
    page.clock.run_for(100)
    assert step_of(page) == "tokens"
    assert lab.errors == []


def test_things_move_to_their_next_place(opened: Any) -> None:
    """One element goes from the line of tokens to their column, unless motion is not wanted."""
    for wanted, moves in (("no-preference", True), ("reduce", False)):
        page = opened(reduced_motion=wanted).open("tour")
        token = page.query_selector(".tourpicture .token")
        place = "(each) => each.style.transform"
        before = token.evaluate(place)
        press(page, "ArrowRight")
        page.wait_for_selector('[data-step="rows"]')
        assert token.evaluate("(each) => each.isConnected")
        assert token.evaluate(place) != before
        running = "(each) => each.getAnimations().length"
        assert (token.evaluate(running) > 0) is moves
        assert (page.evaluate("document.getAnimations().length") > 0) is moves


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1366, 768), (1920, 1080)])
def test_picture_and_words_are_in_one_sight(opened: Any, width: int, height: int) -> None:
    lab = opened(width=width, height=height)
    page = lab.open("tour")
    for step in STEPS[1:]:
        press(page, "ArrowRight")
        page.wait_for_selector(f'[data-step="{step}"]')
        assert is_seen(page, ".explained h3"), step
        assert is_seen(page, ".explained p"), step
        assert is_seen(page, ".tourpicture"), step
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert lab.errors == []


def test_a_picture_is_saved_as_it_is_seen(lab: Any, tmp_path: Path) -> None:
    page = lab.open("tour", tour=4)
    root = ElementTree.parse(saved(page, "The query meets the keys", "svg", tmp_path)).getroot()
    groups = [each.get("transform", "") for each in root.iter(f"{SVG}g")]
    places = {each for each in groups if each.startswith("matrix")}
    assert len(places) > 20
    assert "␣young" in {"".join(each.itertext()) for each in root.iter(f"{SVG}text")}
