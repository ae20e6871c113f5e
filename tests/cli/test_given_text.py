"""What a command takes for a text and what for a file, and what it advises."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.cli import main
from qkv.cli.commands import inspect as inspect_command
from qkv.cli.inputs import text as text_of_commands
from qkv.cli.parser import make_parser
from qkv.samples import language_model

COMMANDS = ["inspect", "explain", "lab"]


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def tokens_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """The model that `qkv inspect` asks, and the text that it reads."""
    assert main(["inspect", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    return found["model"], "".join(found["tokens"])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("word", ["hello", "don't"])
def test_a_word_that_is_no_file(
    command: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"hello": "hello", "don't": "'don'\"'\"'t'"}[word]
    assert complaint(capsys, command, word) == (
        f"qkv: there is no file {word!r}.\n\nPass --text {said} for a model to read it.\n"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([""], ["  "], ["", "--model", "language"], ["--text", ""], ["--text", " \n"]):
        assert complaint(capsys, command, *words).startswith("qkv: the text is empty.\n\nWrite ")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_text(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    # The last of the bytes that are looked at is the first of a character.
    Path("p.txt").write_text("The cat sat. " * 315 + "é" * 9, encoding="utf-8")
    for words in (["p.txt"], ["p.txt", "--model", "language"]):
        assert complaint(capsys, command, *words) == (
            "qkv: 'p.txt' is a text, not a file of arrays.\n\n"
            "Pass --text p.txt for a model to read it.\n"
        )
    Path("noise").write_bytes(b"\x00\x01arrays?")
    assert "'noise' is neither safetensors nor npz" in complaint(capsys, command, "noise")
    assert "'no.txt' cannot be read" in complaint(capsys, command, "no.txt")


def test_a_text_without_a_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("The cat sat.", encoding="utf-8")
    assert tokens_of(capsys, "--text", "p.txt") == ("language", "The cat sat.")
    assert tokens_of(capsys, "--text", "hello") == ("language", "hello")
    assert main(["lab", "--text", "p.txt", "--export", "page.html"]) == 0
    assert '"model":"language"' in Path("page.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["explain", "--text", "p.txt", "--json"]) == 0
    (head,) = json.loads(capsys.readouterr().out)["heads"]
    last = len(language_model().encode("The cat sat.")) - 1
    assert head["rows"][0]["q_index"] == last


def test_a_word_for_a_model_that_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert tokens_of(capsys, "hello", "--model", "language") == ("language", "hello")
    assert tokens_of(capsys, "hello", "--model", "tiny") == ("tiny", "hello")
    Path("hello").write_bytes(b"\x00")
    assert "are two inputs" in complaint(capsys, "inspect", "hello", "--model", "language")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_dash_is_standard_input(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    more = ["--export", str(tmp_path / "page.html")] if command == "lab" else ["--json"]
    seen = []
    for words in (["-"], ["--model", "language", "--text", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("The cat sat."))
        assert main([command, *words, *more]) == 0
        out = capsys.readouterr().out
        page = tmp_path / "page.html"
        seen.append(page.read_text(encoding="utf-8") if command == "lab" else out)
    assert seen[0] == seen[1]
    assert '"The"' in seen[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    assert "'-' and --text are two texts" in complaint(capsys, command, "-", "--text", "x")


def test_the_help_of_the_lab_names_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r" FILE safetensors or npz .* or a sentence", said)


# --- the command to try next ---------------------------------------------------------------------

TEXTS = [
    "😀👩\u200d👩 hello שלום",
    "don't \\ stop",
    "two\nlines\tand \x1b[31m red",
    "e\u0301 plain one",
]


def options_of(text: str) -> argparse.Namespace:
    return make_parser().parse_args(["inspect", "--layer", "0", "--text", text])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_next_command_has_the_text_as_given(
    text: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("the command is read by bash")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    command = inspect_command._command(options_of(text))
    command.encode(encoding)
    assert command.isprintable()  # no terminal acts on it
    # The arguments, whatever the locale, as bash passes them on.
    ran = subprocess.run(
        [bash, "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True, timeout=60,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    words = ran.stdout.decode().split("\0")
    assert words[words.index("--text") + 1] == text


def test_a_command_that_would_be_cut_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for text, is_there in (("The cat sat. " * 10, True), ("The cat sat. " * 100, False)):
        assert main(["inspect", text, "--layer", "0", "--tokens", "20"]) == 0
        assert ("Next: " in capsys.readouterr().out) == is_there


# --- the head that is explained ------------------------------------------------------------------


@pytest.mark.parametrize("text", ["She was very happy", "The cat sat on the mat"])
def test_a_head_that_reads_another_token_is_explained_first(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = language_model().inspect(text).rows()
    clear = [
        (row[kind], row["layer"], row["head"])
        for row in rows
        for kind in ("previous", "duplicate", "induction")
        if row[kind] >= 0.4
    ]
    weight, layer, head = max(clear)
    assert max(row["sink"] for row in rows) > weight or text.startswith("The")
    assert main(["explain", text]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        f"language, layer {layer} of 0..3: head {head}, which puts {weight:.2f} of its weight on "
        "the token before"
    )


def test_a_head_that_is_of_a_kind_by_one_query_alone_comes_after_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One head reads what followed "she" by chance, others the token before 18 times."""
    text = "The nurse told her that she was late because she had slept"
    record = language_model().inspect(text)
    repeated = np.unique(np.asarray(record.tokens), return_counts=True)[1] - 1
    assert repeated.sum() == 1  # so that a mean of induction is that of one query
    previous = max((row["previous"], row["layer"], row["head"]) for row in record.rows())
    assert 0.4 <= previous[0] < max(row["induction"] for row in record.rows())
    assert main(["explain", text]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert f"layer {previous[1]} of 0..3: head {previous[2]}, " in first
    assert first.endswith("the token before (mean of 18 queries)")


def test_where_only_rests_are_clear_they_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--text", "x"]) == 0
    assert "of its weight on the token itself" in capsys.readouterr().out.splitlines()[0]


def test_standard_input_that_is_no_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"caf\xe9 au lait"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stream)
    said = complaint(capsys, "inspect", "-")
    assert "standard input is not utf-8 text: byte 3 is invalid" in said


@pytest.mark.parametrize(
    ("stream", "fact"),
    [
        (None, "standard input is closed"),
        (io.StringIO("caf\udce9 au lait"), "is not utf-8 text: one of its bytes is invalid"),
        (io.StringIO("ä" * 9), "standard input has more than 16 bytes"),
        (io.StringIO("a" * 17), "standard input has more than 16 bytes"),
    ],
    ids=["closed", "bytes where the locale has no encoding", "wide", "long"],
)
def test_standard_input_that_cannot_be_read_whole(
    stream: Any, fact: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ended in an AttributeError, the others were read as another text."""
    monkeypatch.setattr(sys, "stdin", stream)
    monkeypatch.setattr(text_of_commands, "_MAX_BYTES", 16)
    assert fact in complaint(capsys, "inspect", "-")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lab", "--download", "--export", "p.html"], "--download goes with --model"),
        (["lab", "--tokens", "0", "--export", "p.html"], "--tokens goes with --model"),
        (["inspect", "--html", ""], "argument --html: give the name of a file"),
        (["inspect", "--model", "tiny", "--save", ""], "argument --save: give the name of a file"),
        (["lab", "--port", "8000", "--export", "p.html"], "--port 8000 is of a page"),
        (["explain", "--json", "--top", "2"], "--top 2 shortens the text"),
    ],
)
def test_options_that_would_change_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert said in complaint(capsys, *words)
    assert list(tmp_path.iterdir()) == []


def test_the_help_names_records_where_they_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    for command, reads in (("inspect", True), ("explain", True), ("plan", False)):
        assert main([command, "--help"]) == 0
        assert ("saved record" in " ".join(capsys.readouterr().out.split())) == reads


def test_the_help_has_options_of_models_under_their_heading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--save` stood among the options of all inputs."""
    assert main(["inspect", "--help"]) == 0
    _, _, of_models = capsys.readouterr().out.partition("a whole model, or one layer")
    for flag in ("--model", "--text", "--tokens", "--download", "--layer", "--save"):
        assert f"\n  {flag} " in of_models or f"\n  {flag}\n" in of_models
