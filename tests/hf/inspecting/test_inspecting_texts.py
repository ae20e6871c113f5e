"""`qkv.hf.inspect` of a text: what the model is called with, and what is refused before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

REASON = "inspecting models of transformers needs it: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import model_of  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402

WORDS = ["the", "cat", "sat", "mat"]


def tokenizer(**options: Any) -> Any:
    """The words of this file, from 3 on; a pad token with the number 0 is asked for."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    table = {"<pad>": 0, **{word: 3 + i for i, word in enumerate(WORDS)}}
    made = Tokenizer(models.WordLevel(table, "the"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **options)


def entropies(record: Any) -> list[float]:
    return [row["entropy"] for row in record.rows()]


@pytest.mark.parametrize(("text", "ids"), [(None, [1]), ("the cat", [1, 3, 4])])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_and_a_decoder(family: str, text: str | None, ids: list[int]) -> None:
    model = model_of(family)
    record = qkv.hf.inspect(model, "the cat sat", tokenizer(), decoder_text=text)
    with qkv.hf.inspect(model) as wanted, torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]]), decoder_input_ids=torch.tensor([ids]))
    assert entropies(record) == pytest.approx(entropies(wanted), nan_ok=True)
    assert record.texts == ["the", "cat", "sat"]
    assert record.decoder_texts[1:] == ["the", "cat"][: len(ids) - 1]


class Wrapped(torch.nn.Module):
    """A model of transformers behind a call of its own, as SentenceTransformer has one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        return self.model(**batch)


def test_a_module_around_a_model(tmp_path: Any) -> None:
    """What a tokenizer gives is for the model in it; torch said that an argument is missing."""
    model, words = model_of("gpt2"), tokenizer()
    wanted = qkv.hf.inspect(model, "the cat sat", words)
    record = qkv.hf.inspect(Wrapped(model), "the cat sat", words)
    assert entropies(record) == pytest.approx(entropies(wanted))
    found = qkv.hf.inspect_corpus(Wrapped(model).eval(), ["the cat sat"], tmp_path, tokenizer=words)
    heads = {(row["layer"], row["head"]): row["entropy"] for row in found.rows()}
    assert list(heads.values()) == pytest.approx(entropies(wanted))


def test_a_decoder_whose_start_is_not_known() -> None:
    config = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(qkv.ArgumentError, match="no decoder_start_token_id") as found:
        qkv.hf.inspect(model, "the cat", tokenizer())
    assert "model(**inputs, decoder_input_ids=...)" in found.value.action
    model.config.decoder_start_token_id = 0
    assert len(qkv.hf.inspect(model, "the cat", tokenizer())) == 3


def test_texts_that_are_none() -> None:
    model, words = model_of("gpt2"), tokenizer()
    for text, fact in (("", "has no tokens"), ([], "0 texts"), (3, "text=3 is no"), ([3], "is no")):
        with pytest.raises(qkv.ArgumentError, match=fact):
            qkv.hf.inspect(model, text, words)
    padded = tokenizer(pad_token="<pad>")
    with pytest.raises(qkv.ArgumentError, match="text 1 of 2 has no tokens"):
        qkv.hf.inspect(model, ["the cat", ""], padded)
    with pytest.raises(qkv.ArgumentError, match="no decoder beside an encoder"):
        qkv.hf.inspect(model, "the cat", words, decoder_text="the cat")
    with pytest.raises(qkv.ArgumentError, match="there is no text"):
        qkv.hf.inspect(model, decoder_text="the cat")


def test_training_mode_is_noted() -> None:
    model, words = model_of("gpt2"), tokenizer()
    assert not qkv.hf.inspect(model, "the cat", words).notes
    record = qkv.hf.inspect(model.train(), "the cat", words)
    model.eval()  # It is that of other tests, too.
    assert "training mode" in record.notes[0]
    assert "training mode" in str(record)


def test_heads_that_hold_nan_are_named() -> None:
    """One row of one head's queries is NaN; later layers read what comes of it."""
    model, words = model_of("llama"), tokenizer()
    weight = model.model.layers[0].self_attn.q_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    record = qkv.hf.inspect(model, "the cat sat", words)
    with torch.no_grad():
        weight.copy_(kept)  # It is that of other tests, too.
    wrong = [(of["layer"], of["head"]) for of in record.rows() if np.isnan(of["entropy"])]
    assert (0, 0) in wrong
    assert (0, 1) not in wrong
    (said,) = [s for s in record.sentences() if "NaN" in s]
    assert said.startswith(f"{len(wrong)} of {len(record.rows())} heads")
    assert "layer.head 0.0" in said
    assert said[:40] in str(record)
    assert not [s for s in qkv.hf.inspect(model, "the cat", words).sentences() if "NaN" in s]


def test_several_texts_are_one_batch() -> None:
    """Texts are as long as one another, or padded where the tokenizer can pad."""
    model, texts = model_of("gpt2"), ["the cat sat", "the mat"]
    with pytest.raises(qkv.ArgumentError, match="2 texts of 2 to 3 tokens are not a batch"):
        qkv.hf.inspect(model, texts, tokenizer())
    record = qkv.hf.inspect(model, texts, tokenizer(pad_token="<pad>"))
    alone = [qkv.hf.inspect(model, text, tokenizer()) for text in texts]
    for layer in range(len(record)):
        rows = record[layer].rows["entropy"]
        for i, one in enumerate(alone):
            expected = one[layer].rows["entropy"][0]
            assert rows[i, :, : expected.shape[1]] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert len(qkv.hf.inspect(model, ["the cat", "the mat"], tokenizer())) == len(record)
