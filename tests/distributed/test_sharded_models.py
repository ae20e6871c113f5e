"""Models of transformers over ranks beside the same model in one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

LENGTH = 48
FACTS: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 90, "max_position_embeddings": 128,
    "pad_token_id": 0, "attention_dropout": 0.0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 7},
    "Gemma2": {"sliding_window": 9, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "GptOss": {"sliding_window": 9, "num_local_experts": 2, "num_experts_per_tok": 1},
    "dynamic": {"max_position_embeddings": 8, "rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "longrope": {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "factor": 4.0,
        "long_factor": [2.0, 3.0, 4.0, 8.0], "original_max_position_embeddings": 30}},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0},
}  # fmt: skip


def made(name: str) -> Any:
    """A model with random weights, the same ones in every process."""
    import transformers

    facts = {**({} if name == "GPT2" else FACTS), **MODELS[name], "vocab_size": 90}
    name = "Llama" if name in ("dynamic", "longrope") else name
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**facts)
    config._experts_implementation = "eager"  # The others take no float64.
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    return getattr(transformers, kind)(config).double()


def inputs(case: str) -> dict[str, Any]:
    """Tokens of the whole sequence, and what else the model is told."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 90, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, 20:23] = -100
    given: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if "padded" in case:
        mask = torch.ones_like(ids)
        mask[0, 41:] = 0
        if case == "padded left":
            mask[1, :5] = 0
        given["attention_mask"] = mask
        given["labels"] = torch.where(mask.bool(), labels, -100)
    if case == "packed":
        ends = torch.tensor([0, 13, 30, 31, LENGTH]).diff().tolist()
        given["position_ids"] = torch.cat([torch.arange(n) for n in ends])[None].expand(2, -1)
        given["use_cache"] = False  # transformers looks for packed sequences only without a cache.
    return given


def on_ranks(rank: int, ranks: int, name: str, case: str, checkpoint: bool) -> Any:
    """The rank's logits, its loss, and the gradients of all parameters, added up over ranks."""
    import torch.distributed as dist

    import qkv.hf
    from qkv.distributed import Order

    order = Order.zigzag(LENGTH, ranks)
    model = made(name).train()
    before = model.config._attn_implementation
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    given = inputs(case)
    own = {
        k: order.shard(v, rank, axis=-1) for k, v in given.items() if isinstance(v, torch.Tensor)
    }
    with qkv.hf.sharded(model, order=order, timeout=60):
        result = model(**{**given, **own})
        result.loss.backward()
    assert model.config._attn_implementation == before
    assert "_loss_function" not in vars(model)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    gradients = [p.grad for p in model.parameters()]
    return result.logits.detach(), result.loss.detach(), gradients


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case", "checkpoint"),
    [
        ("Llama", "plain", False),
        ("Llama", "packed", False),
        ("Llama", "padded left", True),
        ("Mistral", "plain", False),
        ("Gemma2", "padded", False),
        ("Mistral", "packed", False),
        ("GptOss", "packed", False),  # It does not look for packed sequences.
        ("GPT2", "plain", False),
    ],
)
@pytest.mark.one_in(2)
def test_a_model_over_ranks_is_the_model(
    group: Any, name: str, case: str, checkpoint: bool
) -> None:
    """Logits, loss and every gradient are those of one process with torch's attention."""
    from qkv.distributed import Order

    model = made(name).train()
    # Eager attention gives NaN where a row sees no key; the other one has no soft cap and no sinks.
    model.set_attn_implementation("sdpa" if case == "padded left" else "eager")
    right = model(**inputs(case))
    right.loss.backward()
    found = group(2)(on_ranks, name, case, checkpoint)
    logits = Order.zigzag(LENGTH, 2).unshard([of_rank[0] for of_rank in found])
    real = inputs(case).get("attention_mask", torch.ones(2, LENGTH)).bool()
    torch.testing.assert_close(logits[real], right.logits[real].detach())
    torch.testing.assert_close(sum(of_rank[1] for of_rank in found), right.loss.detach())
    for of_rank in found:
        for one, parameter in zip(of_rank[2], model.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=1e-6, atol=1e-7)


def in_turn(rank: int, ranks: int, name: str, packed: bool) -> list[torch.Tensor]:
    """The rank's logits of a long sequence, a short one, and the long one again."""
    import qkv.hf
    from qkv.distributed import Order

    model, found = made(name).eval(), []
    for length in (LENGTH, 6, LENGTH):
        order = Order.contiguous(length, ranks)
        own = {k: order.shard(v, rank, axis=-1) for k, v in whole_of(length, packed).items()}
        with torch.no_grad(), qkv.hf.sharded(model, order=order, timeout=60):
            found.append(model(**own, use_cache=False).logits)
    return found


def whole_of(length: int, packed: bool) -> dict[str, torch.Tensor]:
    given = {"input_ids": inputs("plain")["input_ids"][:, :length]}
    if packed:
        given["position_ids"] = (torch.arange(length) % 40)[None].expand(2, -1)
    return given


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length(group: Any, name: str, packed: bool) -> None:
    """The frequencies are those of the whole sequence, on ranks that hold early rows as well."""
    from qkv.distributed import Order

    model = made(name).eval()
    model.set_attn_implementation("eager")
    found = group(2)(in_turn, name, packed)
    for n, length in enumerate((LENGTH, 6, LENGTH)):
        with torch.no_grad():
            right = model(**whole_of(length, packed), use_cache=False).logits
        whole = Order.contiguous(length, 2).unshard([of_rank[n] for of_rank in found])
        torch.testing.assert_close(whole, right)


def refused(rank: int, ranks: int, what: str) -> str:
    import transformers

    import qkv.hf
    from qkv.distributed import Order

    order = Order.contiguous(LENGTH, ranks)
    model, own = made("Llama"), order.shard(inputs("plain")["input_ids"], rank, axis=-1)
    given: dict[str, Any] = {"input_ids": own}
    match what:
        case "rows":
            given["input_ids"] = own[:, : 10 + rank]
        case "order of one rank":
            order = Order.contiguous(LENGTH, 1)
        case "order of three ranks":
            order = Order.of_sizes([LENGTH // 2, LENGTH // 2, 5])
        case "no tokens":
            order = Order.of_sizes([LENGTH, 0])
            given["input_ids"] = order.shard(inputs("plain")["input_ids"], rank, axis=-1)
        case "one rank has padding":
            given |= {"attention_mask": torch.ones_like(own)} if rank else {}
        case "weights":
            given["output_attentions"] = True
        case "two sequences":
            model = transformers.T5Model(transformers.T5Config(d_model=8, num_layers=1))
        case "dropout":
            model = made("Llama").train()
            model.model.layers[0].self_attn.attention_dropout = 0.1
        case "lengths":
            given["cu_seq_lens_q"] = torch.tensor([0, len(own[0])])
        case "keys":
            cache = transformers.DynamicCache(config=model.config)
            cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
            given["past_key_values"] = cache
        case "loss":
            given = {"input_ids": own, "labels": own}
            model = transformers.BertForMaskedLM(
                transformers.BertConfig(vocab_size=90, hidden_size=32, num_hidden_layers=1,
                                        num_attention_heads=4, intermediate_size=8)
            ).eval()  # fmt: skip
    try:
        with qkv.hf.sharded(model, order=order, timeout=60):
            result = model(**given)
            if what == "afterwards":
                result = result.logits
        if what == "afterwards":
            model.gradient_checkpointing_enable({"use_reentrant": False})
            with qkv.hf.sharded(model.train(), order=order, timeout=60):
                result = model(**given).logits
            result.sum().backward()
    except qkv.QkvError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("rows", "the order gives it 24 rows; the model is called with 1"),
        ("order of one rank", "the order is of 1 ranks; the model is spread over 2"),
        ("order of three ranks", "the order is of 3 ranks; the model is spread over 2"),
        ("no tokens", "is called with 0 tokens; every rank must hold one or more"),
        ("one rank has padding", "inputs differs between ranks"),
        ("weights", "output_attentions asks for weights that no rank holds"),
        ("two sequences", "T5Model reads two sequences"),
        ("dropout", "drops weights with probability 0.1"),
        ("lengths", "gets cu_seq_lens_q"),
        ("keys", "past_key_values hold keys of this rank's rows alone"),
        ("loss", "computes a loss that cannot be spread"),
        ("afterwards", r"until backward\(\) is done"),
    ],
)
@pytest.mark.one_in(2)
def test_what_cannot_be_spread_is_said(group: Any, what: str, words: str) -> None:
    for said in group(2)(refused, what):
        assert re.search(words, said), said
