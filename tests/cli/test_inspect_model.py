"""`qkv inspect --model`: the map, the page, the JSON, and input that nobody should trust."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.cli import main
from qkv.cli.commands import inspect_model as model_command
from qkv.extras import _is_checkout, install_command
from qkv.inspection.heads.head_scores import KINDS, SCORES
from qkv.inspection.models.model_record import ModelRecord, load
from qkv.samples.tiny import tiny_model

HOSTILE = [
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\x1b[31mred\x1b[0m",
    "\u202eevil", "'\"&amp;", "\u2028", "日本語", "<!--",
]  # fmt: skip


def made(kinds: list[list[str]], texts: list[str] | None = None) -> ModelRecord:
    """A record whose heads are of known kinds: scores say "this token", "the one before", ..."""
    texts = texts or list("abcdabcdabcd")
    ids = np.unique(texts, return_inverse=True)[1]
    length = len(ids)
    token, place = np.eye(max(ids) + 1)[ids], np.eye(length)
    before = np.vstack([np.zeros_like(token[:1]), token[:-1]])
    nothing = np.zeros((length, length + token.shape[1]))
    of = {
        "previous": (np.roll(place, -1, axis=1), place),
        "own": (place, place),
        "sink": (np.ones((length, 1)), place[:, :1]),
        "duplicate": (np.hstack([token, -3 * place]), np.hstack([token, place])),
        "induction": (token, before),
        "none": (nothing, nothing),
    }
    record = ModelRecord("made")
    record.tokens, record.texts = ids[None], texts
    for layer, names in enumerate(kinds):
        heads = np.zeros((2, len(names), length, nothing.shape[1]))
        for head, name in enumerate(names):
            for array, side in zip(heads, of[name], strict=True):
                array[head, :, : side.shape[1]] = side
        query, key = heads
        record.add(12 * query, key, qkv.Causal(), scale=1.0, name=f"l{layer}", tokens=ids[None])
    return record


MADE = [[*KINDS, "none"], ["sink", "none", "none", "induction", "own", "previous"]]


def run(
    capsys: pytest.CaptureFixture[str], *words: str, record: ModelRecord | None = None
) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        if record is not None:
            patch.setattr(model_command, "inspect_model", lambda options, progress, keep: record)
        code = main(["inspect", "--model", "tiny", *words])
    return code, *capsys.readouterr()


# --- the map -------------------------------------------------------------------------------------


def test_the_map_has_a_letter_for_each_head(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, record=made(MADE))
    assert (code, err) == (0, "")
    assert "layer 0  I D P O S ·\nlayer 1  S · · I O P\n" in out
    assert "head     0 1 2 3 4 5\n" in out
    assert re.search(
        r"I +induction +what followed this token +2 +layer \d head \d +\d\.\d+ +8\n +before", out
    )
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_wide_model_closes_up(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, record=made([["own"] * 60]))
    assert f"layer 0  {'O' * 60}\n" in out
    numbers = "".join(f"{head:<4}" for head in range(0, 60, 4)).rstrip()
    assert f"head     {numbers}\n" in out


def test_a_head_of_three_kinds_counts_in_the_row_of_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = made([["previous", "none"]])
    scores = record[0].scores
    for kind, weight in (("induction", 0.9), ("duplicate", 0.8), ("previous", 0.7), ("own", 0.399)):
        rows = scores.rows[kind].copy()
        rows[:, 0] = weight
        scores.rows[kind] = rows
    _, out, _ = run(capsys, record=record)
    assert "layer 0  I ·\n" in out
    found = dict(re.findall(r"^[IDPOS] +(\w+) .* (\d+) +layer 0 head \d +\d", out, re.MULTILINE))
    assert found == {"induction": "1", "duplicate": "1", "previous": "1", "own": "0", "sink": "0"}
    # 0.40 would say that it is of the kind.
    assert re.search(r"own .* 0.399 +12\n", out)
    assert "counts in the row of each" in " ".join(out.split())


@pytest.mark.parametrize("colour", [True, False])
def test_colour_only_where_it_is_wanted(
    colour: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = run(capsys, record=made(MADE))
    assert bool(re.search(r"\x1b\[[0-9;]*4[0-7]m", out)) == colour


def test_ascii_alone() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "qkv", "inspect", "--model", "tiny"],
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict", "COLUMNS": "80"},
        capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert "tiny, 2 layers, 8 heads, 64 tokens" in ran.stdout.decode("ascii")


def test_the_tiny_model_has_both_heads(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["schema"], report["version"], report["model"]) == (
        "qkv-inspect-model",
        1,
        "tiny",
    )
    kinds = {(row["layer"], row["kind"]) for row in report["heads"]}
    assert {(0, "previous"), (1, "induction")} <= kinds
    assert report["ids"] == tiny_model().repeated_sequence()
    assert set(report["heads"][0]) == {"layer", "head", "kind", "also", *SCORES}


def test_the_tiny_model_imports_no_framework() -> None:
    program = (
        "import sys; from qkv.cli import main; main(['inspect', '--model', 'tiny']); "
        "print(sorted({'torch', 'jax', 'transformers'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert ran.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_a_text_for_the_tiny_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("to be or not to be", encoding="utf-8")
    files = ["--save", str(tmp_path / "r.safetensors"), "--html", str(tmp_path / "r.html")]
    code, out, _ = run(capsys, "--text", str(tmp_path / "t.txt"), "--tokens", "9", *files)
    assert code == 0
    assert "8 heads, 9 tokens" in out
    assert load(tmp_path / "r.safetensors").texts == list("to be or ")
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")


# --- the page ------------------------------------------------------------------------------------


def page_of(
    capsys: pytest.CaptureFixture[str], path: Path, record: ModelRecord | None = None, *words: str
) -> tuple[str, Any]:
    """The page that the command writes, and the data in it."""
    code, out, err = run(capsys, "--html", str(path), *words, record=record)
    assert (code, err) == (0, "")
    assert f"Written: {path}"[:80] in out
    text = path.read_text(encoding="utf-8")
    return text, json.loads(text.partition('id="qkv-data">')[2].partition("</script>")[0])


def test_the_page_needs_nothing_else(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, _ = page_of(capsys, Path("r.html"), made(MADE))
    script = text.rpartition('<script type="module">')[2].partition("</script>")[0]
    style = text.partition("<style>")[2].partition("</style>")[0]
    markup = text.replace(script, "").replace(style, "")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', markup)
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    for part in (style, script):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not re.findall(r'(?:src|href)="(?!data:,)', markup)
    assert "@import" not in style
    assert "url(" not in style


def test_what_tokens_say_is_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = made(MADE, HOSTILE * 2)
    record.model = HOSTILE[0]
    text, data = page_of(capsys, Path("r.html"), record)
    assert text.count("<script") - text.count("\\<script") == 2
    assert "<img" not in text
    assert "<title>&lt;/script&gt;" in text
    assert data["results"]["model"]["model"] == HOSTILE[0]
    tokens = data["results"]["model"]["tokens"]
    assert tokens[0] == HOSTILE[0]
    assert tokens[3] == "\\u202eevil"


def test_a_page_of_a_model_opens_at_an_induction_head(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The tiny model reads 32 characters twice: what followed row 48 before is row 17."""
    page = tmp_path / "page.html"
    assert main(["inspect", "--model", "tiny", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    data = json.loads(text.partition('id="qkv-data">')[2].partition("</script>")[0])
    assert data["view"] == {"panel": "inspect"}
    place = data["results"]["model"]["notable"]
    assert place == {"layer": 1, "head": 0, "query": 48, "kkey": 17}


def test_a_page_of_a_sentence_or_a_layer_opens_where_the_page_finds_something(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.html"

    def opened(*words: str) -> tuple[dict[str, int], dict[str, int]]:
        assert main(["inspect", *words, "--html", str(page)]) == 0
        text = page.read_text(encoding="utf-8")
        data = json.loads(text.partition('id="qkv-data">')[2].partition("</script>")[0])
        names = ("layer", "head", "query", "kkey")
        view = {name: data["view"][name] for name in names if name in data["view"]}
        return view, data["results"]["model"]["notable"]

    assert opened("She was present at the present moment")[0] == {}
    # Layer 0 has a head that reads the token before, and one that reads its own.
    view, notable = opened("--model", "tiny", "--layer", "0")
    assert notable["layer"] == 1
    assert view["layer"] == 0
    kind = tiny_model().inspect(tiny_model().repeated_sequence())[0].heads()[view["head"]]["kind"]
    assert view["kkey"] == view["query"] - {"own": 0, "previous": 1}[str(kind)]
    assert opened("--model", "tiny", "--layer", "0", "--head", "1")[0] == {"layer": 0, "head": 1}


def test_every_head_opens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads open also where there is only room for some of their queries."""
    monkeypatch.chdir(tmp_path)
    for room, queries in ((1 << 18, 12), (60, 5)):
        monkeypatch.setattr("qkv.lab.document._MOST_ROWS", room)
        record = made(MADE)
        _, data = page_of(capsys, Path("r.html"), record)
        for row in record.rows():
            where = f'{{"head":{row["head"]},"layer":{row["layer"]}}}'
            head = data["results"][f"head:{where}"]
            assert head["count"] == queries
            keys, weights = record[row["layer"]].top
            np.testing.assert_array_equal(head["top_keys"], keys[0, row["head"]][:queries])
            np.testing.assert_allclose(
                head["top_weights"], weights[0, row["head"]][:queries], atol=1e-7
            )


def test_means_say_over_how_many_queries(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = made(MADE)
    _, data = page_of(capsys, Path("r.html"), record)
    for layer in data["results"]["model"]["layers"]:
        # abcd three times: the last two have an earlier one each, and the token after it.
        assert {name: layer["counted"][name] for name in ("sink", "previous", "duplicate")} == {
            "sink": 12, "previous": 11, "duplicate": 8,
        }  # fmt: skip
        assert layer["counted"]["induction"] == 8


def test_random_characters_are_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, data = page_of(capsys, Path("r.html"))
    assert "random characters" in data["results"]["model"]["about"]
    assert any(name.startswith("tile:") for name in data["results"])
    Path("t.txt").write_text("to be or not to be", encoding="utf-8")
    _, data = page_of(capsys, Path("r.html"), None, "--text", "t.txt")
    assert data["results"]["model"]["about"] == ""


def test_a_page_without_tokens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = made(MADE)
    record.texts = None
    _, data = page_of(capsys, Path("r.html"), record)
    assert data["results"]["model"]["tokens"] is None


# --- bad input -----------------------------------------------------------------------------------


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["inspect", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qkv: ")
    return err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.npz", "--text", "t"], "--text goes with --model"),
        (["--download"], "--download goes with --model"),
        (["--model", "tiny", "--causal"], "--causal goes with a file of arrays"),
        (["--model", "tiny", "a.npz"], "the file 'a.npz' and --model tiny are two inputs"),
        (["--model", "tiny", "--layout", "blhd"], "--layout goes with"),
        (["--layer", "0"], "--layer goes with --model"),
        (["--model", "tiny", "--head", "0"], "--head is about one layer"),
        (["--model", "tiny", "--layer", "2"], "Choose from 0 to 1."),
        (["--model", "tiny", "--layer", "0", "--head", "4"], "Choose from 0 to 3."),
        (["--model", "tiny", "--layer", "-1", "--query", "64"], "Choose from 0 to 63."),
        (["--model", "tiny", "--layer", "0", "--top", "0"], "--top 0 shows nothing"),
        (["--model", "tiny", "--layer", "2", "--html", "a.html"], "Choose from 0 to 1."),
        (["--model", "tiny", "--layer", "0", "--head", "4", "--save", "a"], "from 0 to 3."),
        (["--model", "tiny", "--layer", "x"], "'x' is not an integer"),
        (["--scale", "x"], "'x' is not a number"),
        (["--batch", "4"], "There is one batch, 0."),
        (["--model", "tiny", "--tokens", "0"], "--tokens 0 reads nothing"),
        (["--model", "tiny", "--html", "no/such/folder/a.html"], "there is no folder"),
        (["--model", "tiny", "--save", "no/such/folder/a"], "there is no folder"),
        (["--model", "../no such folder"], "nor a possible name of a model"),
        (["--model", "x" * 5000 + "/y/z"], "nor a possible name of a model"),
        (["--model", "a\0b"], "nor a possible name of a model"),
        (["--model", "tiny", "--batch", "0"], "--batch goes with a file of arrays"),
        (["--model", "a/b/c"], "nor a possible name of a model"),
        (["--model", "https://example.org/model"], "nor a possible name of a model"),
        (["--model", "-x" * 300], "expected one argument"),
        (["--model", "tiny", "--text", "no-such-file.txt"], "cannot be read: No such file"),
        (["--model", "tiny", "--text", "."], "is not a regular file"),
        (["--model", "tiny", "--text", "a\0b.txt"], "embedded null"),
    ],
)
def test_bad_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in complaint(capsys, *words)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no text"), (b" \n\t", "holds no text"), (b"abc\xff", "byte 3 is invalid")],
)
def test_bad_texts(
    content: bytes, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "t").write_bytes(content)
    assert message in complaint(capsys, "--model", "tiny", "--text", str(tmp_path / "t"))


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="a device of POSIX")
def test_a_text_that_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "--model", "tiny", "--text", "/dev/null") == (
        "qkv: '/dev/null' is not a regular file.\n\nPass a file of text.\n"
    )


def test_a_text_that_is_too_large(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t"
    with path.open("wb") as file:
        file.truncate(2**26 + 1)
    assert complaint(capsys, "--model", "tiny", "--text", str(path)) == (
        f"qkv: '{path}' has 67108865 bytes; at most 67108864 are read.\n\nCut the text.\n"
    )


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_saved_record_has_the_mode_of_a_new_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "r.safetensors"
    before = os.umask(0o027)
    try:
        for mode in (0o640, 0o604):
            assert main(["inspect", "--model", "tiny", "--save", str(path)]) == 0
            assert path.stat().st_mode & 0o777 == mode
            path.chmod(0o604)
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == [path]
    assert load(path).model == "tiny"


def test_folders_without_safetensors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "has no config.json" in complaint(capsys, "--model", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    message = complaint(capsys, "--model", str(tmp_path))
    assert "has no safetensors file" in message
    assert "pytorch_model.bin, a pickle, which could run code" in message
    assert "is a file" in complaint(capsys, "--model", str(tmp_path / "config.json"))


def test_without_transformers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    message = complaint(capsys, "--model", "openai-community/gpt2")
    assert "is not installed" in message
    assert install_command("hf") in message


def test_a_missing_extra_is_installed_as_qkv_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command names the folder of a checkout, and the package after a wheel."""

    class Installed:
        written: str | None = None

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return self.written

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed())
    for written, command in (
        (None, 'pip install "qkv[hf]"'),
        ('{"url": "file:///w/qkv.whl", "archive_info": {}}', 'pip install "qkv[hf]"'),
        ('{"url": "file:///w", "dir_info": {"editable": true}}', 'pip install -e ".[hf]"'),
    ):
        Installed.written = written
        _is_checkout.cache_clear()
        assert install_command("hf") == command
    _is_checkout.cache_clear()


def test_a_saved_record_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "record.safetensors")
    assert main(["inspect", "--model", "tiny", "--json", "--save", path]) == 0
    model = json.loads(capsys.readouterr().out)
    assert main(["inspect", path, "--json", "--html", str(tmp_path / "p.html")]) == 0
    assert json.loads(capsys.readouterr().out) == model
    assert (tmp_path / "p.html").stat().st_size > 100_000
    assert qkv.ModelRecord.load(path).rows() == load(path).rows()
    assert main(["inspect", path, "--layer", "1"]) == 2
    assert "has the scores of layer 1, and not its query and key" in capsys.readouterr().err
    assert main(["inspect", path, "--causal"]) == 2
    assert "--causal goes with a file of arrays" in capsys.readouterr().err


@pytest.mark.parametrize("installed", [True, False])
def test_a_record_as_a_table(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pandas:
        DataFrame = staticmethod(lambda rows: ("a table", rows))

    monkeypatch.setitem(sys.modules, "pandas", Pandas if installed else None)
    record = tiny_model().inspect("the cat. the cat.")
    if installed:
        assert record.to_pandas() == ("a table", list(record.rows()))
    else:
        with pytest.raises(qkv.UnsupportedError, match="needs pandas"):
            record.to_pandas()


@pytest.mark.parametrize("how", ["words", "file", "input"])
def test_a_text_is_words_a_file_or_standard_input(
    how: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "the cat. the cat."
    (tmp_path / "t.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    said = {"words": text, "file": str(tmp_path / "t.txt"), "input": "-"}[how]
    assert main(["inspect", "--model", "tiny", "--json", "--text", said]) == 0
    assert "".join(json.loads(capsys.readouterr().out)["tokens"]) == text


# --- models of transformers ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 with random weights, and a tokenizer of bytes, as save_pretrained writes it."""
    torch = pytest.importorskip("torch", reason="models of transformers need torch")
    transformers = pytest.importorskip("transformers", reason="it is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="it is not installed")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_of = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    bytes_of.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of.decoder = tokenizers.decoders.ByteLevel()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=16, n_layer=2, n_head=2, n_positions=32, eos_token_id=0,
        bos_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    transformers.GPT2Model(config).save_pretrained(path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_of).save_pretrained(path)
    return path


def process(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qkv", "inspect", *words],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True, text=True, encoding="utf-8", check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_a_model_in_a_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("héllo, hello", encoding="utf-8")
    ran = process("--model", str(folder), "--text", str(tmp_path / "t.txt"), "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    report = json.loads(ran.stdout)
    assert report["model"] == str(folder)
    assert "".join(report["tokens"]) == "h<0xC3><0xA9>llo, hello"  # bytes of one character
    assert len(report["ids"]) == 13
    assert [layer["name"] for layer in report["layers"]] == ["h.0.attn", "h.1.attn"]


@pytest.mark.slow
def test_a_text_that_is_too_long(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("x" * 100, encoding="utf-8")
    words = ["--model", str(folder), "--text", str(tmp_path / "t.txt")]
    ran = process(*words)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.splitlines() == [
        "qkv: the text has 100 tokens; the model has 32 positions.",
        "",
        "Add --tokens 32 to read the beginning.",
    ]
    assert main(["inspect", *words, "--tokens", "32"]) == 0


def broken(folder: Path, tmp_path: Path, fault: str) -> Path:
    import shutil

    path = tmp_path / "broken"
    shutil.copytree(folder, path)
    weights, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    match fault:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:1000])
        case "no tokenizer":
            (path / "tokenizer.json").unlink()
        case "empty tokenizer":  # transformers makes one that knows a single token.
            for file in path.glob("tokenizer*"):
                file.unlink()
        case "not json":
            (path / "config.json").write_text("{")
        case "own code":
            config.update(
                model_type="mine", auto_map={"AutoConfig": "mine.C", "AutoModel": "mine.M"}
            )
            (path / "mine.py").write_text("raise SystemExit(7)")
            (path / "config.json").write_text(json.dumps(config))
        case "unknown":
            config.update(model_type="\x1b[31mnobody")
            (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cut", "cannot be loaded"),
        ("no tokenizer", "has no tokenizer, so a text cannot be turned into its tokens"),
        ("empty tokenizer", "has no tokenizer, so a text cannot be turned into its tokens"),
        ("not json", "cannot be loaded"),
        ("own code", "needs code from its own repository, which is never run"),
        ("unknown", "cannot be loaded"),
    ],
)
def test_broken_models(
    fault: str, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = complaint(capsys, "--model", str(broken(folder, tmp_path, fault)))
    assert message in err
    assert "\x1b" not in err
    assert len(err) < 2000


def without(path: Path, *parts: str) -> Path:
    """The folder, once its weights of those names have been taken out."""
    numpy = pytest.importorskip("safetensors.numpy", reason="it is not installed")
    file = path / "model.safetensors"
    weights = numpy.load_file(file)
    kept = {key: w for key, w in weights.items() if not any(part in key for part in parts)}
    assert len(kept) < len(weights)
    numpy.save_file(kept, file, {"format": "pt"})
    return path


def test_weights_that_no_file_holds(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = without(broken(folder, tmp_path, "none"), "h.1.attn.c_attn", "h.0.ln_1.bias")
    monkeypatch.chdir(path.parent)  # messages shorten long paths
    assert complaint(capsys, "--model", path.name).splitlines() == [
        f"qkv: '{path.name}' lacks 3 of the model's weights; random ones would stand in for them.",
        "",
        "  missing  h.0.ln_1.bias",
        "  missing  h.1.attn.c_attn.bias",
        "  missing  h.1.attn.c_attn.weight",
        "",
        "Pass a folder with all weights of the model that config.json describes.",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pooler", "tied", "decoder"])
def test_weights_that_attention_does_not_read(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files of a masked language model have no pooler, tied embeddings are stored once, and of a
    translator only the encoder runs."""
    transformers = pytest.importorskip("transformers", reason="it is not installed")
    small: dict[str, Any] = {"vocab_size": 256, "pad_token_id": 0}
    match kind:
        case "pooler":
            sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
            config = transformers.BertConfig(**small, **sizes, num_hidden_layers=1)
            model = transformers.BertForMaskedLM(config)
        case _:
            sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 1}
            config = transformers.T5Config(**small, **sizes, decoder_start_token_id=0)
            model = transformers.T5ForConditionalGeneration(config)
    path = broken(folder, tmp_path, "none")
    model.save_pretrained(path)
    if kind == "decoder":
        without(path, "decoder.block.0.layer.0.SelfAttention.q")
    (tmp_path / "t.txt").write_text("hello", encoding="utf-8")
    assert main(["inspect", "--model", str(path), "--text", str(tmp_path / "t.txt")]) == 0
    assert "1 layer, 2 heads" in " ".join(capsys.readouterr().out.split())


def test_nothing_is_fetched_without_asking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    pytest.importorskip("transformers", reason="it is not installed")

    tried: list[Any] = []

    def refuse(*address: Any, **_: Any) -> Any:
        tried.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    report = complaint(capsys, "--model", "nobody/has-this-model")
    assert "there is no model of that name on this machine" in report
    assert "--download" in report
    assert not tried
