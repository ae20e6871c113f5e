"""The method `intervene`, for the small model and for one of transformers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.cli.inputs.model import lab_source
from qkv.lab.session import Session
from qkv.samples import tiny_model


def options(**said: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"model": "tiny", "text": None, "tokens": None, "download": False, **said}
    )


def ask(session: Session, **params: Any) -> Any:
    found = session.answer("intervene", params).result
    return json.loads(json.dumps(found, allow_nan=False))


def test_the_small_model_without_its_induction_heads() -> None:
    session = Session(lab_source(options(), lambda done, total: None))
    layers = session.answer("model").result["layers"]
    assert session.answer("model").result["can_intervene"] is True
    heads = [
        {"layer": layer["index"], "head": head["head"], "what": "off"}
        for layer in layers
        for head in layer["heads"]
        if head["kind"] == "induction"
    ]
    found = ask(session, changes=heads)
    model = tiny_model()
    ids = model.repeated_sequence()
    np.testing.assert_allclose(found["before"]["losses"][1:], model.loss(ids), atol=1e-12)
    assert found["before"]["losses"][0] == "nan"
    off = model.loss(ids, {(change["layer"], change["head"]): "off" for change in heads})
    assert found["after"]["loss"] == pytest.approx(off.mean())
    assert found["after"]["loss"] > found["before"]["loss"] + 1
    best = model.tokens([int(model.logits(ids)[-1].argmax())])[0]
    assert found["before"]["prediction"][0]["token"] in (best, repr(best)[1:-1])
    total = sum(entry["probability"] for entry in found["before"]["prediction"])
    assert 0 < total <= 1


def test_prompts_and_copies() -> None:
    session = Session(lab_source(options(), lambda done, total: None))
    same = {"layer": 1, "head": 0, "what": "copy"}
    found = ask(session, prompt="abcabcabc", source="abcabcabc", changes=[same])
    assert found["before"] == found["after"]
    assert found["tokens"] == list("abcabcabc")
    changed = ask(session, prompt="abcabcabc", source="xyzzyxyzz", changes=[same])
    assert changed["before"] == found["before"] != changed["after"]
    for wrong, fact in (
        ({"changes": [same]}, "no other prompt"),
        ({"changes": [same], "source": "a"}, "1 queries"),
        ({"changes": [{"layer": 9, "head": 0}]}, "layer 9"),
        ({"prompt": "x" * 5000}, "5000 tokens"),
        ({"changes": [1]}, "not a list of objects"),
    ):
        with pytest.raises(qkv.QkvError, match=fact):
            session.answer("intervene", wrong)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """The model's own losses are the same, also with a hook that switches the head off."""
    torch = pytest.importorskip("torch", reason="the extra hf is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["[UNK]", *"abcdefghij"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]"
    ).save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.5)
    model.save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("a b c d a b c d a b")
    said = options(model=str(tmp_path), text=str(text))
    session = Session(lab_source(said, lambda done, total: None))
    summary = session.answer("model").result
    assert (len(summary["layers"]), summary["can_intervene"]) == (2, True)
    assert session.data("server")["view"]["text"] == "a b c d a b c d a b"
    assert summary["layers"][0]["num_kv_heads"] == 2
    found = ask(session, changes=[{"layer": 1, "head": 2, "what": "off"}])
    ids = torch.tensor([[words[word] for word in "abcdabcdab"]])
    with torch.no_grad():
        assert found["before"]["loss"] == pytest.approx(
            float(model(ids, labels=ids).loss), rel=1e-5
        )

        def off(module: Any, args: Any) -> Any:
            joined = args[0].clone()
            joined[..., 8:12] = 0
            return (joined,)

        model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(off)
        assert found["after"]["loss"] == pytest.approx(float(model(ids, labels=ids).loss), rel=1e-5)
    assert found["after"]["loss"] != pytest.approx(found["before"]["loss"], rel=1e-3)
    assert found["tokens"] == list("abcdabcdab")
