"""`qkv.torch` beside what it stands in for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.testing import assert_close
from torch.testing._internal.common_methods_invocations import op_db

import qkv
from qkv.torch import Cache, MultiHeadAttention, ScaledDotProductAttention
from qkv.torch import scaled_dot_product_attention as ours

theirs = torch.nn.functional.scaled_dot_product_attention
SAMPLES = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def results(function, sample, dtype=None) -> list[torch.Tensor]:
    """Output, and gradients of everything that can have them."""
    given = [sample.input, *sample.args]
    tensors = [
        a.detach().to(dtype or a.dtype).requires_grad_() if a.is_floating_point() else a
        for a in given
    ]
    options = dict(sample.kwargs)
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.to(dtype or mask.dtype)
    out = function(*tensors, **options)
    wanted = [t for t in tensors if t.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, torch.ones_like(out))]


def naive(query, key, value, attn_mask=None, is_causal=False, **_):
    """Products and softmax in the type of the operands."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        floating = attn_mask.is_floating_point()
        scores = scores + attn_mask if floating else scores.masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.slow
@pytest.mark.sampled("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str, one_in=3)
def test_the_samples_of_torch(dtype) -> None:
    """float64 within 64 eps; others twice the naive error and a unit, gradients three times."""
    count = 0
    for sample in SAMPLES.sample_inputs("cpu", dtype, requires_grad=True):
        if sample.kwargs.get("dropout_p", 0.0) > 0:
            continue  # other random numbers; see below
        truth = results(theirs, sample, torch.float64)
        found, expected = results(ours, sample), results(theirs, sample)
        plain = results(naive, sample)
        for n, (t, a, b, c) in enumerate(zip(truth, found, expected, plain, strict=True)):
            assert a.shape == b.shape
            assert a.dtype is b.dtype
            error, allowed = ((x.double() - t).abs().max().item() for x in (a, c))
            unit = torch.finfo(dtype).eps * max(1.0, t.abs().max().item())
            times = 64 if dtype is torch.float64 else 3 if n else 2
            assert error <= times * (allowed + unit)
        count += 1
    assert count > 5


@pytest.mark.slow
def test_dropout_keeps_the_mean_and_follows_the_generator() -> None:
    query, key = normal(1, 2, 8, 4), normal(1, 2, 64, 4, seed=1)
    ones = torch.ones(1, 2, 64, 1, dtype=torch.float64)
    torch.manual_seed(3)
    first = ours(query, key, ones, dropout_p=0.3)
    torch.manual_seed(3)
    assert torch.equal(first, ours(query, key, ones, dropout_p=0.3))
    assert not torch.equal(first, ours(query, key, ones, dropout_p=0.3))
    mean = torch.stack([ours(query, key, ones, dropout_p=0.3) for _ in range(300)]).mean(0)
    assert_close(mean, torch.ones_like(mean), rtol=0.03, atol=0.03)


def test_causal_counts_from_the_top_left_and_is_combined_with_the_mask() -> None:
    query, key = normal(2, 3, 5, 4), normal(2, 3, 7, 4, seed=1)
    allowed = torch.ones(5, 7, dtype=torch.bool).tril()
    assert_close(ours(query, key, key, is_causal=True), theirs(query, key, key, is_causal=True))
    mask = normal(5, 7, seed=2) < 0.8
    expected = theirs(query, key, key, attn_mask=mask & allowed)
    expected[:, :, ~(mask & allowed).any(1)] = 0
    assert_close(ours(query, key, key, mask, is_causal=True), expected)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_masks_of_torch(make) -> None:
    query, key = normal(2, 3, 5, 4), normal(2, 3, 7, 4, seed=1)
    bias = make(5, 7)
    assert_close(ours(query, key, key, bias), theirs(query, key, key, bias))


@pytest.mark.parametrize(
    ("sizes", "lengths"), [((3, 6), (6, 6)), ((3, 6), (3, 7)), ((5, 7), (7, 5))]
)
def test_a_lower_right_mask_of_other_lengths_is_refused_as_torch_does(sizes, lengths) -> None:
    query, key = normal(2, 3, lengths[0], 4), normal(2, 3, lengths[1], 4, seed=1)
    bias = causal_lower_right(*sizes)
    with pytest.raises(RuntimeError):
        theirs(query, key, key, bias)
    with pytest.raises(qkv.ShapeError, match=re.escape(f"there are {lengths[0]} and {lengths[1]}")):
        ours(query, key, key, bias)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_square_masks_of_torch_beside_other_lengths(make) -> None:
    query, key = normal(2, 3, 5, 4), normal(2, 3, 7, 4, seed=1)
    assert_close(ours(query, key, key, make(4, 4)), theirs(query, key, key, make(4, 4)))


@pytest.mark.parametrize("dropout", [-1.0, 2.0])
def test_dropout_that_is_no_probability(dropout: float) -> None:
    with pytest.raises(ValueError, match="dropout probability"):
        torch.nn.Dropout(dropout)
    with pytest.raises(qkv.ArgumentError, match=f"dropout={dropout} is not a probability"):
        MultiHeadAttention(16, 4, dropout=dropout)


@pytest.mark.parametrize("dropout", ["0.1", "0", "", b"1", None])
def test_dropout_that_is_no_number(dropout: Any) -> None:
    x = normal(2, 4, 6, 8)
    with pytest.raises(TypeError):
        theirs(x, x, x, dropout_p=dropout)
    with pytest.raises(qkv.ArgumentError, match="dropout_p is not a single number"):
        ours(x, x, x, dropout_p=dropout)
    with pytest.raises(qkv.ArgumentError, match="is not a probability"):
        qkv.Dropout(dropout, seed=0)


def test_dropout_of_everything_leaves_the_bias_as_in_torch() -> None:
    x = normal(2, 5, 16, dtype=torch.float32)
    layer = MultiHeadAttention(16, 4, dropout=1.0)
    module = torch.nn.MultiheadAttention(16, 4, dropout=1.0, batch_first=True)
    torch.nn.init.normal_(module.out_proj.bias)
    layer.load_state_dict(module.state_dict())
    assert_close(layer(x), module(x, x, x)[0])
    assert_close(layer.eval()(x), module.eval()(x, x, x)[0])


def test_what_torch_accepts_in_silence() -> None:
    query, key = normal(1, 2, 5, 4), normal(1, 2, 7, 4, seed=1)
    with pytest.raises(qkv.ShapeError, match=r"kv_len=7.*kv_len=6"):
        ours(query, key, key[:, :, :6])
    with pytest.raises(qkv.ShapeError, match="enable_gqa"):
        ours(normal(1, 6, 5, 4), key, key)
    spoiled = key.clone()
    spoiled[:, :, 3] = torch.nan
    mask = torch.tensor([True, True, True, False, True, True, True])
    assert ours(query, spoiled, spoiled, mask).isfinite().all()
    assert not theirs(query, spoiled, spoiled, mask.expand(5, 7)).isfinite().all()


def test_heads_broadcast_as_in_torch() -> None:
    query, key, value = normal(2, 6, 5, 4), normal(2, 1, 7, 4, seed=1), normal(1, 6, 7, 3, seed=2)
    assert_close(ours(query, key, value), theirs(query, key, value))
    one = query[:, :1]
    assert_close(ours(one, value[..., :4].repeat(1, 1, 1, 2)[..., :4], value),
                 theirs(one, value[..., :4].repeat(1, 1, 1, 2)[..., :4], value))  # fmt: skip
    assert_close(
        ours(query, key.expand(2, 2, 7, 4), value[:, :2], enable_gqa=True),
        theirs(query, key.expand(2, 2, 7, 4), value[:, :2].expand(2, 2, 7, 3), enable_gqa=True),
    )


def gradients(function, tensors, **options):
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*tensors, **options)
    return [out, *torch.autograd.grad(out.sin().sum(), tensors)]


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((7, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {}),
        (((7, 8), (4, 9, 8), (9, 3)), {}),
        (((7, 8), (9, 8), (2, 4, 9, 8)), {"is_causal": True}),
        (((2, 4, 7, 8), (9, 8), (9, 8)), {}),
        (((2, 6, 7, 8), (2, 3, 9, 8), (2, 2, 9, 8)), {"enable_gqa": True}),
        (((2, 6, 7, 8), (2, 3, 9, 8), (2, 1, 9, 8)), {"enable_gqa": True, "is_causal": True}),
        (((2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"dropout_p": 1.0}),
        (((2, 4, 7, 0), (2, 4, 9, 0), (2, 4, 9, 8)), {}),
        (((2, 4, 7, 0), (2, 4, 9, 0), (2, 4, 9, 8)), {"is_causal": True, "scale": 0.5}),
    ],
    ids=str,
)
def test_shapes_that_only_torch_took(shapes, options) -> None:
    tensors = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    found, expected = (gradients(f, tensors, **options) for f in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)
    for _ in range(3):  # also of a call that is recalled
        again = [normal(*shape, seed=5 + n) for n, shape in enumerate(shapes)]
        assert_close(ours(*again, **options), theirs(*again, **options))


def test_heads_that_no_group_fits() -> None:
    with pytest.raises(qkv.ShapeError, match=r"num_heads=6 .* 4 heads of key and the 2 of value"):
        ours(normal(6, 7, 8), normal(4, 9, 8), normal(2, 9, 8), enable_gqa=True)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_compiled_calls_name_heads_that_do_not_broadcast() -> None:
    """The error in compiled code was once one of torch's compiler."""
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    query, key = normal(2, 6, 7, 8), normal(2, 3, 9, 8)
    with pytest.raises(Exception, match="Pass enable_gqa=True if groups of query heads share"):
        compiled(query, key, key)


class TestTheModuleOfTheTexts:
    def test_true_is_masked(self) -> None:
        """The opposite of everywhere else."""
        x = normal(3, 4)
        mask = torch.tensor([[False, True, True]] * 3)
        weights, output = ScaledDotProductAttention(4)(x, x, x, mask)
        assert torch.equal(weights, torch.tensor([[1.0, 0, 0]] * 3, dtype=torch.float64))
        assert torch.equal(output, x[:1].expand(3, 4))
        assert "*masked out*" in (ScaledDotProductAttention.__doc__ or "").splitlines()[0]

    def test_weights_and_output_are_those_of_torch(self) -> None:
        q, k, v = (normal(2, 5, 4, seed=n).requires_grad_() for n in range(3))
        weights, output = ScaledDotProductAttention(4)(q, k, v)
        assert_close(output, theirs(q, k, v))
        assert_close(weights @ v, output)
        found = torch.autograd.grad(weights.square().sum() + output.sum(), (q, k, v))
        assert all(g.isfinite().all() for g in found)

    def test_scale_is_what_scores_are_divided_by(self) -> None:
        """`qkv.ScaledDotProductAttention` has this scale; another reaches weights and output."""
        layer = ScaledDotProductAttention(4)
        assert layer.scale == 2.0 == qkv.ScaledDotProductAttention(4).scale
        q, k, v = (normal(2, 5, 4, seed=n) for n in range(3))
        layer.scale = 0.5
        weights, output = layer(q, k, v)
        assert_close(weights, (q @ k.mT / 0.5).softmax(-1))
        assert_close(output, weights @ v)

    def test_a_row_that_is_masked_everywhere(self) -> None:
        x = normal(2, 4).requires_grad_()
        mask = torch.tensor([[True, True], [False, True]])
        weights, output = ScaledDotProductAttention(4)(x, x, x, mask)
        assert (weights[0] == 0).all()
        assert (output[0] == 0).all()
        (gradient,) = torch.autograd.grad(output.sum() + weights.sum(), x)
        assert gradient.isfinite().all()

    def test_weights_of_nan_behind_a_mask_have_finite_gradients(self) -> None:
        q, k, v = (normal(3, 4, seed=n).requires_grad_() for n in range(3))
        mask = torch.tensor([[False, False, True]] * 3)
        weights, _ = ScaledDotProductAttention(4)(q, k, v, mask)
        expected = torch.autograd.grad(weights.square().sum(), (q, k))
        truth = (q @ k[:2].mT / 2).softmax(-1)
        for a, b in zip(expected, torch.autograd.grad(truth.square().sum(), (q, k)), strict=True):
            assert_close(a, b)
        for spoil in (torch.nan, torch.inf):
            with torch.no_grad():
                k[2] = spoil
            weights, _ = ScaledDotProductAttention(4)(q, k, v, mask)
            found = torch.autograd.grad(weights.square().sum(), (q, k))
            for a, b in zip(found, expected, strict=True):
                assert_close(a, b, rtol=0, atol=0)
        weights, output = ScaledDotProductAttention(4)(q, k, v, mask.logical_and(mask.T))
        assert weights[:2].isnan().all()  # where it may be seen, it is
        assert output[:2].isnan().all()

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("masked", [False, True])
    def test_weights_of_scores_beyond_float16(self, dtype, masked) -> None:
        q, k = (30 * normal(4, 64)).to(dtype), (800 * normal(4, 64, seed=1)).to(dtype)
        assert (q.float() @ k.float().mT).abs().max() > 2**17
        mask = torch.ones(4, 4, dtype=torch.bool).triu(1) if masked else None
        weights, _ = ScaledDotProductAttention(64)(q, k, k, mask)
        scores = q.double() @ k.double().mT / 8
        expected = (scores.masked_fill(mask, -torch.inf) if masked else scores).softmax(-1)
        assert weights.dtype is dtype
        assert_close(weights, expected.to(dtype))

    def test_weights_under_autocast(self) -> None:
        q, k, v = (normal(5, 4, seed=n, dtype=torch.float32) for n in range(3))
        with torch.autocast("cpu", torch.bfloat16):
            weights, output = ScaledDotProductAttention(4)(q, k, v)
        assert weights.dtype is output.dtype is torch.bfloat16
        exact = (q.bfloat16().double() @ k.bfloat16().double().mT / 2).softmax(-1)
        assert_close(weights, exact.bfloat16(), rtol=0, atol=0)

    def test_wrong_lengths(self) -> None:
        with pytest.raises(qkv.ShapeError, match="d_k=4"):
            ScaledDotProductAttention(4)(normal(2, 3), normal(2, 3), normal(2, 3))


class TestCache:
    def test_what_is_not_like_the_first_is_refused(self) -> None:
        cache = Cache(8)
        first = normal(2, 2, 3, 4), normal(2, 2, 3, 6)
        cache.append(*first)
        one = normal(2, 2, 1, 4)
        wide = normal(2, 2, 1, 6)
        for key, value, error, message in (
            (one[:1], wide, qkv.ShapeError, "key has a batch of 1, and the cache one of 2"),
            (one, wide[:, :1], qkv.ShapeError, r"value .*\(2, 1\) and rows of 6"),
            (one, one, qkv.ShapeError, "value .*rows of 4"),
            (first[0][:, :, :2], wide, qkv.ShapeError, "as many tokens"),
            (one[0], wide[0], qkv.ShapeError, r"\(2,\) and rows of 4"),
            (one, wide.float(), qkv.DTypeError, "value has dtype torch.float32.*torch.float64"),
            (one.to("meta"), wide.to("meta"), qkv.ArgumentError, "on meta.*on cpu"),
        ):
            with pytest.raises(error, match=message):
                cache.append(key, value)
            assert cache.length == 3
        key, value = cache.append(one, wide)
        assert torch.equal(key, torch.cat([first[0], one], -2))
        assert torch.equal(value, torch.cat([first[1], wide], -2))

    @pytest.mark.parametrize("capacity", [-1, 1.5, True, "8"])
    def test_impossible_capacities(self, capacity) -> None:
        with pytest.raises(qkv.ArgumentError, match="capacity="):
            Cache(capacity)

    def test_gradients_are_refused_and_not_dropped(self) -> None:
        layer = MultiHeadAttention(16, 4, causal=True)
        tokens = normal(1, 3, 16, dtype=torch.float32)
        cache = Cache(8)
        with pytest.raises(qkv.UnsupportedError, match="no gradient"):
            layer(tokens, cache=cache)
        assert cache.length == 0
        with torch.no_grad():
            assert_close(layer(tokens, cache=cache), layer(tokens))
        frozen = layer.requires_grad_(False)
        assert_close(frozen(tokens, cache=Cache(3)), frozen(tokens))


class TestMultiHeadAttention:
    @pytest.mark.parametrize("dims", [{}, {"kdim": 6, "vdim": 6}], ids=["packed", "apart"])
    def test_the_state_of_torch(self, dims) -> None:
        torch.manual_seed(0)
        reference = torch.nn.MultiheadAttention(12, 3, batch_first=True, **dims).double()
        torch.nn.init.normal_(reference.out_proj.bias)
        layer = MultiHeadAttention(12, 3, kv_dim=dims.get("kdim")).double()
        layer.load_state_dict(reference.state_dict())
        query, key = normal(2, 5, 12), normal(2, 7, dims.get("kdim", 12), seed=1)
        expected, _ = reference(query, key, key, need_weights=False)
        assert_close(layer(query, key), expected)

    def test_a_state_with_rows_of_its_own_is_refused(self) -> None:
        state = torch.nn.MultiheadAttention(4, 2, add_bias_kv=True).state_dict()
        with pytest.raises(qkv.ArgumentError, match="bias_k"):
            MultiHeadAttention(4, 2).load_state_dict(state)

    @pytest.mark.parametrize(
        "options",
        [{}, {"rope": qkv.RoPE()}, {"rope": qkv.RoPE(layout="interleaved", rotary_dim=2)},
         {"alibi": True}, {"num_kv_heads": 1}, {"num_kv_heads": 2, "rope": qkv.RoPE()}],
        ids=str,
    )  # fmt: skip
    def test_token_by_token_is_all_at_once(self, options) -> None:
        torch.manual_seed(1)
        layer = MultiHeadAttention(16, 4, causal=True, **options).double()
        tokens = normal(2, 9, 16)
        whole = layer(tokens)
        cache = Cache(9)
        with torch.no_grad():
            parts = [layer(tokens[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
        assert_close(torch.cat(parts, 1), whole)
        with torch.no_grad(), pytest.raises(qkv.ShapeError, match="room for 9"):
            layer(tokens[:, :1], cache=cache)
        assert cache.length == 9

    def test_cross_attention_with_masks(self) -> None:
        layer = MultiHeadAttention(8, 2, kv_dim=5).double()
        query, key = normal(2, 3, 8), normal(2, 6, 5, seed=1)
        shorter = layer(query, key[:, :4])
        assert_close(layer(query, key, None, qkv.KeyLengths(torch.tensor([4, 4]))), shorter)

    @pytest.mark.slow
    def test_it_trains(self) -> None:
        torch.manual_seed(0)
        layer = MultiHeadAttention(8, 2, causal=True, dropout=0.1)
        tokens = normal(4, 6, 8, dtype=torch.float32)
        target = tokens.roll(1, 1)
        optimizer = torch.optim.Adam(layer.parameters(), 0.02)
        losses = []
        for _ in range(60):
            loss = (layer(tokens) - target)[:, 1:].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]
        assert torch.equal(layer.eval()(tokens), layer(tokens))

    def test_impossible_heads(self) -> None:
        with pytest.raises(qkv.ArgumentError, match="num_heads=3"):
            MultiHeadAttention(8, 3)
        with pytest.raises(qkv.ArgumentError, match="num_kv_heads=3"):
            MultiHeadAttention(8, 4, num_kv_heads=3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64])
def test_the_error_for_a_mask_of_integers_names_masks_that_are_taken(dtype: torch.dtype) -> None:
    """`qkv.Mask`, which `qkv.attention` would name, is no mask of torch."""
    x, mask = normal(2, 4, 6, 8), torch.ones(6, 6).tril().to(dtype)
    with pytest.raises(qkv.DTypeError, match="attn_mask has dtype") as caught:
        ours(x, x, x, attn_mask=mask)
    written = re.findall(r"attn_mask\.to\([a-z.]+\)", caught.value.action)
    assert len(written) == 2
    if not dtype.is_complex:
        names = {"attn_mask": mask, "query": x, "torch": torch}
        assert_close(
            ours(x, x, x, attn_mask=eval(written[0], names)), ours(x, x, x, is_causal=True)
        )
        assert_close(
            ours(x, x, x, attn_mask=eval(written[1], names) * 2),
            theirs(x, x, x, attn_mask=2.0 * mask.double()),
        )


def test_the_error_for_a_padding_mask_names_masks_that_are_taken() -> None:
    x, mask = normal(2, 4, 6, 8), torch.arange(6) < torch.tensor([[6], [4]])
    with pytest.raises(qkv.ShapeError, match="does not broadcast") as caught:
        ours(x, x, x, attn_mask=mask)
    assert caught.value.action == "Pass mask[:, None, None, :]."
    padded = mask[:, None, None, :]
    assert_close(ours(x, x, x, attn_mask=padded), theirs(x, x, x, attn_mask=padded))


def test_a_variant_as_a_mask_names_the_function_that_takes_it() -> None:
    x = normal(2, 4, 6, 8)
    with pytest.raises(qkv.DTypeError, match="attn_mask is a Causal, not a tensor") as caught:
        ours(x, x, x, attn_mask=qkv.Causal())
    assert caught.value.action == "Call qkv.attention(query, key, value, attn_mask)."
