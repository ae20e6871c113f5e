"""The small language model: its numbers from the definition, its tokens, its script."""

from __future__ import annotations

import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor

import qkv
from qkv.samples import LanguageModel, language_model
from qkv.samples.language import language_model_bytes
from scripts import script_module

SCRIPT = Path(__file__).parents[2] / "tools" / "train_language_model.py"
TEXT = "Mr. Darcy was not of the party; and Ünder £5, she\nsaid, no one wished it. \U0001f600"
HEADS, HEAD_DIM = 4, 32


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module(SCRIPT)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return language_model()


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(rows: Tensor) -> Tensor:
    """RoPE: entries i and i + 16 as a complex number, turned by position / 10000 ** (i / 16)."""
    half = HEAD_DIM // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(rows.shape[1], dtype=torch.float64), rates)
    z = torch.complex(rows[..., :half], rows[..., half:]) * torch.exp(1j * angles)
    return torch.cat([z.real, z.imag], -1)


def in_torch(ids: list[int], off: tuple[int, int] | None = None) -> Tensor:
    """The logits in float64, with torch's own attention, from the integers of the file."""
    stored = load(language_model_bytes())
    table = {
        name: tensor.double() * stored[f"{name}.scale"].double()[:, None]
        for name, tensor in stored.items()
        if tensor.dtype == torch.int8
    }
    x = norm(table["embedding.weight"][ids])
    for layer in range(4):
        q, k, v, out, up, down = (
            table[f"layers.{layer}.{role}_proj.weight"]
            for role in ("q", "k", "v", "out", "up", "down")
        )
        heads = ((norm(x) @ w.T).view(len(ids), HEADS, HEAD_DIM).transpose(0, 1) for w in (q, k, v))
        query, key, value = heads
        said = F.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
        if off is not None and off[0] == layer:
            said[off[1]] = 0
        x = x + said.transpose(0, 1).reshape(x.shape) @ out.T
        x = x + (norm(x) @ up.T).relu().square() @ down.T
    return norm(x) @ table["embedding.weight"].T


@pytest.mark.parametrize("off", [None, (2, 1)])
def test_logits_losses_and_probabilities_are_those_of_torch(
    model: LanguageModel, off: tuple[int, int] | None
) -> None:
    ids = model.encode(TEXT)
    changes = {} if off is None else {off: "off"}
    expected = in_torch(ids, off)
    logits = model.logits(ids, changes)
    assert logits.dtype == np.float64
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-10)
    lost = F.cross_entropy(expected[:-1], torch.tensor(ids[1:]), reduction="none")
    np.testing.assert_allclose(model.loss(ids, changes), lost, rtol=0, atol=1e-10)
    warm = torch.softmax(expected[-1] / 1.5, -1)
    given = model.next_probabilities(ids, 1.5, changes)
    np.testing.assert_allclose(given, warm, rtol=0, atol=1e-12)


def test_a_head_that_is_off_changes_what_comes_next(model: LanguageModel) -> None:
    ids = model.encode("Elizabeth could not help smiling at")
    before = model.next_probabilities(ids)
    for place in ((0, 0), (1, 3), (3, 2)):
        assert np.abs(model.next_probabilities(ids, changes={place: "off"}) - before).max() > 1e-6


def test_a_text_is_read_by_the_longest_piece(model: LanguageModel) -> None:
    ordered = sorted(model.pieces[1:], key=len, reverse=True)
    pattern = re.compile("|".join([*map(re.escape, ordered), "."]), re.DOTALL)
    pieces = pattern.findall(TEXT)
    known = {piece: index for index, piece in enumerate(model.pieces)}
    assert model.encode(TEXT) == [known.get(piece, 0) for piece in pieces]
    assert model.encode("") == []
    assert len(known) == 1024
    assert "".join(model.tokens(model.encode("She was not."))) == "She was not."
    assert model.tokens(model.encode("\U0001f600")) == ["\ufffd"]


def test_it_is_small_and_better_than_a_trigram_model(model: LanguageModel) -> None:
    assert len(language_model_bytes()) < 2e6
    assert model.measured["weights"] == 1024 * 128 + 4 * 12 * 128**2
    assert model.measured["loss"] < model.measured["trigram loss"]
    assert model.measured["loss"] - model.measured["loss before rounding"] < 0.01
    record = model.inspect(TEXT)
    assert (len(record), record.model, len(record.heads())) == (4, "language", 16)


def test_what_cannot_be_read(model: LanguageModel) -> None:
    for ids, fact in (([1024], "0 to 1023"), ([[1]], "whole number"), ([0.5], "whole number")):
        with pytest.raises(qkv.ArgumentError, match=fact):
            model.logits(ids)
    with pytest.raises(qkv.ArgumentError, match="no characters"):
        model.next_probabilities([])
    with pytest.raises(qkv.ArgumentError, match="temperature"):
        model.next_probabilities([3], 0.0)
    with pytest.raises(qkv.ArgumentError, match="no embedding in 8 bits"):
        LanguageModel({}, {})


# --- its script ----------------------------------------------------------------------------------


def test_the_script_reads_as_the_model_does(script: ModuleType, model: LanguageModel) -> None:
    assert script.encoded(TEXT, model.pieces).tolist() == model.encode(TEXT)


def test_pairs_are_merged_by_how_often_they_stand_together(script: ModuleType) -> None:
    """Sennrich et al. (2016), figure 1: low 5, lower 2, newest 6, widest 3, without the ends."""
    words = ["low"] * 5 + ["lower"] * 2 + ["newest"] * 6 + ["widest"] * 3
    text = "\n".join(words)
    pieces = script.byte_pair_pieces(text, 1 + len(set(text)) + 3)
    assert set(pieces[-3:]) == {"es", "est", "lo"}


def test_the_trigram_model_is_a_distribution(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "VOCABULARY", 7)
    ids = np.random.default_rng(0).integers(0, 6, 60)
    trigrams = script.Trigrams(ids)
    for a, b in product(range(7), repeat=2):
        total = sum(trigrams.probability(a, b, c) for c in range(7))
        assert total == pytest.approx(1.0, abs=1e-12)
    # By hand, of 001 twice, 010 and 100: a shorter context counts kinds, not how often.
    small = script.Trigrams(np.array([0, 0, 1, 0, 0, 1]))
    one = (1 - 0.75) / 3 + 0.75 * 2 / 3 / 7
    two = (1 - 0.75) / 2 + 0.75 * 2 / 2 * one
    assert small.probability(0, 0, 1) == pytest.approx((2 - 0.75) / 2 + 0.75 * 1 / 2 * two)


def r_strings(lines: list[str]) -> bytes:
    """One character vector as R stores it."""
    body = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8"
    body += struct.pack(">ii", 16, len(lines))
    for line in lines:
        data = line.encode()
        body += struct.pack(">ii", 0x40009, len(data)) + data
    return struct.pack(">I", len(body)) + zlib.compress(body)


def test_novels_are_read_from_the_package(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "usr" / "janeaustenr" / "data"
    folder.mkdir(parents=True)
    first = r_strings(["EMMA", "", "She was _very_", "happy.", "", "A NOTE ON THE TEXT", "", "No."])
    (folder / "Rdata.rdb").write_bytes(first + r_strings(["Sanditon", "", ""]))
    assert script.novels(tmp_path) == ["EMMA\nShe was very happy.\n", "Sanditon\n"]


@pytest.fixture
def few(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    small = {"BATCH": 2, "CONTEXT": 8, "NUM_LAYERS": 1, "SAVE_EVERY": 1, "WARM_UP": 1, "DECAY": 2}
    for name, value in small.items():
        monkeypatch.setattr(script, name, value)
    threads = torch.get_num_threads()
    yield script
    torch.set_num_threads(threads)


def test_training_goes_on_where_it_stopped(few: ModuleType, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 1024, 100)
    whole = few.train(ids, 4, None).state_dict()
    few.train(ids, 4, tmp_path / "all.pt")
    assert torch.load(tmp_path / "all.pt")["step"] == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few, "rate", lambda step, steps: min(1.0, (4 - step) / 2))
        few.train(ids, 2, tmp_path / "half.pt")
    again = few.train(ids, 4, tmp_path / "half.pt").state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_the_same_training_writes_the_same_bytes(script: ModuleType) -> None:
    arrays = {"a": np.zeros(3, np.int8), "a.scale": np.ones(3, np.float32)}
    about = {"pieces": ["a"], "num_heads": 4, "context": 128, "measured": {"loss": 3.0}}
    assert len({script.written(arrays, about) for _ in range(8)}) == 1


def test_eight_bits_are_within_half_a_step(script: ModuleType) -> None:
    torch.manual_seed(0)
    trained = script.Transformer()
    arrays = script.quantized(trained)
    for name, weight in script.dequantized(arrays).items():
        step = arrays[f"{name}.scale"][:, None]
        assert ((weight - trained.state_dict()[name]).abs().numpy() <= 0.5001 * step).all()


@pytest.mark.parametrize("method", ["inspect", "logits", "loss", "next_probabilities"])
def test_more_tokens_than_in_a_row_of_training_are_warned_of(method: str) -> None:
    model = language_model()
    ids = model.encode("The cat sat on the mat. " * 20)
    compute = getattr(model, method)
    with pytest.warns(
        UserWarning, match=rf"has {len(ids)} tokens.* trained on rows of 128"
    ) as seen:
        compute(ids)
    assert [Path(each.filename) for each in seen] == [Path(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(ids[-128:])
