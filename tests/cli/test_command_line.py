"""The commands as a user meets them: exit codes, streams, terminals, bad input."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from safetensors.numpy import save_file

import qkv
from qkv.cli import main
from qkv.cli.commands import info as info_command
from qkv.cli.commands import inspect as inspect_command
from qkv.inspection.rendering import progress_bar

PLAIN = {
    name: value
    for name, value in os.environ.items()
    if name not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "PYTHONIOENCODING")
}

HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\u202eevil",
    "a\nb\rc\td",
    "[bold]markup[/bold] :smile:",
    "x" * 10_000,
    "\x9b2J\x00\x7f",
    "日本語",
    "e\u0301\u0301\u0301",
    "\u200d\u2066",
    "",
    "\ud83d",
]


def qkv_process(
    *words: str, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "qkv", *words],
        env={**PLAIN, **(env or {})},
        capture_output=True,
        timeout=120,
        check=False,
        **options,
    )


def save(path: Path, tokens: Sequence[str] | None = None, **arrays: np.ndarray) -> str:
    rng = np.random.default_rng(0)
    length = len(tokens) if tokens is not None else 6
    for name in "qkv":
        arrays.setdefault(name, rng.standard_normal((2, length, 4)).astype("f4"))
    save_file(arrays, path, {} if tokens is None else {"tokens": json.dumps(tokens)})
    return str(path)


# --- processes -----------------------------------------------------------------------------------


def test_inspect_as_a_process() -> None:
    done = qkv_process("inspect")
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode()
    assert text.startswith("all-MiniLM-L6-v2, layer 1 of 0..5 (Apache-2.0), 106 tokens")
    assert "\x1b" not in text
    assert max(map(cell_len, text.splitlines())) <= 80
    assert text.count("→") >= 12


@pytest.mark.slow
def test_inspect_where_only_ascii_can_be_written() -> None:
    strict = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "COLUMNS": "80"}
    for env in (strict, {"PYTHONIOENCODING": "ascii:strict"}):
        done = qkv_process("inspect", env=env)
        assert (done.returncode, done.stderr) == (0, b"")
        text = done.stdout.decode("ascii")
        assert "he 75 -> policeman 71 0.53" in " ".join(text.split())
        assert "|" not in text
        assert max(map(len, text.splitlines())) <= 80
        assert qkv_process("explain", env=env).returncode == 0


def test_bad_input_as_a_process(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"\xff" * 8 + b"{}")
    done = qkv_process("inspect", str(tmp_path / "bad"))
    assert (done.returncode, done.stdout) == (2, b"")
    lines = done.stderr.decode().splitlines()
    assert lines[0].startswith(f"qkv: '{tmp_path / 'bad'}' says that its header has 18446744073709")
    assert lines[1:] == ["", "  size  10 bytes", "", "Write the file again."]


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break differently there")
def test_a_reader_that_stops() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "qkv", "inspect", "--json"],
        env=PLAIN, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the platform has no full device")
def test_a_disk_that_is_full() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "qkv", "info"],
            env=PLAIN, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == b"qkv: the output could not be written: No space left on device.\n"


# --- in this process -----------------------------------------------------------------------------


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"qkv {qkv.__version__}\n"
    assert main([]) == 0
    overview = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == overview
    for command in ("inspect", "explain", "info"):
        assert f"\n    {command} " in overview
        assert main([command, "-h"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"usage: qkv {command} ")
        assert "nats" not in said or "nats: natural logarithms" in " ".join(said.split())


BAD = {
    "unknown command": (["bogus"], "qkv has no command 'bogus'"),
    "mistyped command": (["inspct"], "Did you mean inspect? See qkv --help"),
    "command of another name": (["trace"], "Did you mean explain? See qkv --help"),
    "command that counts": (["count"], "Did you mean cost? See qkv --help"),
    "command that is a panel": (["exercises"], "Exercises are a panel of qkv lab"),
    "mistyped value": (["plan", "--layout", "blhdd"], "Did you mean blhd? See qkv plan --help"),
    "mistyped mechanism": (["compare", "multi-haed"], "Did you mean multi-head?"),
    "mistyped model": (["cost", "--model", "lama-3-8b"], "Did you mean llama-3-8b?"),
    "unknown option": (
        ["inspect", "--bogus=3"],
        "qkv inspect has no option '--bogus'.\n\nSee qkv inspect",
    ),
    "shortened option": (["inspect", "--js"], "Did you mean --json?"),
    "option in no command": (["--verbos"], "qkv has no option '--verbos'"),
    "heads in no groups": (
        ["plan", "--heads", "3", "--kv-heads", "2"],
        "--heads 3 is not a multiple of --kv-heads 2",
    ),
    "two files": (["inspect", "a", "b"], "there is no place for 'b' here"),
    "no number": (["inspect", "--head", "x"], "'x' is not an integer"),
    "no offset": (["inspect", "--q-offset", "middle"], "give an integer, start or end"),
    "no row": (["explain", "--query", "some"], "give a row, or all"),
    "no layout": (["inspect", "--layout", "lbhd"], "qkv inspect has no --layout 'lbhd'"),
    "missing file": (["inspect", "missing"], "no file 'missing'"),
    "escapes in a name": (["inspect", "\x1b[31m"], r"no file '\x1b[31m'"),
    "escapes in an option": (["inspect", "--\x1b[31mx"], "has no option '--\\x1b[31mx'"),
    "head": (["inspect", "--head", "12"], "--head 12 does not exist"),
    "head below": (["inspect", "--head", "-13"], "--head -13 does not exist"),
    "query": (["inspect", "--query", "106"], "--query 106 does not exist"),
    "batch": (["inspect", "--batch", "1"], "--batch 1 does not exist"),
    "top": (["inspect", "--top", "0"], "--top 0 shows nothing"),
    "scale": (["inspect", "--scale", "nan"], "scale"),
    "explained row": (["explain", "--query", "5"], "--query 5 does not exist"),
    "explained head": (["explain", "--head", "1"], "--head 1 does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_words(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    words, fact = BAD[name]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("qkv: ")
    assert fact in captured.err
    assert "\x1b" not in captured.err


F4 = np.float32
ARRAYS = {
    "heads": ({"q": np.zeros((3, 4, 2), F4), "k": np.zeros((2, 4, 2), F4),
               "v": np.zeros((2, 4, 2), F4)}, None, "num_heads=3"),
    "head_dim": ({"q": np.zeros((4, 3), F4), "k": np.zeros((4, 2), F4),
                  "v": np.zeros((4, 2), F4)}, None, "head_dim"),
    "lengths": ({"q": np.zeros((4, 2), F4), "k": np.zeros((4, 2), F4),
                 "v": np.zeros((3, 2), F4)}, None, "kv_len"),
    "one dimension": ({"q": np.zeros(4, F4), "k": np.zeros(4, F4), "v": np.zeros(4, F4)}, None,
                      "dimension"),
    "batches": ({"q": np.zeros((2, 1, 4, 2), F4), "k": np.zeros((3, 1, 4, 2), F4),
                 "v": np.zeros((3, 1, 4, 2), F4)}, None, "broadcast"),
    "tokens": ({}, ["a", "b"], "2 tokens for 6 keys"),
    "where": ({"q": np.zeros((2, 3, 4), F4)}, None, "where do 3 queries stand among 6 keys?"),
    "no queries": ({"q": np.zeros((2, 0, 4), F4)}, None, "q_len=0"),
    "no keys": ({"k": np.zeros((2, 0, 4), F4), "v": np.zeros((2, 0, 4), F4)}, None, "kv_len=0"),
    "no batch": ({"q": np.zeros((0, 2, 6, 4), F4)}, None, "--batch 0 does not exist"),
    "no heads": ({n: np.zeros((0, 6, 4), F4) for n in "qkv"}, None, "num_heads=0"),
    "dtypes": ({"q": np.zeros((2, 6, 4), np.float64)}, None, "float64"),
}  # fmt: skip


@pytest.mark.parametrize("command", ["inspect", "explain"])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_do_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, command: str
) -> None:
    arrays, tokens, fact = ARRAYS[name]
    path = tmp_path / "file"
    if tokens:
        x = np.zeros((2, 6, 4), F4)
        save(path, tokens, q=x, k=x, v=x)
    else:
        save(path, None, **arrays)
    assert main([command, str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert fact in captured.err


def test_where_queries_stand_is_asked_for_in_options_that_there_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`q_offset="end"`, which Python asks for, is no option; `qkv lab` has none at all."""
    x = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(F4)
    path = save(tmp_path / "file", None, q=x[:, :3], k=x, v=x)
    page = str(tmp_path / "page.html")
    for words in (["plan"], ["lab", "--export", page]):
        assert main([*words, path, "--causal"]) == 2
        error = capsys.readouterr().err
        assert "where do the queries stand?" in error
        assert "--q-offset" in error
        assert "q_offset=" not in error
    assert main(["plan", path, "--causal", "--q-offset", "end"]) == 0
    assert main(["inspect", path, "--causal", "--q-offset", "end", "--html", page]) == 0
    assert Path(page).is_file()


@pytest.mark.parametrize(
    "words",
    [["inspect"], ["inspect", "--top", "9"], ["inspect", "--query", "3"],
     ["inspect", "--query", "3", "--head", "0"], ["explain"], ["explain", "--query", "all"]],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_tokens_of_other_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], encoding: str
) -> None:
    path = save(tmp_path / "file", HOSTILE)
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
    assert main([*words, path]) == 0
    text = raw.getvalue().decode(encoding)
    for character in text:
        assert character == "\n" or unicodedata.category(character)[0] not in "C", repr(character)
    assert len(text) < 100_000
    if words[0] == "inspect":
        lines = [line for line in text.splitlines() if not line.startswith("Next: ")]
        assert max(map(cell_len, lines)) <= 80
        assert "title" not in text
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw := io.BytesIO(), encoding))
    assert main([*words, "--json", path]) == 0
    assert raw.getvalue().isascii()
    report = json.loads(raw.getvalue())
    listed = report["tokens"] if words[0] == "inspect" else report["kv_tokens"]
    assert listed == [*HOSTILE[:-1], "\ufffd"]


def test_markup_in_tokens_is_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokens = ["[red]x", "[/]", ":smile:", "[link=http://x]"]
    assert main(["inspect", "--query", "0", "--head", "0", save(tmp_path / "f", tokens)]) == 0
    text = capsys.readouterr().out
    for token in tokens:
        assert token in text


@pytest.mark.parametrize("width", [40, 60, 80, 120, 250])
def test_widths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for words in (["inspect"], ["inspect", "--query", "9"], ["inspect", "--top", "5"], ["info"]):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(cell_len, lines)) <= width
        assert all(line == line.rstrip() for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("width", range(80, 140))
def test_no_pair_is_broken_over_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["inspect", "--head", "3"]) == 0
    rows = capsys.readouterr().out.splitlines()[4:]
    assert rows[0].startswith("   3 ")
    assert rows[1] == ""


@pytest.mark.slow
def test_nothing_is_cut_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number and name that 200 columns show is there in 40 columns, and in one piece."""
    for words in (
        ["inspect", "--top", "1"],
        ["inspect", "--model", "tiny"],
        ["inspect", "--query", "9", "--top", "3"],
        ["compare"],
        ["scaling"],
        ["cost", "--model", "llama-3-8b"],
    ):
        shown = {}
        for width in (200, 40):
            monkeypatch.setenv("COLUMNS", str(width))
            assert main(words) == 0
            shown[width] = capsys.readouterr().out
        assert max(map(cell_len, shown[40].splitlines())) <= 40
        assert "…" not in shown[40]
        wide, narrow = (set(re.findall(r"[\d.]+", shown[width])) for width in (200, 40))
        assert wide <= narrow, words


def test_the_table_of_heads_has_a_legend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    shown = capsys.readouterr().out
    assert "entropy: of the weights, in nats" in shown
    for column in shown.splitlines()[2].split()[1:6]:
        assert re.search(rf"^.*\b{column}\b.*:", shown, re.MULTILINE)
    assert "next: " in " ".join(shown.split())
    assert main(["inspect", "--causal"]) == 0
    assert "previous, own: " in " ".join(capsys.readouterr().out.split())


def test_query_all_is_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    default = capsys.readouterr().out
    assert main(["inspect", "--query", "all"]) == 0
    assert capsys.readouterr().out == default


def test_no_color_leaves_no_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    for words in (["inspect"], ["inspect", "--model", "tiny"], ["info"], ["cost"]):
        assert main(words) == 0
        assert "\x1b" not in capsys.readouterr().out


def test_colour_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["inspect"]) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["inspect"]) == 0
    assert "\x1b[" in capsys.readouterr().out


def test_explain_gives_the_shared_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    text = capsys.readouterr().out
    assert "=== 'The' (row 0) ===" in text
    assert "0.2976" in text
    assert "'cat'" not in text
    assert main(["explain", "--query", "all", "--causal", "--grad"]) == 0
    text = capsys.readouterr().out
    assert text.count("=== '") == 5
    assert "Causal" in text
    assert main(["explain", "--json", "--query", "-1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["q_index"] for row in report["heads"][0]["rows"]] == [4]


def test_explain_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, 2, n, 3)).astype(F4) for n in (2, 4, 4))
    path = save(tmp_path / "f", ["a", "b", "c", "d"], q=q, k=k, v=v)
    words = ["--query", "1", "--head", "1", "--batch", "1", "--q-offset", "end", "--causal"]
    assert main(["explain", path, "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    (head,) = report["heads"]
    (row,) = head["rows"]
    assert (head["batch"], head["head"], row["q_index"], row["q_pos"]) == (1, 1, 1, 3)
    scores = np.exp(q[1, 1, 1].astype(float) @ k[1, 1].astype(float).T / 3**0.5)
    np.testing.assert_allclose(row["softmax"]["weights"], scores / scores.sum(), rtol=1e-12)
    np.testing.assert_allclose(row["output"], scores @ v[1, 1] / scores.sum(), rtol=1e-6)
    assert report["tokens"] == ["c", "d"]
    assert main(["explain", path, *words]) == 0
    assert "=== 'd' (row 1" in capsys.readouterr().out


def test_info(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["qkv"]["version"] == qkv.__version__
    assert report["packages"]["numpy"] == np.__version__
    assert set(report["backends"]) >= {"cpu", "blocked", "reference"}
    assert sum("first choice" in state for state in report["backends"].values()) == 1
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    for part, rows in report.items():
        assert f"{part}\n" in text
        assert all(f"  {label} " in text for label in rows)


@pytest.mark.slow
def test_info_shows_what_is_installed_and_imports_nothing() -> None:
    program = (
        "import sys; from qkv.cli import main; main(['info', '--json']); "
        "print(sorted({'torch', 'jax', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    report, _, imported = ran.stdout.rstrip().rpartition("\n")
    assert imported == "[]"
    shown = json.loads(report)["packages"]
    for name in ("torch", "transformers", "jax"):
        program = f"import {name}; print({name}.__version__)"
        asked = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        assert shown.get(name) == (asked.stdout.strip() if asked.returncode == 0 else None)


def test_info_where_nothing_compiled_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKV_ISA", "abacus")
    monkeypatch.setattr(info_command, "_PACKAGES", ("numpy", "no-such-package"))
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "abacus" in report["machine"]["compiled code"]
    assert "abacus" in report["backends"]["cpu"]
    assert report["packages"]["no-such-package"] == "not installed"
    monkeypatch.setitem(sys.modules, "qkv.backends.cpu", None)
    assert main(["info", "--json"]) == 0
    assert "qkv.backends.cpu" in json.loads(capsys.readouterr().out)["machine"]["compiled code"]


def test_a_closed_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--version"]) == 1
    assert "standard output is closed" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no signal to send to oneself there")
def test_ctrl_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(progress_bar.Bar, "__call__", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["inspect"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("", "")


def test_too_little_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhaust(_: object) -> str:
        raise MemoryError

    monkeypatch.setattr(inspect_command, "run", exhaust)
    assert main(["inspect"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "qkv: there is not enough memory for this.\n"


# --- the bar -------------------------------------------------------------------------------------


def bar_text(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, after: float) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=80)
    monkeypatch.setattr(progress_bar, "BAR_AFTER", after)
    monkeypatch.setattr(progress_bar, "Console", lambda stderr: console)
    with progress_bar.Bar("at work", passes=2) as bar:
        for _ in range(2):
            for done in range(5):
                bar(done + 1, 5)
    return file.getvalue()


def test_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = bar_text(monkeypatch, is_terminal=True, after=0.0)
    assert "at work" in shown
    assert "100%" in shown
    assert bar_text(monkeypatch, is_terminal=True, after=60.0) == ""
    assert bar_text(monkeypatch, is_terminal=False, after=0.0) == ""


def test_an_option_of_several_commands_is_declared_once() -> None:
    """The same flag and help stand in one file, but for `--json`, whose help is two words."""
    declared: dict[str, set[str]] = {}
    folder = Path(qkv.__file__).parent / "cli"
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                words = [keyword.value for keyword in node.keywords if keyword.arg == "help"]
                key = ", ".join(map(ast.unparse, (*node.args, *words)))
                declared.setdefault(key, set()).add(path.name)
    assert len(declared) > 30
    assert {key for key, files in declared.items() if len(files) > 1} == {"'--json', 'strict JSON'"}
