"""`qkv cost`, `qkv scaling` and `qkv errata` as a user meets them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from qkv.cli import main
from qkv.cost import CONTEXTS, model_names
from qkv.errata import ERRATA
from qkv.mechanisms import MECHANISMS


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]):
    def run(*words: str, code: int = 0) -> str:
        assert main(words) == code
        out, err = capsys.readouterr()
        assert (err == "") == (code == 0)
        return err if code else out

    return run


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_a_model(output_of) -> None:
    text = output_of("cost", "--model", "LLaMA-3 8B")
    for words in ("8,030,261,248 parameters", "32 heads over 8", "One more token", "NVIDIA H100",
                  "10,000,000", "Apple M4", "estimated peak"):  # fmt: skip
        assert words in text
    assert "Other contexts" not in output_of("cost", "--model", "gpt-2", "--context", "100")


def test_a_model_as_json(output_of) -> None:
    found = strict(output_of("cost", "--model", "llama-3-8b", "--context", "8192", "--json"))
    assert found["cost"]["whole"]["kv_cache_bytes"] == 2**30
    assert found["contexts"] == []
    assert {m["name"] for m in found["machines"]} >= {"NVIDIA H200 SXM", "AMD MI300X"}
    assert found["decode"]["whole"]["operations"] < found["cost"]["whole"]["operations"]
    every = strict(output_of("cost", "--model", "vit-l", "--json", "--dtype", "float8"))
    assert every["decode"] is None
    assert [c["cost"]["context"] for c in every["contexts"]] == list(CONTEXTS)
    assert every["machines"][3]["all_tokens"] is None


def test_a_config(output_of, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(
            {
                "model_type": "\x1b[31mevil", "hidden_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 50,
            }
        )
    )  # fmt: skip
    text = output_of("cost", "--config", str(tmp_path), "--batch", "3", "--steps")
    assert "counted as llama" in text
    assert "\x1b" not in text
    assert "Steps of one layer" in text
    assert "n b e" in text
    file.write_text("{}")
    assert "the config has no hidden_size" in output_of("cost", "--config", str(file), code=2)
    assert "cannot be read" in output_of("cost", "--config", str(tmp_path / "no.json"), code=2)


@pytest.mark.slow
def test_every_card_in_one_table(output_of) -> None:
    text = output_of("cost")
    assert all(name in text for name in model_names())
    assert text.count("(speculative)") == 1
    assert list(strict(output_of("cost", "--json"))) == list(model_names())


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism(output_of, name: str) -> None:
    text = output_of("cost", "--mechanism", name)
    found = strict(output_of("cost", "--mechanism", name, "--json"))
    assert f"{found['operations']:,} operations: " in text
    assert found["operations"] == sum(step["operations"] for step in found["steps"].values())
    assert found["operations"] == sum(found["by_kind"].values())


def test_the_textbook_mechanism_takes_495_operations(output_of) -> None:
    found = strict(output_of("cost", "--mechanism", "scaled-dot-product", "--json"))
    assert found["operations"] == 495
    assert found["operations_formula"] == "4 n^2 d + 5 n^2 - n d - 2 n"


@pytest.mark.parametrize("context", ["1", "40", "900", "33000", "600000", "10000000", "90000000"])
def test_times_are_said_in_the_unit_that_fits(output_of, context: str) -> None:
    """Times from nanoseconds to years have three digits and no exponent."""
    words = "cost", "--model", "gpt-2", "--context", context, "--machine", "m4"
    (machine,) = strict(output_of(*words, "--json"))["machines"]
    times = [machine[name]["seconds"] for name in ("all_tokens", "one_more_token")]
    text = output_of(*words)
    assert not re.search(r"\de[+-]\d", text)
    units = {"y": 31557600, "d": 86400, "h": 3600, "min": 60, "s": 1, "ms": 1e-3, "us": 1e-6}
    (row,) = [line for line in text.splitlines() if line.startswith("Apple M4")]
    said = [
        float(x) * units[unit] for x, unit in re.findall(r"([\d.]+) (y|d|h|min|s|ms|us)\b", row)
    ]
    assert said == pytest.approx(times, rel=0.006)


def test_symbols_of_a_mechanism_are_explained(output_of) -> None:
    text = " ".join(output_of("cost", "--mechanism", "sliding-window").split())
    assert "d = head_dim, h = num_heads, l = left, r = right." in text


@pytest.mark.slow
def test_every_model_on_one_machine(output_of) -> None:
    """The column is the least time that the command says of each model alone."""
    text = output_of("cost", "--machine", "h100")
    (row,) = (line for line in text.splitlines() if line.startswith("llama-2-7b"))
    alone = strict(output_of("cost", "--model", "llama-2-7b", "--machine", "h100", "--json"))
    (machine,) = alone["machines"]
    assert row.endswith(f"{1000 * machine['all_tokens']['seconds']:.3g} ms")
    assert "NVIDIA" not in output_of("cost")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--model", "gpt-9"), "no card of a model 'gpt-9'"),
        (("--mechanism", "telepathy"), "there is no mechanism 'telepathy'"),
        (("--model", "gpt-2", "--context", "0"), "context=0 is not a positive integer"),
        (("--model", "gpt-2", "--batch", "-1"), "batch=-1 is not a positive integer"),
        (("--model", "gpt-2", "--dtype", "int3"), "dtype='int3' is not a type"),
        (("--mechanism", "self", "--dtype", "int3"), "Pass one of float64, float32, float16, bf"),
        (("--model", "gpt-2", "--machine", "abacus"), "no machine is called 'abacus'"),
        (("--model", "gpt-2", "--mechanism", "self"), "not allowed with"),
        (("--steps",), "none is named"),
    ],
)
def test_bad_input(output_of, words: tuple[str, ...], reason: str) -> None:
    assert reason in output_of("cost", *words, code=2)


@pytest.mark.slow
def test_scaling(output_of, tmp_path: Path) -> None:
    few = ("--draws", "500", "--seed", "3")
    text = output_of("scaling", *few, "--plot", str(tmp_path / "curve.svg"))
    assert text.count("/ sqrt(d_k)") == 11
    assert b"<svg" in (tmp_path / "curve.svg").read_bytes()
    found = strict(output_of("scaling", *few, "--json"))
    assert (found["draws"], found["seed"], len(found["points"])) == (500, 3, 22)
    assert "does not end in" in output_of("scaling", *few, "--plot", "curve.bmp", code=2)


def test_errata(output_of) -> None:
    text = output_of("errata")
    assert all(entry.name in text for entry in ERRATA)
    assert len(strict(output_of("errata", "--json"))) == 21
    one = output_of("errata", "exp-500")
    assert "assert np.isfinite(np.exp(500.0))" in one
    assert "cat-row" not in one
    assert "no erratum is called 'x'" in output_of("errata", "x", code=2)


def test_an_encoder_reads_a_source(output_of: Any, tmp_path: Path) -> None:
    config = {"model_type": "t5", "is_encoder_decoder": True, "vocab_size": 96, "d_model": 32,
              "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    words = ["cost", "--config", str(path), "--context", "10"]
    costs = [strict(output_of(*words, "--source", m, "--json"))["cost"] for m in ("5", "15")]
    # Keys and values of 10 tokens for each layer's own attention, of the source for the other.
    for cost, m in zip(costs, (5, 15), strict=True):
        assert cost["whole"]["kv_cache_bytes"] == 2 * (10 + m) * 2 * 4 * 8 * 2
    assert "encoder, 4 heads" in output_of(*words)
    assert "no encoder" in output_of("cost", "--model", "gpt-2", "--source", "5", code=2)
    assert "--source" in output_of("cost", "--mechanism", "mamba", "--source", "5", code=2)


def test_ranks(output_of) -> None:
    """Bytes by hand: 32 layers, 8 heads of 128 and 128 numbers of 2 bytes, 7 of 8 parts."""
    pytest.importorskip("torch", reason="qkv.distributed needs torch")
    words = "cost", "--model", "llama-3-8b", "--context", "65536", "--ranks", "8"
    found = strict(output_of(*words, "--json"))
    received = 32 * 65536 * 7 // 8 * 8 * 256 * 2
    assert found["strategies"]["gather"]["received"] == received
    assert found["strategies"]["gather"]["held"] == 2 * 65536 * 8 * 256 * 2
    assert found["strategies"]["ring"]["received"] == received
    ring = found["strategies"]["ring"]
    pairs = 65536 * 65537 / 2
    even = 32 * 32 * pairs * 4 * 128 / (0.6 * 989.4e12) / 8
    assert 0.97 < ring["efficiency"] <= 1
    assert ring["seconds"] * ring["efficiency"] == pytest.approx(even, rel=2e-3)
    text = output_of(*words, "--order", "contiguous", "--link", "1")
    for fact in ("8 ranks in contiguous order", "1.875", "receives 1 GB/s", "ulysses"):
        assert fact in text
    refused = " ".join(output_of(*words[:-1], "12").split())
    assert "32 query heads cannot be shared out evenly to 12 ranks" in refused
    assert "none is named" in output_of("cost", "--ranks", "2", code=2)
    assert "--link -1 is not a number" in output_of(*words, "--link", "-1", code=2)
    many = "65,536 tokens are not spread over 100,000 ranks"
    assert many in output_of(*words[:-1], "100000", code=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--link", "10"], "--link is of a sequence"),
        (["--link", "0"], "--link is of a sequence"),
        (["--order", "bogus"], "--order is of a sequence"),
        (["--ranks", "4", "--steps"], "--steps does not go with --ranks"),
        (["--ranks", "4", "--source", "9"], "--source does not go with --ranks"),
    ],
)
def test_options_that_would_change_nothing(output_of, words: list[str], said: str) -> None:
    assert said in output_of("cost", "--model", "gpt-2", *words, code=2)
