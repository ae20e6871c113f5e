"""The command with a file to write, and the widget's messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
import qkv.files
import qkv.lab
from qkv.cli import main
from qkv.lab.session import Session
from qkv.lab.widget import reply

X = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)


def data_of(page: Path) -> Any:
    text = page.read_text(encoding="utf-8")
    return json.loads(text.partition('id="qkv-data">')[2].partition("</script>")[0])


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "a.safetensors", tmp_path / "page.html"
    qkv.files.write_arrays(file, X, X, X, tokens=list("abcdef"))
    assert main(["lab", str(file), "--causal", "--export", str(page)]) == 0
    assert capsys.readouterr().out == f"Written: {page}\n"
    results = data_of(page)["results"]
    assert results["model"]["tokens"] == list("abcdef")
    head = results['head:{"head":1,"layer":0}']
    scores = np.where(np.tri(6, dtype=bool), X[1].astype(float) @ X[1].T / 2, -np.inf)
    np.testing.assert_array_equal(np.array(head["top_keys"])[3:, 0], scores[3:].argmax(axis=1))
    # The same arrays again, without the mask: a small example too.
    assert main(["lab", str(file), "--export", str(page)]) == 0
    assert data_of(page)["results"]["example"]["examples"][0]["name"] == "file"


@pytest.mark.parametrize(
    "words",
    [
        ["lab", "--export", "FILE"],
        ["lab", "FILE", "--export", "FILE"],
        ["inspect", "--html", "FILE"],
        ["inspect", "--model", "tiny", "--html", "FILE"],
        ["inspect", "--model", "tiny", "--save", "FILE"],
    ],
)
def test_files_of_other_kinds_are_not_replaced(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.safetensors"
    qkv.files.write_arrays(file, X, X, X)
    before = file.read_bytes()
    command = [str(file) if word == "FILE" else word for word in words]
    assert main(command) == 2
    assert file.read_bytes() == before
    assert "is there already, and it is not a" in capsys.readouterr().err
    # What the command itself has written may be written again.
    file.write_bytes(b"")
    if command[1] != str(file):
        assert [main(command), main(command)] == [0, 0]


def test_a_page_without_heads_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["lab", "--export", str(page)]) == 0
    written, *said = capsys.readouterr().out.splitlines()
    assert written == f"Written: {page}"
    assert "no panel Inspect" in "".join(said)
    assert "--model language" in "".join(said)
    assert "inspect" not in data_of(page)["panels"]


SENTENCE = "The party was \N{HOT BEVERAGE} late"
"""The language model does not know the cup."""


def test_panels_that_read_a_text_begin_with_the_sentence_of_the_command(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for options in (["--model", "language"], ["--model", "tiny"], []):
        assert main(["lab", SENTENCE, *options, "--export", str(page)]) == 0
        data = data_of(page)
        assert data["view"] == {"panel": "inspect", "text": SENTENCE, "sentence": SENTENCE}
    assert "".join(data["results"]["model"]["tokens"]) == SENTENCE.replace("\u2615", "\ufffd")
    # Pages of the same model that have its record alone.
    assert main(["inspect", "She was very happy", "--html", str(page)]) == 0
    assert data_of(page)["view"]["sentence"] == "She was very happy"
    assert main(["lab", SENTENCE, "--tokens", "3", "--export", str(page)]) == 0
    assert data_of(page)["view"]["text"] == "The party was"
    # Without a sentence the tiny model's characters are not text for another model.
    assert main(["lab", "--model", "tiny", "--export", str(page)]) == 0
    assert data_of(page)["view"] == {"panel": "inspect"}


def test_of_a_long_text_panels_begin_with_what_their_fields_hold(tmp_path: Path) -> None:
    file, page = tmp_path / "text.txt", tmp_path / "page.html"
    text = "".join(f"She was {i} times very happy.\n" for i in range(180))
    file.write_text(text, encoding="utf-8")
    assert main(["lab", "--model", "tiny", "--text", str(file), "--export", str(page)]) == 0
    view = data_of(page)["view"]
    assert (view["text"], view["sentence"]) == (text[-4096:], text[:-1].replace("\n", " ")[-200:])


@pytest.mark.parametrize(
    ("argv", "fact"),
    [
        (["--port", "70000"], "not a port"),
        (["a.npz", "--text", "a"], "--text goes with --model"),
        (["file.npz", "--model", "tiny"], "two things to show"),
        (["--causal"], "--causal goes with a file"),
        (["nothing.safetensors", "--export", "page.html"], "cannot be read"),
        (["--export", "nowhere/page.html"], "there is no folder"),
    ],
)
def test_wrong_options(
    argv: list[str],
    fact: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lab", *argv]) == 2
    assert fact in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_message_is_answered_and_an_error_is_an_answer() -> None:
    source = qkv.lab.sources.source.source_of(qkv.inspect(X, X, X))
    session = Session(source)
    answer, buffers = reply(session, {"id": 3, "method": "tile", "params": {"layer": 0, "head": 1}})
    assert (answer["id"], answer["ok"]) == (3, True)
    (data,) = buffers
    shape = answer["buffers"][0]["shape"]
    scores = X[1].astype(float) @ X[1].T / 2
    exp = np.exp(scores)
    expected = exp / exp.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.frombuffer(data, "<f4").reshape(shape), expected, atol=1e-6)
    stale = {"id": 4, "method": "model", "shown": 0}
    for wrong in (stale, {"id": 4, "method": "nothing"}, {"id": 4}, {"id": "x"}, [], None):
        answer, buffers = reply(session, wrong)
        assert (answer["ok"], buffers) == (False, [])
        assert answer["error"]["message"]


def test_the_widget_answers_messages() -> None:
    pytest.importorskip("anywidget", reason="the extra lab is not installed")
    example = qkv.samples.shared_example()
    made = qkv.lab.widget(qkv.inspect(example.q, example.k, example.v), example.tokens)
    assert made.data["host"] == "widget"
    assert "inspect" in made.data["panels"]
    sent: list[Any] = []
    made.send = lambda content, buffers=None: sent.append((content, buffers))
    made._handle_custom_msg({"id": 1, "method": "model", "params": {}}, [])
    ((content, _),) = sent
    assert content["result"]["tokens"] == list(example.tokens)
    made.close()
