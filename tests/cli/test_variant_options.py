"""Every variant as an option of inspect, explain and plan: the numbers, and errors that name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.cli import main
from qkv.cli.variants import OPTIONS
from qkv.testing import truth

RNG = np.random.default_rng(0)
LENGTH = 9
Q = RNG.normal(size=(2, 4, LENGTH, 8))
K, V = RNG.normal(size=(2, 2, 2, LENGTH, 8))
TABLE = RNG.normal(size=(8, 4))
BLOCKS = RNG.random((4, 3, 3)) < 0.7
MASK = RNG.random((2, 1, LENGTH, LENGTH)) < 0.7
BIAS = RNG.normal(size=(4, LENGTH, LENGTH))

SAID: dict[str, tuple[list[str], tuple[Any, ...]]] = {
    "causal": (["--causal"], (qkv.Causal(),)),
    "window": (["--window", "2,1"], (qkv.SlidingWindow(2, 1),)),
    "window, one side": (["--window", "none,0"], (qkv.SlidingWindow(None, 0),)),
    "lengths": (["--lengths", "7,4"], (qkv.KeyLengths([7, 4]),)),
    "length": (["--lengths", "5"], (qkv.KeyLengths(5),)),
    "segments": (
        ["--segments", "0,0,0,1,1,1,1,2,2", "--causal"],
        (qkv.Segments([0, 0, 0, 1, 1, 1, 1, 2, 2]), qkv.Causal()),
    ),
    "prefix": (["--prefix", "3,1"], (qkv.Prefix([3, 1]),)),
    "strided": (["--strided", "3"], (qkv.Strided(3),)),
    "random blocks": (["--random-blocks", "2,2,7"], (qkv.RandomBlocks(2, 2, 7),)),
    "block sparse": (["--block-sparse", "blocks.npy,3,3"], (qkv.BlockSparse(BLOCKS, 3, 3),)),
    "mask": (["--mask", "mask.npy"], (qkv.Mask(MASK),)),
    "bias": (["--bias", "bias.npy"], (qkv.Bias(BIAS),)),
    "alibi": (["--alibi"], (qkv.ALiBi(),)),
    "slopes": (["--alibi", "0.5,0.25,1,2"], (qkv.ALiBi([0.5, 0.25, 1.0, 2.0]),)),
    "t5": (["--t5", "table.npy,decoder,20"], (qkv.RelativeBias(TABLE, False, 20),)),
    "bias, then cap": (
        ["--bias", "bias.npy", "--softcap", "1.5"], (qkv.Bias(BIAS), qkv.Softcap(1.5)),
    ),
    "cap, then bias": (
        ["--softcap", "1.5", "--bias", "bias.npy"], (qkv.Softcap(1.5), qkv.Bias(BIAS)),
    ),
    "rope": (["--rope"], (qkv.RoPE(),)),
    "rope of a part": (
        ["--rope", "50,4,interleaved"],
        (qkv.RoPE(base=50.0, rotary_dim=4, layout="interleaved"),),
    ),
    "sinks": (["--sinks", "-0.5,1,0,2"], (qkv.Sinks([-0.5, 1.0, 0.0, 2.0]),)),
    "dropout": (["--dropout", "0.5,3"], (qkv.Dropout(0.5, 3),)),
    "prefix-LM": (["--causal", "--or", "--prefix", "4"], (qkv.Causal() | qkv.Prefix(4),)),
    "Longformer, causal": (
        ["--window", "2,2", "--or", "--global", "0,5", "--causal"],
        (qkv.SlidingWindow(2, 2) | qkv.GlobalTokens([0, 5]), qkv.Causal()),
    ),
    "BigBird": (
        ["--window", "1,1", "--or", "--global", "0", "--or", "--random-blocks", "2,1"],
        (qkv.SlidingWindow(1, 1) | qkv.GlobalTokens([0]) | qkv.RandomBlocks(2, 1),),
    ),
}  # fmt: skip
each = pytest.mark.parametrize("name", SAID)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("qkv.npz", q=Q, k=K, v=V)
    for name, array in {"blocks": BLOCKS, "mask": MASK, "bias": BIAS, "table": TABLE}.items():
        np.save(name, array)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_option_is_tried() -> None:
    tried = {word for words, _ in SAID.values() for word in words if word.startswith("--")}
    assert tried == {option.flag for option in OPTIONS}


@each
@pytest.mark.usefixtures("files")
def test_explain(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, variants = SAID[name]
    expected = truth(Q, K, V, variants, q_offset=0)
    report = printed(
        capsys, "explain", "qkv.npz", *words, "--query", "all", "--head", "2", "--batch", "1"
    )
    (head,) = report["heads"]
    for i, row in enumerate(head["rows"]):
        weights = np.array(row["softmax"]["weights"], float)
        np.testing.assert_allclose(weights, expected.weights[1, 2, i], rtol=1e-9, atol=1e-12)
        output = np.array(row["output"], float)
        np.testing.assert_allclose(output, expected.out[1, 2, i], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["lengths", "segments", "slopes", "random blocks", "rope"])
@pytest.mark.usefixtures("files")
@pytest.mark.one_in(3)
def test_inspect_of_one_head_and_one_row(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A head, a row and a batch row keep what variants say of them."""
    words, variants = SAID[name]
    weights = truth(Q, K, V, variants, q_offset=0).weights[1]
    entropy = -np.sum(weights * np.log(np.where(weights > 0, weights, 1)), axis=-1)
    report = printed(capsys, "inspect", "qkv.npz", *words, "--batch", "1")
    assert report["variants"] == [repr(variant) for variant in variants]
    found = [head["entropy"] for head in report["heads"]]
    np.testing.assert_allclose(found, entropy.mean(-1), rtol=1e-9)
    for head, w in zip(report["heads"], weights, strict=True):
        assert head["pairs"][0]["weight"] == pytest.approx(w.max(), rel=1e-9)
    narrow = ["--batch", "1", "--head", "3", "--query", "5"]
    (head,) = printed(capsys, "inspect", "qkv.npz", *words, *narrow)["heads"]
    assert head["head"] == 3
    assert head["entropy"] == pytest.approx(entropy[3, 5], rel=1e-9, abs=1e-12)
    for pair in head["pairs"]:
        assert pair["q_index"] == 5
        assert pair["weight"] == pytest.approx(weights[3, 5, pair["kv_index"]], rel=1e-9)


@pytest.mark.usefixtures("files")
def test_text_of_inspect_says_the_variants_and_repeats_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", "qkv.npz", "--window", "2,0", "--softcap", "30"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "SlidingWindow(2, 0), Softcap(30.0)" in text
    assert "qkv inspect qkv.npz --window 2,0 --softcap 30 --query" in text


@each
@pytest.mark.usefixtures("files")
def test_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, variants = SAID[name]
    expected = qkv.plan(Q, K, V, *variants)
    report = printed(capsys, "plan", "qkv.npz", *words)
    assert report["problem"] == expected.problem
    assert report["tiles"]["full"] == expected.tiles.full
    assert report["operations"] == expected.operations


def test_plan_of_sizes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Two products of 2 * 64 operations for each pair; half the tiles and the diagonal."""
    sizes = ["--q-len", "4096", "--heads", "16", "--kv-heads", "2", "--batch-size", "3"]
    report = printed(capsys, "plan", *sizes)
    assert report["operations"] == 3 * 16 * 4096**2 * 4 * 64
    causal = printed(capsys, "plan", *sizes, "--causal")
    tiles = causal["tiles"]
    last = [min(q + causal["block_q"], 4096) - 1 for q in range(0, 4096, causal["block_q"])]
    seen = sum(query // causal["block_kv"] + 1 for query in last)
    assert tiles["full"] + tiles["partial"] == 3 * 16 * seen
    for more in (["--layout", "blhd"], ["--dtype", "bfloat16"], ["--kv-len", "4096"]):
        assert printed(capsys, "plan", *sizes, *more)["operations"] == report["operations"]
    assert main(["plan", "--q-len", "100", "--rope", "--window", "3,0"]) == 0
    assert "RoPE() & SlidingWindow(3, 0)" in capsys.readouterr().out


BAD = {
    "a window below zero": (["--window", "-1,0"], ["--window -1,0", "left=-1", "LEFT,RIGHT"]),
    "a window of one number": (["--window", "4"], ["--window", "'4'", "LEFT,RIGHT"]),
    "an odd rotary dimension": (["--rope", "1e4,3"], ["--rope 1e4,3", "3 entries", "ROTARY_DIM"]),
    "a layout of its own": (["--rope", "1e4,4,pairs"], ["--rope", "'pairs'", "half_split"]),
    "four parts": (["--rope", "1e4,4,half_split,9"], ["--rope", "ROTARY_DIM"]),
    "a cap of zero": (["--softcap", "0"], ["--softcap 0", "cap=0.0", "CAP"]),
    "a word": (["--softcap", "much"], ["--softcap", "'much'", "CAP"]),
    "a stride of zero": (["--strided", "0"], ["--strided 0", "stride=0"]),
    "half a length": (["--lengths", "3.5"], ["--lengths", "'3.5'", "N[,N...]"]),
    "a negative length": (["--lengths", "-3"], ["-3"]),
    "a probability": (["--dropout", "2,0"], ["--dropout 2,0", "p=2.0", "P,SEED"]),
    "no seed": (["--dropout", "0.5"], ["--dropout", "'0.5'", "P,SEED"]),
    "no blocks": (["--random-blocks", "0,3"], ["--random-blocks", "block_size=0", "SIZE"]),
    "two seeds": (["--random-blocks", "2,3,0,1"], ["--random-blocks", "'2,3,0,1'", "SEED"]),
    "no file": (["--bias", "none.npy"], ["--bias none.npy", "No such file", ".npy"]),
    "another file": (["--bias", "text.npy"], ["--bias text.npy", "not an array", ".npy"]),
    "several arrays": (["--t5", "two.npz"], ["--t5 two.npz", "several", "num_buckets"]),
    "a table of one dimension": (["--t5", "line.npy"], ["--t5 line.npy", "(9,)"]),
    "a mask of numbers": (["--mask", "line.npy"], ["float64"]),
    "or at the end": (["--causal", "--or"], ["--or", "two masks"]),
    "or at the start": (["--or", "--causal"], ["--or", "two masks"]),
    "or twice": (["--causal", "--or", "--or", "--causal"], ["--or", "two masks"]),
    "or of a score": (["--causal", "--or", "--alibi"], ["--or", "two masks"]),
    "too many sinks": (["--sinks", "1,2,3"], ["(3,)"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "explain", "plan"])
@pytest.mark.parametrize("name", BAD)
def test_bad_values_name_the_option_and_what_it_takes(
    name: str, command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("text.npy").write_text("no array")
    np.savez("two.npz", a=1, b=2)
    np.save("line.npy", np.ones(9))
    words, expected = BAD[name]
    assert main([command, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for text in expected:
        assert text in captured.err, captured.err


def test_a_file_after_an_option_that_may_stand_alone_is_a_file(
    files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "plan", "--rope", "qkv.npz")["problem"].startswith("RoPE()")
    assert "q_len=9" in printed(capsys, "plan", "--alibi", "--rope", "qkv.npz")["problem"]
    assert "q_len=9" in printed(capsys, "plan", "--alibi", "./qkv.npz")["problem"]
    assert printed(capsys, "plan", "--alibi", ".5", "qkv.npz")["problem"].startswith(
        "ALiBi(slopes=0.5)"
    )


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["qkv.npz", "--heads", "4"], "--heads"),
        (["--q-len", "-4"], "--q-len -4"),
        (["--q-len", str(10**20)], f"--q-len {10**20} is beyond 2147483647"),
        (["--batch-size", str(2**31 - 1), "--heads", str(2**31 - 1)], "no array is as large as"),
        (["--heads", "3", "--kv-heads", "2"], "kv"),
    ],
)
def test_sizes_that_cannot_be(
    words: list[str], fact: str, files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert fact in capsys.readouterr().err


@pytest.mark.parametrize("offset", ["start", "end", "1"])
def test_a_page_of_fewer_queries_than_keys(offset: str, tmp_path: Path) -> None:
    """0 is a position as any other."""
    file, page = str(tmp_path / "a.safetensors"), tmp_path / "page.html"
    qkv.files.write_arrays(file, Q[:, :, :5], K, V)
    assert main(["inspect", file, "--causal", "--q-offset", offset, "--html", str(page)]) == 0
    assert page.exists()
