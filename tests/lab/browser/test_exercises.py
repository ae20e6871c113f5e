"""What the page says of answers beside what Python says of them."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.exercises import EXERCISES, check
from qkv.lab.session import Session

pytestmark = pytest.mark.browser

TESTS = Path(__file__).parents[2]
SCRIPT = TESTS.parent / "lab" / "test" / "answers.mjs"
WRITTEN = json.loads((TESTS / "teaching" / "written_answers.json").read_text("utf-8"))


def texts() -> list[str]:
    """Everything of the table, solutions, usual mistakes, and random pieces of answers."""
    exercises = Session().answer("exercises").result["exercises"]
    found = [text for text, _ in WRITTEN["read"]]
    found += [
        text for kind in ("unclear", "endless", "mixed", "nameless") for text in WRITTEN[kind]
    ]
    found += [exercise.solved for exercise in EXERCISES]
    for exercise in exercises:
        numbers = exercise["numbers"] or {"right": [], "mistakes": []}
        for each in (*numbers["right"], *numbers["mistakes"]):
            shifted = (np.asarray(each["numbers"]) + 0.0207).tolist()
            found += [json.dumps(each["numbers"]), json.dumps(shifted)]
    rng = np.random.default_rng(0)
    pieces = [*"12e()[],;-+*/^\n", "2.5", "0,5", "log(", "**", "pi", "np.", "c=", "sqrt", "1e3"]
    pieces += [
        "yes",
        "no",
        "n",
        "d",
        "d_k",
        "nd",
        "σ",
        "²",
        "³",
        "%",
        "percent",
        "x",
        "÷",
        "by",
        "√",
        "1,000",
    ]
    for count in rng.integers(1, 9, 4000):
        joint = ("", " ")[int(rng.integers(2))]
        found.append(joint.join(rng.choice(pieces, count)))
    return found


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_says_what_python_says() -> None:
    exercises = Session().answer("exercises").result["exercises"]
    given = {"exercises": exercises, "texts": texts()}
    ran = subprocess.run(
        ["node", str(SCRIPT)], input=json.dumps(given), capture_output=True, text=True, check=True
    )
    said = json.loads(ran.stdout)
    for exercise, verdicts in zip(EXERCISES, said, strict=True):
        for text, verdict in zip(given["texts"], verdicts, strict=True):
            wanted = check(exercise.name, text)
            assert verdict == asdict(wanted), (exercise.name, text)


@pytest.mark.parametrize("host", ["lab", "served"])
def test_a_wrong_answer_is_told_why(host: str, request: pytest.FixtureRequest) -> None:
    page = request.getfixturevalue(host).open("exercises")
    cases: list[tuple[str, str, Any]] = [
        ("003.1", "[[0.5, 0.5], [0.73, 0.27]]", "these are the weights; multiply them by V."),
        ("003.2", "0,2 0,2 0,2 0,2 0,2", "4 of 5 numbers are off; the furthest is 0.2 at index 1."),
        ("003.8", "c = ln 297", "this leaves out the divisor; scores are c / sqrt(4)."),
        ("003.10", "10**6", "this is n^2, the number of scores; each takes 4 d operations."),
    ]
    for name, answer, why in cases:
        place = f'.exercise[data-name="{name}"]'
        page.fill(f"{place} textarea", answer)
        page.click(f"{place} button.main")
        assert page.locator(f"{place} .answer").inner_text() == f"✗ wrong {why}"


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("003.9", "8 sigma^2", "✓ right"),
        ("003.9", "÷32", "✓ right"),
        ("003.10", "4 n² d", "✓ right"),
        ("003.2", "15 %, 25 %, 25 %, 15 %, 20 %", "✓ right"),
        ("003.9", "8 tau^2", '? not checked "tau" has no value here; write its number.'),
        ("003.8", "??", "? not checked this could not be read as a number"),
        ("003.2", "1/4", "? not checked one number is given; 5 numbers are asked for."),
    ],
)
def test_what_cannot_be_read_is_not_wrong(lab: Any, name: str, answer: str, said: str) -> None:
    page = lab.open("exercises")
    place = f'.exercise[data-name="{name}"]'
    page.fill(f"{place} textarea", answer)
    page.click(f"{place} button.main")
    assert page.locator(f"{place} .answer").inner_text().startswith(said)
    assert page.locator(f"{place} .wrong").count() == 0


def test_answers_stay_while_another_panel_is_shown(lab: Any) -> None:
    """Exercises are worked out with the other panels."""
    page = lab.open("exercises")
    place = '.exercise[data-name="003.9"]'
    page.fill(f"{place} textarea", "8 sigma")
    page.click(f"{place} button.main")
    page.click(f"{place} >> text=Hint")
    said = page.inner_text(f"{place} .answer")
    lab.open("heatmap")
    lab.open("exercises")
    assert page.input_value(f"{place} textarea") == "8 sigma"
    assert page.inner_text(f"{place} .answer") == said
    assert page.is_visible(f"{place} .hint")


def test_the_example_that_questions_name_is_found(lab: Any) -> None:
    """The example's numbers are not in the questions, and Start calls it by its title."""
    page = lab.open("exercises")
    lab.open("start", ex="three")
    lab.open("exercises")
    page.click('.lead + p a:has-text("Five tokens")')
    page.wait_for_selector('main[data-panel="start"]')
    shown = page.eval_on_selector(".examplebar select", "(all) => all.selectedOptions[0].text")
    assert shown == "Five tokens"
    assert lab.grid("Q").shape == (5, 4)


def test_the_page_does_not_give_answers_away(lab: Any) -> None:
    page = lab.open("exercises")
    words = page.locator("main .lead").inner_text()
    words += " ".join(page.locator(".exercise > p, .exercise .field span").all_inner_texts())
    for exercise in EXERCISES:
        assert exercise.solved not in words


def test_two_tabs_remember_what_was_solved_in_both(served: Any) -> None:
    answers = {"003.5": "yes no", "003.4": "1 1 1 1 1; 100 0 0 0 0"}
    other = served.page.context.new_page()
    served.open("exercises")
    other.goto(f"{served.address}#exercises")
    pages = [served.page, other]
    for page in pages:
        page.wait_for_selector(".exercise")
    for page, (name, text) in zip(pages, answers.items(), strict=True):
        page.fill(f'[data-name="{name}"] textarea', text)
        page.click(f'[data-name="{name}"] button.main')
        page.wait_for_selector(f'[data-name="{name}"] .done')
    for page in pages:
        page.wait_for_selector('.progress:has-text("2 of")')
    served.page.click('.progress button:has-text("Start again")')
    other.wait_for_selector('.progress:has-text("0 of")')
    other.close()
