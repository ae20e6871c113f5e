"""Masks described by variants equal transformers' own boolean tensors."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import VOCABULARY, attending, model_of  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402
from qkv.hf.attention import _masks_and_offsets, attend  # noqa: E402
from qkv.hf.masks import StatedMask, state_mask  # noqa: E402

qkv.hf.enable()

PATTERNS = {
    "causal": masking_utils.causal_mask_function,
    "full": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "window of nothing": masking_utils.sliding_window_causal_mask_function(0),
    "window of later keys": masking_utils.sliding_window_overlay(-1),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(2),
    "either": masking_utils.or_masks(
        masking_utils.sliding_window_overlay(2), masking_utils.causal_mask_function
    ),
    "nested": masking_utils.and_masks(
        masking_utils.or_masks(
            masking_utils.sliding_window_bidirectional_mask_function(1),
            masking_utils.sliding_window_causal_mask_function(4),
        ),
        masking_utils.sliding_window_overlay(6),
    ),
    "chunks": masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 1, 2])),
    "blocks": masking_utils.or_masks(
        masking_utils.causal_mask_function,
        masking_utils.blockwise_overlay(
            torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 1, -1, 2, 2, 2, 2, -1], [-1] * 14, [0, 1] * 7])
        ),
    ),
}
PLACES = {
    "prefill": (6, 6, 0, 0),
    "chunk": (4, 9, 5, 0),
    "step": (1, 9, 8, 0),
    "step of a static cache": (1, 12, 8, 0),
    "prefill of a static cache": (6, 12, 0, 0),
    "chunk of a full window": (4, 7, 9, 6),
    "keys before the window": (3, 8, 2, 4),
}
PADDINGS = {
    "none": None,
    "left": [[0, 0, 1, 1, 1, 1, 1], [1] * 7, [0] * 6 + [1]],
    "right": [[1, 1, 1, 0, 0, 0, 0], [1] * 7, [1, 0, 0, 0, 0, 0, 0]],
    "both ends": [[0, 1, 1, 1, 1, 0, 0], [1] * 7, [0, 0, 1, 1, 1, 1, 0]],
    "holes": [[1, 0, 1, 1, 0, 1, 1], [1] * 7, [0, 1, 0, 1, 0, 1, 0]],
    "a row of nothing": [[0] * 7, [1] * 7, [0, 0, 1, 1, 1, 1, 1]],
}


def padding(kind: str, kv_end: int) -> Any:
    """Padding of as many keys as there are so far: the pattern, then real keys."""
    rows = PADDINGS[kind]
    if rows is None:
        return None
    return torch.tensor([(row + [1] * kv_end)[:kv_end] for row in rows], dtype=torch.bool)


def pairs(mask: Any, q_length: int, kv_length: int) -> Any:
    """Which pairs attention lets through: values that tell the keys apart."""
    zeros = torch.zeros(3, 1, max(q_length, kv_length), 1)
    variants, q_offset, kv_offset = _masks_and_offsets(mask, False, (q_length, kv_length))
    out = qkv.attention(
        zeros[:, :, :q_length],
        zeros[:, :, :kv_length],
        torch.eye(kv_length).expand(3, 1, -1, -1),
        *variants,
        q_offset=q_offset,
        kv_offset=kv_offset,
        backend="blocked",
    )
    return out > 0


def asked(pattern: str, place: str, kind: str) -> dict[str, Any]:
    """What transformers says of a mask."""
    q_length, kv_length, q_offset, kv_offset = PLACES[place]
    return {
        "batch_size": 3,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": PATTERNS[pattern],
        "attention_mask": padding(kind, q_offset + q_length),
    }


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_stated_masks_allow_the_same_pairs(pattern: str, place: str) -> None:
    q_length, kv_length = PLACES[place][:2]
    for kind in PADDINGS:
        kwargs = asked(pattern, place, kind)
        mask = state_mask(**kwargs, device="cpu", allow_is_causal_skip=False)
        expected = sdpa_mask(**kwargs, allow_is_causal_skip=False)
        assert isinstance(mask, StatedMask), kind
        assert mask.shape == expected.shape
        assert torch.equal(pairs(mask, q_length, kv_length), expected), kind
        assert torch.equal(mask.logical_not(), ~expected), kind


def test_one_token_that_sees_every_key_has_no_mask() -> None:
    """Where a dense mask would be True everywhere, and only for a causal mask of one token."""
    unmasked = []
    for pattern, place, kind in itertools.product(PATTERNS, PLACES, PADDINGS):
        kwargs = asked(pattern, place, kind)
        if state_mask(**kwargs) is None:
            unmasked.append((pattern, place, kind))
            assert sdpa_mask(**kwargs, allow_is_causal_skip=False).all()
    assert {(pattern, place) for pattern, place, _ in unmasked} == {("causal", "step")}
    assert 0 < len(unmasked) < len(PADDINGS)


@pytest.mark.parametrize("order", [lambda a, b: (a, b), lambda a, b: (b, a)], ids=["ab", "ba"])
def test_packed_rows_are_segments(order: Any) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2, 3]])
    ids = masking_utils.find_packed_sequence_indices(positions)
    for inner in (PATTERNS["causal"], PATTERNS["window"], PATTERNS["full"]):
        alone = masking_utils.packed_sequence_mask_function(ids)
        remapped = masking_utils.remap_positions_for_packed_sequence(inner, positions)
        # Versions of transformers differ in the order.
        function = masking_utils.and_masks(*order(alone, remapped))
        kwargs = {"batch_size": 3, "q_length": 6, "kv_length": 6, "mask_function": function}
        mask = state_mask(**kwargs)
        assert isinstance(mask, StatedMask)
        assert isinstance(mask.pattern.variants[0], qkv.Segments)
        assert torch.equal(pairs(mask, 6, 6), sdpa_mask(**kwargs, allow_is_causal_skip=False))


def even_keys(batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
    return kv_pos % 2 == 0


@pytest.mark.parametrize(
    "function",
    [
        even_keys,
        masking_utils.or_masks(masking_utils.causal_mask_function, even_keys),
        masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1, 2]] * 3)),
        masking_utils.and_masks(
            masking_utils.packed_sequence_mask_function(torch.tensor([[0, 0, 0, 0, 1, 1]] * 3)),
            masking_utils.remap_positions_for_packed_sequence(
                masking_utils.chunked_causal_mask_function(2, torch.tensor([0, 0, 0])),
                torch.tensor([[0, 1, 2, 3, 0, 1]] * 3),
            ),
        ),
    ],
    ids=["own", "own or causal", "packed without positions", "chunks of packed rows"],
)
def test_unknown_mask_functions_are_evaluated_by_transformers(function: Any) -> None:
    kwargs = {"batch_size": 3, "q_length": 6, "kv_length": 6, "mask_function": function}
    mask = state_mask(**kwargs, allow_is_causal_skip=True)
    assert not isinstance(mask, StatedMask)
    expected = sdpa_mask(**kwargs, allow_is_causal_skip=False)
    assert torch.equal(mask, expected)
    assert torch.equal(pairs(mask, 6, 6), expected)


def stated() -> tuple[Any, Any]:
    """A mask, and the tensor it stands for."""
    kwargs = {"batch_size": 3, "q_length": 6, "kv_length": 7, "q_offset": 1}
    kwargs["attention_mask"] = padding("left", 7)
    return state_mask(**kwargs), sdpa_mask(**kwargs, allow_is_causal_skip=False)


def test_to_a_model_it_is_a_boolean_tensor() -> None:
    mask, dense = stated()
    assert (mask.shape, mask.dtype, mask.device) == (dense.shape, dense.dtype, dense.device)
    for same in (mask.to("cpu"), mask.contiguous(), mask.detach(), mask[:, :, :, :7], mask[:]):
        assert isinstance(same, StatedMask)
    assert torch.equal(mask[:, :, :, :5], dense[:, :, :, :5])
    assert torch.equal(mask[:, :, -2:], dense[:, :, -2:])
    assert torch.equal(torch.where(mask, 0.0, -1.0), torch.where(dense, 0.0, -1.0))
    assert torch.equal(mask & ~mask.roll(1, -1), dense & ~dense.roll(1, -1))
    assert torch.equal(mask.expand(3, 2, 6, 7), dense.expand(3, 2, 6, 7))
    assert torch.equal(copy.deepcopy(mask), dense)
    assert torch.equal(copy.deepcopy(stated()[0]), dense)


def test_what_is_written_to_it_holds() -> None:
    for write in (
        lambda mask: mask.__setitem__((slice(None), slice(None), slice(None), slice(0, 1)), True),
        lambda mask: mask[:, :, :, 2:4].logical_not_(),
        lambda mask: mask.logical_not_(),
        lambda mask: mask.masked_fill_(torch.eye(6, 7, dtype=torch.bool), False),
    ):
        mask, dense = stated()
        dense = dense.clone()
        write(mask)
        write(dense)
        assert torch.equal(pairs(mask, 6, 7), dense)


def test_pickling_makes_it_dense() -> None:
    kwargs = {"batch_size": 3, "q_length": 6, "kv_length": 6}
    mask = state_mask(**kwargs)
    assert torch.equal(
        pickle.loads(pickle.dumps(mask)), sdpa_mask(**kwargs, allow_is_causal_skip=False)
    )


def test_added_to_scores_it_raises() -> None:
    """A boolean added to scores would be a wrong result without an error."""
    mask, _ = stated()
    scores = torch.zeros(3, 2, 6, 7)
    for add in (lambda: scores + mask, lambda: mask + scores, lambda: scores.add_(mask)):
        with pytest.raises(qkv.UnsupportedError, match="never calls the implementation"):
            add()


def test_it_takes_no_memory() -> None:
    length = 2**20
    mask = state_mask(1, length, length, attention_mask=torch.ones(1, length, dtype=torch.bool))
    assert mask.shape == (1, 1, length, length)
    assert mask.pattern.variants == (qkv.Causal(),)


def test_padding_that_a_causal_query_never_sees_is_not_in_the_mask() -> None:
    """The keys that a static cache has not filled yet."""
    seen = torch.ones(2, 5, dtype=torch.bool)
    mask = state_mask(2, 3, 64, q_offset=2, attention_mask=seen)
    assert mask.pattern.variants == (qkv.Causal(),)


def attended(mask: Any, q_length: int, kv_length: int, **kwargs: Any) -> Any:
    """Pairs of a layer that calls itself causal."""
    module = torch.nn.Module()
    module.is_causal = True
    zeros = torch.zeros(1, 1, 8, 1)
    values = torch.eye(kv_length)[None, None]
    out, _ = attend(module, zeros[:, :, :q_length], zeros[:, :, :kv_length], values, mask, **kwargs)
    return (out.transpose(1, 2) > 0)[0, 0]


def test_without_a_mask_the_layer_says_what_is_causal() -> None:
    assert torch.equal(attended(None, 4, 4), torch.ones(4, 4).bool().tril())
    assert torch.equal(attended(None, 4, 6), torch.ones(4, 6).bool().tril())
    assert attended(None, 1, 6).all()
    assert attended(None, 4, 6, is_causal=False).all()
    assert torch.equal(attended(None, 3, 3, is_causal=True), torch.ones(3, 3).bool().tril())
    # A window given beside a mask is in the mask.
    assert attended(state_mask(1, 4, 4), 4, 4, sliding_window=1).sum() == 10


def test_a_mask_for_other_lengths_is_not_stretched() -> None:
    """A causal mask could be evaluated for any: the lengths it was made for are part of it."""
    with pytest.raises(qkv.ShapeError):
        attended(state_mask(1, 4, 6, q_offset=2), 4, 5)
    one_row = attended(state_mask(1, 1, 5, q_offset=2), 4, 5)
    assert torch.equal(one_row, (torch.arange(5) <= 2).expand(4, 5))


def test_a_step_whose_mask_has_other_lengths_is_not_that_of_an_earlier_layer() -> None:
    layer = torch.nn.Identity()
    query, key, value = (torch.randn(1, 2, n, 8) for n in (1, 5, 5))
    for _ in range(4):
        attend(layer, query, key, value, state_mask(1, 1, 5, q_offset=2))
    with pytest.raises(qkv.ShapeError):
        attend(layer, query, key, value, state_mask(1, 1, 6, q_offset=2))
    of_one_key = state_mask(1, 1, 1, allow_is_causal_skip=False)
    found, _ = attend(layer, query, key, value, of_one_key)
    weights = (query @ key.mT / 8**0.5).softmax(-1)  # What it says is the same for all keys.
    torch.testing.assert_close(found, (weights @ value).transpose(1, 2))


def test_a_mask_of_every_pair_holds_for_other_lengths() -> None:
    """BART without a prompt, for guidance, counts its own tokens as those of its encoder."""
    every = state_mask(1, 1, 2, mask_function=PATTERNS["full"])
    for kv_len in (2, 1, 5):
        assert attended(every, 1, kv_len).all()
    tokens = torch.randint(3, VOCABULARY, (2, 7))
    real = torch.ones(2, 7, dtype=torch.long)
    real[1, :3] = 0
    found = {}
    for implementation in ("sdpa", "qkv"):
        with attending(model_of("bart"), implementation) as model:
            found[implementation] = model.generate(
                tokens,
                attention_mask=real,
                guidance_scale=1.5,
                max_new_tokens=4,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
    assert torch.equal(found["qkv"].sequences, found["sdpa"].sequences)
    for ours, theirs in zip(found["qkv"].scores, found["sdpa"].scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_the_user(kind: str) -> None:
    """A 4-D mask is passed on as it is: True may attend, a floating one is added."""
    tokens = torch.randint(3, VOCABULARY, (2, 7))
    allowed = torch.rand(2, 1, 7, 7) < 0.6
    allowed |= torch.eye(7, dtype=torch.bool)
    bias = torch.where(allowed, torch.randn(2, 1, 7, 7).double(), torch.finfo(torch.float64).min)
    results = {}
    for implementation in ("eager", "qkv"):
        given = bias
        if kind == "bool":
            given = allowed
            if implementation == "eager":
                given = bias.masked_fill(allowed, 0.0)
        with attending(model_of("llama"), implementation) as model, torch.no_grad():
            results[implementation] = model(tokens, attention_mask=given).logits
    assert float((results["qkv"] - results["eager"]).abs().max()) < 1e-10


def test_images_inside_text_attend_both_ways() -> None:
    """Blocks of a multimodal prompt, which transformers joins to the causal mask."""
    ids = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]])
    model = model_of("llama")
    with attending(model, "qkv"):
        mask = masking_utils.create_causal_mask(
            config=model.config,
            inputs_embeds=torch.zeros(1, 8, 1),
            attention_mask=None,
            cache=None,
            block_sequence_ids=ids,
        )
    assert isinstance(mask, StatedMask)
    allowed = torch.zeros(8, 8, dtype=torch.bool)
    for i, j in itertools.product(range(8), repeat=2):
        allowed[i, j] = j <= i or int(ids[0, i]) == int(ids[0, j]) >= 0
    zeros = torch.zeros(1, 1, 8, 1)
    out, _ = attend(model, zeros, zeros, torch.eye(8)[None, None], mask)
    assert torch.equal((out.transpose(1, 2) > 0)[0, 0], allowed)


def test_a_mask_of_integers_is_refused() -> None:
    """Eager attention adds its 0 and 1 to scores; the advice is what a model takes."""
    model = model_of("llama")
    model.set_attn_implementation("qkv")
    mask = torch.ones(1, 1, 4, 4, dtype=torch.int64).tril()
    with pytest.raises(qkv.DTypeError, match=r"attention_mask\.to\(torch\.bool\)"):
        model(torch.tensor([[3, 4, 5, 6]]), attention_mask=mask)
    assert model(torch.tensor([[3, 4, 5, 6]]), attention_mask=mask.bool()).logits.shape[1] == 4
