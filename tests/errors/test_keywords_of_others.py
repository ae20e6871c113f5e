"""Keywords of torch, JAX and flash-attn: the error has the call that means the same here."""

import re

import numpy as np
import pytest
import torch

import qkv
import qkv.torch
from qkv import KeywordError, QkvError

RANDOM = np.random.default_rng(0)
q, k, v = (RANDOM.normal(size=(2, 4, 6, 8)).astype(np.float32) for _ in range(3))
attn_mask = RANDOM.random((6, 6)) < 0.7
attn_mask[:, 0] = True
bias = RANDOM.normal(size=(4, 6, 6)).astype(np.float32)
FUNCTIONS = ["attention", "inspect", "plan", "explain", "vjp", "jvp"]


def written(function: str, *arrays, **keywords) -> str:
    """The call that the error of this call says to write."""
    more = {"tangents": (q, k, v)} if function == "jvp" else {}
    with pytest.raises(KeywordError) as caught:
        getattr(qkv, function)(*arrays, **keywords, **more)
    error = caught.value
    assert isinstance(error, TypeError)
    assert isinstance(error, QkvError)
    for name in keywords.keys() - {"scale", "q_offset"}:
        assert repr(name) in error.fact
    found = re.fullmatch(r"Write (qkv\..*)\.", error.action)
    assert found is not None, error.action
    assert found[1].startswith(f"qkv.{function}(q, k, v")
    return found[1]


def of_torch(**keywords) -> np.ndarray:
    arrays = map(torch.from_numpy, (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*arrays, **keywords)
    return out.numpy()


SAME_IN_TORCH = [
    {"is_causal": True},
    {"is_causal": False},
    {"attn_mask": None},
    {"attn_mask": attn_mask},
    {"dropout_p": 0.0},
    {"enable_gqa": True},
    {"is_causal": True, "scale": 0.5, "dropout_p": 0.0},
]


@pytest.mark.parametrize("keywords", SAME_IN_TORCH, ids=lambda k: ", ".join(k))
def test_the_call_to_write_gives_what_torch_gives(keywords) -> None:
    call = written("attention", q, k, v, **keywords)
    tensors = {n: torch.from_numpy(a) if isinstance(a, np.ndarray) else a
               for n, a in keywords.items()}  # fmt: skip
    np.testing.assert_allclose(eval(call), of_torch(**tensors), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("keywords", "in_torch"),
    [
        ({"causal": True}, {"is_causal": True}),
        ({"sm_scale": 0.3}, {"scale": 0.3}),
        ({"softmax_scale": 0.3, "causal": True}, {"scale": 0.3, "is_causal": True}),
        ({"bias": bias}, {"attn_mask": torch.from_numpy(bias)}),
        ({"window_size": (-1, 0)}, {"is_causal": True}),
        ({"window_size": (-1, -1)}, {}),
    ],
    ids=lambda k: ", ".join(k),
)
def test_keywords_of_other_libraries(keywords, in_torch) -> None:
    call = written("attention", q, k, v, **keywords)
    np.testing.assert_allclose(eval(call), of_torch(**in_torch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("keywords", "call"),
    [
        ({"is_causal": True}, "(q, k, v, qkv.Causal())"),
        ({"mask": attn_mask, "q_offset": 0}, "(q, k, v, mask, q_offset=0)"),
        ({"dropout_p": 0.1}, "(q, k, v, qkv.Dropout(0.1, seed=0))"),
        ({"softcap": 30.0}, "(q, k, v, qkv.Softcap(30.0))"),
        ({"enable_gqa": True, "sm_scale": 2.0}, "(q, k, v, scale=2.0)"),
    ],
)
def test_every_entry_point(function, keywords, call) -> None:
    if function == "jvp":
        call = f"{call[:-1]}, tangents=tangents)"
    assert written(function, q, k, v, **keywords) == f"qkv.{function}{call}"


def test_tensors_and_jax_arrays() -> None:
    import jax.numpy as jnp

    for make in (torch.from_numpy, jnp.asarray):
        arrays = [make(array) for array in (q, k, v)]
        mask = make(attn_mask)
        assert written("attention", *arrays, attn_mask=mask).endswith("(q, k, v, attn_mask)")


@pytest.mark.parametrize("function", ["attention", "inspect", "plan", "explain", "vjp"])
def test_other_keywords_list_those_that_are_known(function) -> None:
    with pytest.raises(KeywordError) as caught:
        getattr(qkv, function)(q, k, v, layuot="blhd")
    known = dict(caught.value.seen)["keywords"].split(", ")
    assert {"scale", "layout", "q_offset", "kv_offset", "backend"} <= set(known)
    assert ("progress" in known) == (function == "inspect")
    assert caught.value.action == "Pass layout= instead."
    with pytest.raises(KeywordError, match="from this list"):
        getattr(qkv, function)(q, k, v, xyz=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keywords",
    [
        {"key_padding_mask": torch.tensor([[False] * 5, [False, False, True, True, True]])},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        {"is_causal": True, "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        {"average_attn_weights": True},
    ],
    ids=lambda k: ", ".join(k),
)
def test_the_call_of_a_module_to_write_gives_what_torch_gives(keywords) -> None:
    theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True).double()
    layer = qkv.torch.MultiHeadAttention(16, 2).double()
    layer.load_state_dict(theirs.state_dict())
    query = key = value = torch.randn(2, 5, 16, dtype=torch.float64)
    with pytest.raises(KeywordError) as caught:
        layer(query, need_weights=False, **keywords)
    found = re.fullmatch(r"Write (layer\(query, key, value.*\))\.", caught.value.action)
    assert found is not None, caught.value.action
    right, _ = theirs(query, key, value, need_weights=False, **keywords)
    given = {"qkv": qkv, "layer": layer, "query": query, "key": key, "value": value, **keywords}
    torch.testing.assert_close(eval(found[1], given), right)
