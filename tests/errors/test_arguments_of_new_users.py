"""What somebody who comes from torch writes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv

X = np.random.default_rng(0).normal(size=(1, 2, 5, 8))


@pytest.mark.parametrize("scale", ["0.1", b"0.1", np.str_("0.1")])
def test_a_scale_in_words(scale: Any) -> None:
    for function in (qkv.attention, qkv.plan, qkv.inspect):
        with pytest.raises(qkv.ArgumentError, match=r"scale=.*0\.1.* is not a finite number"):
            function(X, X, X, scale=scale)


@pytest.mark.parametrize("scale", [np.full(2, 0.1), [0.1, 0.1]])
def test_scales_of_heads_are_told_what_to_do(scale: Any) -> None:
    """Such scales were once called not finite, and were to be left out."""
    for function in (qkv.attention, qkv.plan, qkv.inspect):
        with pytest.raises(qkv.ArgumentError, match=r"(?s)is not one finite number.*Multiply"):
            function(X, X, X, scale=scale)


@pytest.mark.parametrize("scale", [0.1, np.float64(0.1), np.array(0.1)])
def test_numbers_are_scales(scale: Any) -> None:
    twice = qkv.attention(X * np.float64(0.1), X, X, scale=1.0, backend="blocked")
    found = qkv.attention(X, X, X, scale=scale, backend="blocked")
    np.testing.assert_allclose(found, twice, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "call",
    [lambda x: qkv.attention(x, x, x, qkv.RoPE()), lambda x: qkv.RoPE().rotate(x, np.arange(5))],
    ids=["attention", "rotate"],
)
def test_rope_of_an_odd_head_dim_says_so(call: Any) -> None:
    with pytest.raises(qkv.ArgumentError) as caught:
        call(X[..., :7])
    assert "head_dim=7" in caught.value.fact
    assert caught.value.action == "Pass qkv.RoPE(rotary_dim=6), or rows with an even head_dim."


def test_an_odd_rotary_dim_names_itself() -> None:
    with pytest.raises(qkv.ArgumentError, match="rotary_dim=5 entries are not a whole number"):
        qkv.RoPE(rotary_dim=5)


@pytest.mark.parametrize("heads", [8, np.int64(8)])
def test_numbers_of_heads_are_no_slopes_and_sizes_no_base(heads: Any) -> None:
    with pytest.raises(qkv.ArgumentError, match=r"(?s)slopes=8 is an integer.*ALiBi\(\).*or 8\.0"):
        qkv.ALiBi(heads)
    with pytest.raises(TypeError, match="positional"):
        qkv.RoPE(heads)  # type: ignore[misc]


class TestLayers:
    def test_keywords_of_torchs_layer(self) -> None:
        pytest.importorskip("torch", reason="the layer is torch's")
        from qkv.torch import MultiHeadAttention

        for keywords, action in (
            ({"batch_first": True}, "Leave it out: the batch always comes first."),
            ({"kdim": 8, "vdim": 8}, "Pass kv_dim=8, the width of key and value."),
            ({"kdim": 8, "vdim": 4}, "Pass kv_dim, the width of key and value."),
            ({"is_causal": True}, "Pass causal= instead."),
            ({"kv_heads": 2}, "Pass num_kv_heads= instead."),
        ):
            given: dict[str, Any] = {"dropout": 0.1, **keywords}
            with pytest.raises(qkv.KeywordError) as caught:
                MultiHeadAttention(32, 4, **given)
            assert f"{next(iter(keywords))!r}" in caught.value.fact
            assert caught.value.action == action

    def test_no_rows_of_other_orders(self) -> None:
        pytest.importorskip("torch", reason="the layer is torch's")
        from qkv.torch import MultiHeadAttention

        with pytest.raises(qkv.KeywordError, match=r"transpose\(0, 1\)"):
            MultiHeadAttention(32, 4, batch_first=False)

    def test_a_cache_without_a_capacity_grows(self) -> None:
        torch = pytest.importorskip("torch", reason="the cache is torch's")
        from qkv.torch import Cache

        cache, rows = Cache(), torch.from_numpy(X)
        for i in range(5):
            key, _ = cache.append(rows[:, :, i : i + 1], rows[:, :, i : i + 1])
        assert cache.length == 5
        assert torch.equal(key, rows)


class TestPositions:
    def test_a_table_of_lists_is_called_a_table(self) -> None:
        with pytest.raises(qkv.DTypeError) as caught:
            qkv.LearnedPositions([[1.0, 2.0]])
        assert caught.value.fact == "table is a list, not an array."
        table = eval(caught.value.action[5:-1], {"numpy": np, "table": [[1.0, 2.0]]})
        assert qkv.LearnedPositions(table).table.shape == (1, 2)

    def test_a_table_of_integers_is_called_a_table(self) -> None:
        with pytest.raises(qkv.DTypeError, match="table has dtype int64"):
            qkv.LearnedPositions(np.ones((4, 8), np.int64))

    @pytest.mark.parametrize("config", ["gpt2", Path("config.json")])
    def test_the_name_of_a_model_is_no_configuration(self, config: Any) -> None:
        with pytest.raises(qkv.ArgumentError, match=r"is a name, not a configuration") as caught:
            qkv.RoPE.from_hf_config(config)
        assert "AutoConfig.from_pretrained(name)" in caught.value.action


@pytest.mark.parametrize(
    "call",
    [
        lambda x: qkv.attention(x, X, X),
        lambda x: qkv.RoPE().rotate(x, 0),
        qkv.SinusoidalPositions(8),
        qkv.mechanisms.MultiHead(8, 2),
        qkv.mechanisms.RWKV4(8),
    ],
    ids=["attention", "rotate", "positions", "layer", "recurrence"],
)
def test_what_is_no_array_has_its_short_name_everywhere(call: Any) -> None:
    for given, name in (([[1.0] * 8], "a list"), (None, "None")):
        with pytest.raises(qkv.DTypeError) as caught:
            call(given)
        assert f" is {name}, not an array." in caught.value.fact
        assert "builtins" not in caught.value.fact


@pytest.mark.parametrize("variant", [qkv.KeyLengths([3]), qkv.Segments(np.zeros((1, 5), int))])
def test_one_entry_for_a_batch_that_is_not_there(variant: qkv.Variant) -> None:
    """The advice was to give a single entry, which is what was given."""
    x = X[0]
    with pytest.raises(qkv.ShapeError, match=r"the batch \(\)(.|\n)*without its leading dimen"):
        qkv.attention(x, x, x, variant)


def test_cotangents_are_two_arguments() -> None:
    """A pair, as JAX takes it, was called ragged rows that want KeyLengths."""
    x = np.ones((2, 3, 4))
    (out, lse), pullback = qkv.vjp(x, x, x, return_lse=True)
    with pytest.raises(qkv.ArgumentError, match=r"pullback\(grad_out, grad_lse\)"):
        pullback((out, lse))


def test_a_cache_names_the_order_of_bytes() -> None:
    rows = np.ones((1, 2, 3, 4), ">f4")
    with pytest.raises(qkv.DTypeError, match="in the machine's byte order"):
        qkv.cache.ContiguousCache().append(rows, rows)
