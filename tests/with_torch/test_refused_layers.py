"""What layers refuse before torch's own functions meet it, and what they leave to hooks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch bridge needs torch: pip install torch")

import qkv  # noqa: E402
from qkv.torch import MultiHeadAttention, ScaledDotProductAttention  # noqa: E402

ROWS = torch.ones(1, 5, 8)
NESTED = torch.nested.nested_tensor([ROWS[0], ROWS[0, :2]], layout=torch.jagged)

MADE = {
    "no device": ({"device": "x"}, qkv.ArgumentError, "device='x' is not a device.*torch says"),
    "not a device": ({"device": [1]}, qkv.ArgumentError, r"device=\[1\] is not a device"),
    "name of a type": ({"dtype": "float32"}, qkv.DTypeError, "dtype='float32' is not a type.*Pass"),
    "integers": ({"dtype": torch.int64}, qkv.DTypeError, "dtype=torch.int64 is not a type"),
    "no width": ({"kv_dim": 0}, qkv.ArgumentError, "kv_dim=0 is not a positive integer"),
    "too wide": ({"kv_dim": 2**53}, qkv.ArgumentError, f"kv_dim={2**53}.*torch says"),
    "far too wide": ({"kv_dim": 10**400}, qkv.ArgumentError, "kv_dim=.* is not at most"),
}  # fmt: skip
if not torch.accelerator.is_available():
    MADE["no accelerator"] = {"device": 0}, qkv.ArgumentError, "device=0 is not a device"

CALLED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "nothing": ((None,), qkv.DTypeError, "query is a NoneType, not a tensor"),
    "mask": ((ROWS, qkv.Causal()), qkv.DTypeError, r"Variants.*\(query, key, value, Causal\(\)\)"),
    "nested": ((NESTED,), qkv.DTypeError, "query is a nested tensor.*to_padded_tensor"),
    "no dimension": ((torch.tensor(1.0),), qkv.ShapeError, "query has 0 dimensions"),
    "one dimension": ((torch.ones(8),), qkv.ShapeError, "query has 1 dimensions"),
    "width": ((ROWS, ROWS[..., :7]), qkv.ShapeError, "key has rows of length 7.*have 8"),
    "integers": ((ROWS.int(),), qkv.DTypeError, r"torch.int32.*Pass query.to\(torch.float32\)"),
    "halves": ((ROWS, ROWS, ROWS.half()), qkv.DTypeError, "value has dtype torch.float16"),
    "device": ((ROWS, ROWS.to("meta")), qkv.ArgumentError, r"key is on meta.*key.to\('cpu'\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", MADE)
def test_layers_that_torch_cannot_make(case: str) -> None:
    options, error, message = MADE[case]
    with pytest.raises(error, match=f"(?s){message}"):
        MultiHeadAttention(8, 2, **options)


@pytest.mark.parametrize("case", CALLED)
def test_rows_that_a_layer_cannot_multiply(case: str) -> None:
    given, error, message = CALLED[case]
    with pytest.raises(error, match=f"(?s){message}"):
        MultiHeadAttention(8, 2)(*given)


def test_integers_are_refused_under_autocast_and_halves_are_not() -> None:
    layer = MultiHeadAttention(8, 2)
    with torch.autocast("cpu"):
        assert layer(ROWS.bfloat16()).dtype is torch.bfloat16
        with pytest.raises(qkv.DTypeError, match=r"torch\.int32"):
            layer(ROWS.int())


def test_a_list_is_no_cache() -> None:
    with torch.no_grad(), pytest.raises(qkv.ArgumentError, match="cache is a list"):
        MultiHeadAttention(8, 2)(ROWS, cache=[])


def test_what_hooks_convert_is_left_to_them() -> None:
    """Weights that are offloaded, or stored in another type, arrive in a hook of their layer."""
    layer = MultiHeadAttention(8, 2)
    expected = layer(ROWS)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
        projection.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    torch.testing.assert_close(layer(ROWS.double()), expected)


@pytest.mark.parametrize(
    ("given", "error"), [(None, qkv.DTypeError), (torch.tensor(1.0), qkv.ShapeError)]
)
def test_rows_of_the_classical_module(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Q "):
        ScaledDotProductAttention(8)(given, ROWS, ROWS)
    with pytest.raises(qkv.ArgumentError, match="d_k="):
        ScaledDotProductAttention(10**400)
