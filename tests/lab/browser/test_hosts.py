"""The file from disk, the local page, a notebook, and tokens of other people."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import qkv
import qkv.files
import qkv.lab

from .conftest import HOSTILE

pytestmark = pytest.mark.browser

STATIC = Path(qkv.lab.__file__).parent / "static"


def test_the_local_page(served: Any) -> None:
    page = served.open("inspect", layer=1, head=1, query=40, kkey=9)
    page.wait_for_selector('canvas[data-missing="0"]')
    page.wait_for_function(
        "() => document.querySelector('.readout [data-name=weight]').innerText !== '…'"
    )
    [weight] = served.numbers(".readout")
    page.click("summary")
    score, lse = (
        served.numbers(f'details .sums > div:has(dt:text-is("{name}"))')[0]
        for name in ("score", "lse")
    )
    assert weight == pytest.approx(np.exp(score - lse), rel=1e-5)
    served.open("code", code="flash")
    page.wait_for_selector(".code")
    assert "class" in page.inner_text(".code")
    served.open("code", code="hard", token=1)
    line = page.locator('[role="option"]:has-text("scores = scores") .values')
    assert line.inner_text() == "3.0000, 0.0000, 2.0000, 1.0000, 0.5000"


def test_a_file_of_the_reader(served: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 4, 3)).astype(np.float32)
    path = tmp_path / "a.safetensors"
    qkv.files.write_arrays(path, q, k, v, HOSTILE[:4])
    page = served.open("start")
    page.set_input_files('input[type="file"]', path)
    page.wait_for_function("() => document.querySelector('select').value === 'file'")
    rows = (x.astype(np.float64) for x in (q, k, v))
    weights = qkv.inspect(*rows).weights[...]
    np.testing.assert_allclose(served.grid("Weights"), weights, rtol=1e-12)


def test_a_file_of_the_reader_without_python(lab: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 2, 5, 3))
    for name in ("a.safetensors", "a.npz"):
        path = tmp_path / name
        if name.endswith("npz"):
            np.savez_compressed(path, q=q, k=k, v=v)
        else:
            qkv.files.write_arrays(path, q, k, v, ["a", "b", "c", "d", "e"])
        page = lab.open("start")
        page.set_input_files('input[type="file"]', path)
        page.wait_for_function("() => document.querySelector('select').value === 'own'")
        weights = qkv.inspect(q[0], k[0], v[0]).weights[...]
        np.testing.assert_allclose(lab.grid("Weights"), weights, rtol=1e-12)
    broken = tmp_path / "b.safetensors"
    broken.write_bytes(os.urandom(100))
    page.set_input_files('input[type="file"]', broken)
    page.wait_for_selector(".failure")


TOKENS = [
    "\u0645\u0631\u062d\u0628\u0627",
    "\u4e2d\u6587",
    "\U0001f469\u200d\U0001f467",
    "<b>x</b>",
    "",
]


@pytest.mark.parametrize("name", ["columns", "big endian", "bytes as tokens", "turned"])
def test_npz_files_as_numpy_writes_them(lab: Any, tmp_path: Path, name: str) -> None:
    q, k, v = np.random.default_rng(3).normal(size=(3, 5, 3))
    saved: dict[str, Any] = {"q": q, "k": k, "v": v, "tokens": np.array(TOKENS)}
    if name == "columns":
        saved |= {"q": np.asfortranarray(q), "k": np.asfortranarray([k, v])}
    if name == "big endian":
        saved |= {"q": q.astype(">f8"), "tokens": np.array(TOKENS).astype(">U9")}
    if name == "bytes as tokens":
        saved["tokens"] = np.array([token.encode() for token in TOKENS])
    if name == "turned":
        saved["q"] = np.ascontiguousarray(q.T).T
    np.savez(tmp_path / "a.npz", **saved)
    page = lab.open("start")
    page.set_input_files('input[type="file"]', tmp_path / "a.npz")
    page.wait_for_function("() => document.querySelector('select').value === 'own'")
    np.testing.assert_allclose(lab.grid("Weights"), qkv.inspect(q, k, v).weights[...], rtol=1e-12)
    named = page.eval_on_selector_all(".tokens-edit input", "all => all.map((one) => one.value)")
    assert named == TOKENS


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_type_that_is_not_read_is_named(lab: Any, tmp_path: Path, name: str) -> None:
    rows = {each: np.eye(3, dtype=np.int64) for each in ("q", "k", "v")}
    if name.endswith("npz"):
        np.savez(tmp_path / name, **rows)
    else:
        save_file(rows, tmp_path / name)
    page = lab.open("start")
    page.set_input_files('input[type="file"]', tmp_path / name)
    said = page.wait_for_selector(".own .failure").inner_text()
    assert f"{name}: it holds q as {'<i8' if name.endswith('npz') else 'I64'}; float16" in said


def test_a_saved_record_is_not_read_without_its_variants(lab: Any, tmp_path: Path) -> None:
    q, k, v = np.random.default_rng(5).normal(size=(3, 4, 3))
    qkv.inspect(q, k, v, qkv.Causal()).save(tmp_path / "record.safetensors")
    page = lab.open("start")
    page.set_input_files('input[type="file"]', tmp_path / "record.safetensors")
    said = page.wait_for_selector(".own .failure").inner_text()
    assert said == (
        "record.safetensors: it is a saved record, which holds more than q, k and v; "
        "run qkv lab FILE."
    )


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "The server does not answer. Start qkv lab again"),
        (401, "qkv lab was started again since this page was opened. Open the address"),
    ],
)
def test_a_server_that_is_gone_or_is_another_is_said_so(
    chromium: Any, server_context: Any, server_address: str, tmp_path: Path,
    status: int | None, said: str,
) -> None:  # fmt: skip
    """Whoever asks is told: a panel, a file that is opened, a page that is shared."""
    page = server_context.new_page()
    page.goto(server_address.partition("?")[0] + "#start")
    page.wait_for_selector('input[type="file"]', state="attached")

    def refuse(route: Any) -> None:
        if status is None:
            route.abort()
        else:
            route.fulfill(status=status, content_type="text/plain", body="Open the lab with ...")

    page.route(re.compile("/(call|file|page)$"), refuse)
    np.savez(tmp_path / "a.npz", q=np.eye(3), k=np.eye(3), v=np.eye(3))
    page.set_input_files('input[type="file"]', tmp_path / "a.npz")
    words = "all => all.map((each) => each.innerText.replace(/\\s+/g, ' '))"
    page.wait_for_selector(".own .failure")
    assert said in page.eval_on_selector_all(".own .failure", words)[0]
    page.click('button:text-is("Share")')
    page.click('dialog[open] button:has-text("Save")')
    page.wait_for_selector("dialog[open] .failure")
    assert said in page.eval_on_selector_all("dialog[open] .failure", words)[0]
    page.keyboard.press("Escape")
    page.click('nav a[href="#errata"]')
    page.wait_for_selector("main .failure")
    assert said in page.eval_on_selector_all("main .failure", words)[0]
    page.close()


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(len(HOSTILE), 4))
    path = tmp_path_factory.mktemp("hostile") / "page.html"
    path.write_text(qkv.explain(x, x, x, tokens=HOSTILE).to_html(), encoding="utf-8")
    return path


def test_hostile_tokens_are_text(opened: Any, hostile_page: Path) -> None:
    lab = opened(hostile_page)
    for panel in ("start", "pipeline", "heatmap", "tiles", "code"):
        page = lab.open(panel)
        assert page.query_selector("main img, main script, main b > img") is None
        shown = page.evaluate("document.querySelector('main').textContent")
        assert "<img src=x onerror=alert(1)>" in shown
        assert not set("\u202e\x1b\u2028") & set(shown)
    own = json.dumps([list(HOSTILE[:2]), "1,2", "1,2", "1,2"])
    page = lab.open("heatmap", ex="own", own=own)
    assert page.query_selector("main img") is None
    assert "<img src=x onerror=alert(1)>" in page.inner_text("table")
    assert lab.errors == []


def test_a_trace_is_drawn_as_it_is(opened: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    q, k, v = rng.normal(size=(3, 6, 4))
    trace = qkv.explain(q, k, v, qkv.Causal(), qkv.ALiBi(np.array([0.5])), q_index=5)
    path = tmp_path / "trace.html"
    path.write_text(trace.to_html(), encoding="utf-8")
    lab = opened(path)
    lab.open("heatmap")
    wanted = [row.softmax.weights for row in trace.heads[0].rows]
    np.testing.assert_allclose(lab.grid("weights matrix"), wanted, rtol=1e-12)
    lab.open("pipeline", step=9)
    np.testing.assert_allclose(
        lab.numbers('tbody td[data-column="weights"]'), wanted[0], rtol=1e-12
    )
    assert lab.errors == []


NOTEBOOK = """async ([script, data]) => {
    const address = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
    const { default: lab } = await import(address);
    const listeners = {};
    const traits = { data, view: { panel: "errata" } };
    window.sent = [];
    window.saved = 0;
    window.model = {
        get: (name) => traits[name],
        set: (name, value) => { traits[name] = value; },
        save_changes: () => { window.saved += 1; },
        on: (event, each) => { (listeners[event] ??= []).push(each); },
        off: () => {},
        send: (content) => { window.sent.push(content); },
        answer: (content) => listeners["msg:custom"].forEach((each) => each(content, [])),
    };
    const el = document.body.appendChild(document.createElement("div"));
    lab.initialize({ model: window.model });
    window.close = lab.render({ model: window.model, el });
}"""


def test_a_notebook(chromium: Any) -> None:
    """The anywidget form with a model of its own: messages, traits, and no address."""
    context = chromium.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.set_content("<!doctype html><title>notebook</title>")
    data = {"host": "widget", "panels": [], "results": {}}
    page.evaluate(NOTEBOOK, [(STATIC / "lab.js").read_text("utf-8"), data])
    page.wait_for_function("() => window.sent.length === 2")
    sent = {each["method"]: each for each in page.evaluate("window.sent")}
    assert set(sent) == {"errata", "example"}
    asked = sent["errata"]
    assert asked["params"] == {}
    error = {"message": "the kernel is gone.", "action": "Start it again."}
    page.evaluate(
        "(content) => window.model.answer(content)",
        {"id": asked["id"], "ok": False, "error": error},
    )
    page.wait_for_selector(".failure")
    assert page.inner_text(".failure").splitlines()[0] == "the kernel is gone."
    page.click('nav a[href="#heatmap"]')
    assert page.evaluate("window.model.get('view')") == {"panel": "heatmap"}
    assert page.evaluate("window.saved") >= 1
    assert page.evaluate("location.hash") == ""
    page.evaluate("window.close()")
    assert page.inner_text("body").strip() == ""
    context.close()


def test_two_widgets_of_one_notebook_are_apart(chromium: Any) -> None:
    """Each loads the script for itself, and a choice in one changes nothing in the other."""
    context = chromium.new_context(reduced_motion="reduce")
    page = context.new_page()
    page.set_content("<!doctype html><title>notebook</title>")
    data = {"host": "widget", "panels": [], "results": {}}
    for _ in range(2):
        page.evaluate(NOTEBOOK, [(STATIC / "lab.js").read_text("utf-8"), data])
    for place in range(2):
        page.locator('nav a[href="#heatmap"]').nth(place).click()
    masks = page.locator('fieldset:has(legend:text-is("Mask"))')
    masks.nth(0).locator('label:has-text("causal")').click()
    masks.nth(1).locator('label:has-text("window")').click()
    chosen = [masks.nth(i).locator("input:checked + span").all_inner_texts() for i in range(2)]
    assert chosen == [["causal"], ["window"]]
    ids = page.eval_on_selector_all("[id]", "all => all.map((each) => each.id)")
    assert len(ids) == len(set(ids))
    context.close()


@pytest.mark.parametrize(
    ("panel", "method", "comes"),
    [
        ("scaling", "scaling", 'table:has-text("largest weight")'),
        ("tour", "language", ".tourpicture"),
        ("language", "language", ".smallheads canvas"),
        ("code", "code", '[role="option"]'),
        ("errata", "errata", ".errata li"),
        ("exercises", "exercises", ".exercise"),
        ("inspect", "thumbnails", ".glance canvas"),
    ],
)
def test_what_failed_is_computed_again_by_a_button(
    served: Any, panel: str, method: str, comes: str
) -> None:
    stopped = []

    def answer(route: Any) -> None:
        asked = route.request.post_data_json
        if asked["method"] != method or stopped:
            route.continue_()
            return
        stopped.append(asked["id"])
        error = {"message": "it was stopped.", "action": None}
        route.fulfill(status=409, json={"id": asked["id"], "ok": False, "error": error})

    served.page.route("**/call", answer)
    page = served.open(panel)
    page.wait_for_selector('[role="alert"]')
    page.click("text=Compute it again")
    page.wait_for_selector(comes, timeout=60_000)
    assert page.locator('[role="alert"]').count() == 0
    assert len(stopped) == 1
    assert all("409" in error for error in served.errors)
    served.errors.clear()


def test_a_long_job_shows_how_far_it_is_and_is_stopped(served: Any, tmp_path: Path) -> None:
    """A minute or more of work, which is stopped in its first seconds."""
    path = tmp_path / "long.npz"
    rows = np.zeros((4, 40_000, 64), np.float32)
    np.savez_compressed(path, q=rows, k=rows, v=rows)
    page = served.open("start")
    page.set_input_files('input[type="file"]', path)
    page.wait_for_selector(".working progress")
    assert "Python computes the file" in page.inner_text(".working")
    page.click(".working button")
    page.wait_for_selector('[role="alert"]')
    assert "it was stopped." in page.inner_text('[role="alert"]')
    page.wait_for_selector(".working", state="detached")
    # The browser reports the answer of the job that was stopped.
    assert all("409" in error for error in served.errors)
    served.errors.clear()
