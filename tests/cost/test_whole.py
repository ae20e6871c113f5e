"""Operations, bytes and times of whole models, against torch's own counter and the goldens."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import qkv.cost.peaks
from qkv.cost import (
    Attention,
    FeedForward,
    Layer,
    Machine,
    ModelCost,
    machine,
    machine_names,
    machines,
    model_card,
    model_cost,
    model_names,
    ranks,
    read_config,
)
from qkv.errors import ArgumentError

GOLDENS = json.loads(
    Path(__file__).parents[1].joinpath("golden", "goldens.json").read_text(encoding="utf-8")
)
CARDS = {
    "GPT-3 175B": "gpt-3",
    "LLaMA-2 70B": "llama-2-70b",
    "GPT-4 (speculative)": "gpt-4",
    "ViT-Large": "vit-l",
    "AlphaFold2": "alphafold2",
    "shared example": "shared-example",
}


@pytest.mark.parametrize("row", GOLDENS["real_world_scale"], ids=lambda row: row["model"])
def test_real_world_rows(row: dict[str, Any]) -> None:
    cost = model_cost(CARDS[row["model"]])
    (layer,) = cost.layers
    attention = cost.model.layers[0].attention
    assert (cost.context, attention.head_dim) == (row["tokens"], row["head_dim"])
    assert (layer.count, attention.num_heads) == (row["layers"], row["heads"])
    assert cost.score_entries == row["score_entries"]
    assert cost.score_bytes == 2 * row["score_entries"]
    assert cost.model.speculative == ("speculative" in row["model"])
    if not cost.model.causal:  # the texts count pairs that a causal mask forbids, too
        assert cost.ledger["qk_multiply"] == row["qk_multiply_adds"]


def test_the_shared_example_takes_495_operations() -> None:
    ledger = model_cost("shared-example").ledger
    assert {**ledger.counts, "total": ledger.total} == GOLDENS["operation_ledger"]["shared_example"]


SMALL = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
TWO = {"num_key_value_heads": 2, "head_dim": 16}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "first_k_dense_replace": 3, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "extra"),
    [("llama", TWO), ("gemma2", TWO), ("qwen3", TWO), ("gpt2", {"n_inner": 48}), ("bert", {}),
     ("deepseek_v3", LATENT)],
)  # fmt: skip
def test_products_are_those_that_torch_counts(kind: str, extra: dict[str, Any], tmp_path) -> None:
    """Torch counts two operations for each multiply-add, and every pair of a masked product."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    small = {n: x for n, x in SMALL.items() if (kind, n) != ("gpt2", "intermediate_size")}
    config = AutoConfig.for_model(kind, **small, **extra)
    config._attn_implementation = "eager"
    config.save_pretrained(tmp_path)
    causal = kind != "bert"
    batch, n = 2, 10
    made = (AutoModelForCausalLM if causal else AutoModel).from_config(config).eval()
    keep = {"logits_to_keep": 1} if causal else {}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        made(torch.ones(batch, n, dtype=torch.int64), **keep)
    cost = model_cost(read_config(tmp_path), n, batch=batch, dtype="float32")
    counts = cost.ledger.counts
    attention = cost.model.layers[0].attention
    pairs = SMALL["num_hidden_layers"] * attention.num_heads * batch * n * n
    products = {name: int(c) for name, c in counts.items() if name.endswith("_multiply")}
    ours = sum(c for name, c in products.items() if "_proj" in name or name == "head_multiply")
    # What a gate multiplies number by number is not a product of matrices.
    if "gate_proj_multiply" in products:
        ours -= SMALL["num_hidden_layers"] * batch * n * SMALL["intermediate_size"]
    ours += pairs * (attention.head_dim + attention.v_head_dim)
    pooler = batch * 32 * 32 if kind == "bert" else 0
    assert 2 * (ours + pooler) == counter.get_total_flops() - _positions(kind, counter)
    if not causal:
        assert products["qk_multiply"] == products["av_multiply"] == pairs * attention.head_dim


def _positions(kind: str, counter: Any) -> int:
    """Angles of rotary embeddings, which transformers computes as a batched product."""
    by_module = counter.get_flop_counts()
    return sum(
        count
        for name, counts in by_module.items()
        if name.endswith("rotary_emb")
        for count in counts.values()
    )


@pytest.mark.slow
def test_every_model_at_every_context() -> None:
    for name in model_names():
        costs = [model_cost(name, context, batch=2) for context in (1_000, 10_000_000, 20_000_000)]
        for a, b in pairwise(costs):
            assert a.parameters == b.parameters == model_cost(name, 7).parameters
            assert a.operations < b.operations
            assert a.bytes_moved < b.bytes_moved
            assert a.kv_cache_bytes <= b.kv_cache_bytes
        # At 10M tokens scores dominate, and twice the tokens take four times the operations,
        # unless every layer has a window.
        growth = costs[-1].operations / costs[-2].operations
        windows = [layer.attention.window for layer in costs[0].model.layers]
        assert growth == pytest.approx(2 if all(windows) else 4, rel=0.06)


def test_decoding_reads_weights_and_cache_once() -> None:
    cost = model_cost("llama-3-8b", 8192, decode=True)
    table = 128_256 * 4096
    floor = 2 * (cost.parameters - table) + cost.kv_cache_bytes
    assert floor < cost.bytes_moved < 1.001 * floor
    # Two operations for each parameter but the token table, and 4 n d for each head.
    attention = 4 * 8192 * 128 * 32 * 32
    assert cost.operations == pytest.approx(2 * (cost.parameters - table) + attention, rel=0.02)
    assert cost.roofline(machine("h100")).bound == "memory"
    assert model_cost("llama-3-8b", 8192).roofline(machine("h100")).bound == "operations"


def test_experts_that_no_token_chose_are_not_read() -> None:
    one, many = (model_cost("deepseek-v3", 100, batch=b, decode=True) for b in (1, 64))
    weights = 2 * one.active_parameters  # without the table of tokens
    assert weights < one.bytes_moved < 1.01 * weights
    whole = 2 * (many.parameters - 129_280 * 7168)
    assert whole < many.bytes_moved < 1.01 * whole


@pytest.mark.parametrize("shared", [0, 6])
@pytest.mark.parametrize("chosen", [1, 3])
def test_outputs_of_experts_are_added_with_weights_of_a_softmax(shared: int, chosen: int) -> None:
    """A token takes its largest scores in turn, their softmax, and a sum of weighted rows."""
    forward = FeedForward(5, experts=4, experts_per_token=chosen, shared_width=shared)
    model = replace(model_card("gpt-2"), width=8)
    layer = Layer(Attention(1, 1, 8, 8), forward, 2)
    counts = model_cost(replace(model, layers=(layer,)), 7).ledger.counts
    expected: Counter[str] = Counter()
    for _ in range(7):
        expected["router_compare"] += chosen * 3
        expected["router_softmax_compare"] += chosen - 1
        expected["router_softmax_subtract"] += chosen
        expected["router_softmax_exp"] += chosen
        expected["router_softmax_add"] += chosen - 1
        expected["router_softmax_divide"] += chosen
        expected["combine_multiply"] += chosen * 8
        expected["combine_add"] += (chosen + bool(shared) - 1) * 8
    assert {name: counts.get(name, 0) for name in expected} == expected


def test_absorbed_decoding_of_latent_attention() -> None:
    """Multiplications of each of 128 heads of 61 layers, as the DeepSeek-V2 report derives them.

    A query of 128 goes into the latent space of 512; each cached row of 512 + 64 is met twice, the
    second time without the 64; the result of 512 goes out to a value of 128.
    """
    counts = model_cost("deepseek-v3", 1000, decode=True).ledger
    heads = 61 * 128
    assert counts["absorb_key_multiply"] == heads * 128 * 512
    assert counts["qk_multiply"] == heads * 1000 * (512 + 64)
    assert counts["av_multiply"] == heads * 1000 * 512
    assert counts["absorb_value_multiply"] == heads * 512 * 128


def test_a_window_counts_the_query_itself() -> None:
    """A window of 4096 keys, its own included: rows 0 to 4095 see 1 to 4096, all others 4096."""
    counts = model_cost("mistral-7b", 10_000).ledger
    pairs = sum(min(i + 1, 4096) for i in range(10_000))
    assert counts["qk_multiply"] == 32 * 32 * 128 * pairs


def test_rotation_takes_four_multiplications_for_two_components() -> None:
    counts = model_cost("llama-3-8b", 100).ledger
    rows = 32 * 100 * (32 + 8)
    assert counts["rope_multiply"] == rows * 64 * 4
    assert counts["rope_add"] == counts["rope_subtract"] == rows * 64


def test_formulas_of_a_layer_say_how_it_grows() -> None:
    gemma = model_cost("gemma-2-9b", 100_000)
    local, whole = sorted(gemma.layers, key=lambda layer: layer.ledger.total)
    assert "window 4096" in local.kind
    assert whole.ledger["qk_multiply"].formula == "n^2 b d h / 2 + n b d h / 2"
    assert "n b d h w" in local.ledger.formulas["qk_multiply"]
    assert "n^2" not in local.ledger.total.formula


@pytest.mark.parametrize("name", ["h100", "h200", "mi300x", "m4"])
def test_machines_have_sources(name: str) -> None:
    described = machine(name)
    assert described.source
    assert described.estimated == (name == "m4")
    assert described.roofline(1, 1, "int4") is None


def test_the_roofline_is_the_larger_of_two_times() -> None:
    plain = Machine("plain", {"float32": 100.0}, 10.0, "made up")
    assert plain.roofline(1000, 10, "float32") == (10.0, "operations")
    assert plain.roofline(100, 100, "float32") == (10.0, "memory")


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qkv.cost.peaks, "_BEYOND_CACHES", 2**24)
    monkeypatch.setattr(machines, "_BEYOND_CACHES", 2**24)
    monkeypatch.setattr(qkv.cost.peaks, "_TRIES", 1)
    here = machine("here")
    machines._measured.cache_clear()
    assert "here" in machine_names()
    assert "measured" in here.source
    assert here.bandwidth > 0
    assert set(here.peak) == {"float64", "float32", "bfloat16", "float16"}
    assert all(peak > 0 for peak in here.peak.values())


def test_this_machine_is_measured_for_each_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    class Ceiling:
        def __init__(self, threads: int) -> None:
            made.append(threads)

        def measure(self) -> float:
            return 1.0

    monkeypatch.setattr(qkv.cost.peaks, "product_ceiling", lambda kind, threads: Ceiling(threads))
    monkeypatch.setattr(qkv.cost.peaks, "read_ceiling", lambda size, threads: Ceiling(threads))
    before = qkv.get_num_threads()
    machines._measured.cache_clear()
    try:
        for threads in (1, 2, 1):
            qkv.set_num_threads(threads)
            assert machine("here").source == f"measured just now with {threads} threads"
            ranks._rate("here", "float32")
        assert made == [1] * 4 + [2] * 4
        assert ranks._measured_rate.cache_info().currsize >= 2
    finally:
        qkv.set_num_threads(before)
        machines._measured.cache_clear()
        ranks._measured_rate.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"context": 0}, "context=0 is not a positive integer"),
        ({"context": 1.5}, "context=1.5 is not a positive integer"),
        ({"batch": True}, "batch=True is not a positive integer"),
        ({"dtype": "int3"}, "dtype='int3' is not a type"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        model_cost("gpt-2", **arguments)


def test_what_has_no_cache_does_not_decode() -> None:
    with pytest.raises(ArgumentError, match="BERT-base reads all its tokens at once"):
        model_cost("bert-base", decode=True)
    with pytest.raises(ArgumentError, match="no machine is called 'abacus'"):
        machine("abacus")


def test_everything_is_in_the_dictionary() -> None:
    cost: ModelCost = model_cost("gpt-oss-20b", 1000)
    found = json.loads(json.dumps(cost.to_dict(), allow_nan=False))
    assert found["whole"]["parameters"] == 20_914_757_184
    assert sum(layer["count"] for layer in found["layers"]) == 24
    parts = [*found["layers"], {**found["outside_layers"], "count": 1}]
    assert sum(p["operations"] * p["count"] for p in parts) == found["whole"]["operations"]
    assert model_card("gpt-oss-20b").source == found["source"]
