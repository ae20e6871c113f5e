"""Keywords and forms of other libraries, each answered with the call to write."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import qkv
import qkv.jax
import qkv.torch
from qkv.inspection.rendering.token_texts import token_texts

Q = torch.randn(2, 4, 6, 8)
CALLS = [
    ("need_weights", True, "qkv.inspect(q, k, v).weights"),
    ("return_weights", True, "qkv.inspect(q, k, v).weights"),
    ("key_padding_mask", Q, "qkv.Mask(~key_padding_mask[:, None, None, :])"),
    ("cu_seqlens_q", Q, "qkv.Segments.from_cu_seqlens(cu_seqlens_q, cu_seqlens_k)"),
    ("sinks", Q, "qkv.Sinks(sinks)"),
    ("s_aux", Q, "qkv.Sinks(s_aux)"),
    ("local_window_size", 5, "qkv.SlidingWindow(5, 0)"),
    ("local_window_size", (5, -1), "qkv.SlidingWindow(5, None)"),
    ("sliding_window", 5, "qkv.SlidingWindow(4, 0)"),
    ("logits_soft_cap", 30.0, "qkv.Softcap(30.0)"),
    ("block_mask", Q, "qkv.BlockSparse(block_mask, block_q, block_kv)"),
    ("kv_lens", Q, "qkv.KeyLengths(kv_lens)"),
    ("p", 0.1, "qkv.Dropout(0.1, seed=0)"),
]


@pytest.mark.parametrize("query", [Q, Q.numpy()], ids=["torch", "numpy"])
@pytest.mark.parametrize(("name", "value", "written"), CALLS)
def test_a_keyword_is_answered_with_a_call(query: Any, name: str, value: Any, written: str) -> None:
    with pytest.raises(qkv.KeywordError) as caught:
        qkv.attention(query, query, query, **{name: value})
    assert repr(name) in caught.value.fact
    assert written in str(caught.value)


_DROP_INS = {
    "torch": lambda **more: qkv.torch.scaled_dot_product_attention(Q, Q, Q, **more),
    "jax": lambda **more: qkv.jax.dot_product_attention(*[jnp.asarray(Q)] * 3, **more),
}


@pytest.mark.parametrize(("name", "value", "written"), CALLS)
@pytest.mark.parametrize("library", _DROP_INS)
def test_a_stand_in_answers_with_a_call_too(
    library: str, name: str, value: Any, written: str
) -> None:
    """The call has what else was given; JAX's own `local_window_size` is no other library's."""
    if (library, name) == ("jax", "local_window_size"):
        _DROP_INS[library](local_window_size=value if isinstance(value, int) else (5, 1))
        return
    with pytest.raises(qkv.KeywordError) as caught:
        _DROP_INS[library](**{name: value}, is_causal=True, scale=0.5)
    assert caught.value.fact.endswith(f"got an unexpected keyword argument {name!r}.")
    message, call = str(caught.value), caught.value.action
    assert written in message
    assert call.startswith("Write qkv.attention(q, k, v, qkv.Causal()")
    assert "scale=0.5" in call
    assert ("layout='blhd'" in call) == (library == "jax")


@pytest.mark.parametrize("library", _DROP_INS)
def test_a_mistyped_keyword_of_a_stand_in_is_set_right(library: str) -> None:
    with pytest.raises(qkv.KeywordError, match="Pass is_causal= instead"):
        _DROP_INS[library](is_casual=True)


def test_the_stand_in_for_torch_has_torch_s_parameters() -> None:
    names = list(inspect.signature(qkv.torch.scaled_dot_product_attention).parameters)
    assert names == [
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ]  # fmt: skip


def test_the_same_segments_are_written_once() -> None:
    with pytest.raises(qkv.KeywordError) as caught:
        qkv.attention(Q, Q, Q, cu_seqlens_q=Q, cu_seqlens_k=Q, max_seqlen_q=3, max_seqlen_k=3)
    assert str(caught.value).count("from_cu_seqlens(") == 1


@pytest.mark.parametrize(
    "attend",
    [qkv.attention, lambda q, k, v, m: qkv.torch.scaled_dot_product_attention(q, k, v, m)],
    ids=["attention", "drop-in"],
)
def test_a_floating_mask_of_zeros_and_ones_is_warned_of(attend: Any) -> None:
    with pytest.warns(qkv.MaskLooksBooleanWarning, match="forbids nothing"):
        attend(Q, Q, Q, torch.tril(torch.ones(6, 6)))


def test_an_integer_mask_gets_one_message() -> None:
    mask = torch.tril(torch.ones(6, 6, dtype=torch.int64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(qkv.DTypeError, match="int64"):
            qkv.attention(Q, Q, Q, mask)


def test_sequences_of_different_numbers_are_refused() -> None:
    with pytest.raises(qkv.ShapeError, match="of 2 sequences and cu_kv of 1"):
        qkv.Segments.from_cu_seqlens([0, 4, 12], [0, 12])


def test_half_a_variant_says_the_call_to_write() -> None:
    with pytest.raises(qkv.ArgumentError, match=r"SlidingWindow\(16, 0\)"):
        qkv.SlidingWindow(16)
    with pytest.raises(qkv.ArgumentError, match=r"Dropout\(0\.1, seed=0\)"):
        qkv.Dropout(0.1)


@pytest.mark.parametrize("backend", ["auto", "blocked", "reference"])
def test_a_plan_of_tensors_says_what_is_true_of_other_backends(backend: str) -> None:
    """Each backend that is said to be able to run the problem runs it."""
    plan = qkv.plan(Q, Q, Q, backend=backend)
    text = str(plan)
    assert "comes later" not in text
    assert "accepts torch tensors" not in text
    able = [name for name, reasons in plan.refusals.items() if not reasons]
    assert "torch" in able
    for name in able:
        assert f'could run it: backend="{name}"' in text
        torch.testing.assert_close(
            qkv.attention(Q, Q, Q, backend=name), qkv.attention(Q, Q, Q), rtol=1e-5, atol=1e-5
        )
    assert qkv.plan(Q.numpy(), Q.numpy(), Q.numpy()).refusals["torch"]


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 12])
def test_the_slopes_that_are_written_are_those_of_any_number_of_heads(num_heads: int) -> None:
    """The formula in the docstring, beside the slopes that transformers gives Bloom."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    p = 2 ** int(np.log2(num_heads))
    h = np.arange(num_heads)
    written = np.where(h < p, 2.0 ** (-8 * (h + 1) / p), 2.0 ** (-4 * (2 * (h - p) + 1) / p))
    theirs = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float64)[:, 0, 1]
    np.testing.assert_allclose(written, theirs.numpy(), rtol=1e-6)


def test_tokens_keep_their_spaces_and_show_parts_of_characters_as_bytes() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    ids = tokenizer("a \u20ac")["input_ids"]
    assert token_texts(tokenizer, ids) == ["a", " ", "<0xE2>", "<0x82>", "<0xAC>"]
    pieces = {"\u2581the": 0, "\u2581cat": 1, "s": 2}
    words = Tokenizer(models.WordLevel(pieces, "s"))
    words.decoder = decoders.Metaspace()
    spaced = PreTrainedTokenizerFast(tokenizer_object=words)
    assert token_texts(spaced, [0, 1, 2]) == [" the", " cat", "s"]
