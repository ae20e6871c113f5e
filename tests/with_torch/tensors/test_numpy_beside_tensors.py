"""Arrays of two libraries in one call: the output is like the query, and nothing is lost."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import qkv
from qkv.bridges.torch.operands import as_tensor
from qkv.testing import truth

# torch's rules of forward mode use what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")

RNG = np.random.default_rng(0)
ARRAYS = [RNG.normal(size=(2, 9, 8)) for _ in range(3)]
BIAS = RNG.normal(size=(9, 9))
RIGHT = truth(*ARRAYS, [BIAS, qkv.Causal()]).out


def tensor(array: np.ndarray) -> Any:
    return torch.from_numpy(array.copy())


def near(got: Any, right: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(right), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kinds", list(product("nt", repeat=4)), ids="".join)
def test_the_output_is_like_the_query(kinds: tuple[str, ...]) -> None:
    given = (
        tensor(a) if kind == "t" else a for kind, a in zip(kinds, (*ARRAYS, BIAS), strict=True)
    )
    found = qkv.attention(*given, qkv.Causal())
    assert type(found) is (torch.Tensor if kinds[0] == "t" else np.ndarray)
    near(found, RIGHT)


@pytest.mark.slow
def test_gradients_reach_the_tensors_among_them() -> None:
    query, key, bias = (tensor(a).requires_grad_() for a in (ARRAYS[0], ARRAYS[1], BIAS))
    qkv.attention(query, key, ARRAYS[2], bias, qkv.Causal()).square().sum().backward()
    value = tensor(ARRAYS[2])
    inputs = [a.detach().requires_grad_() for a in (query, key, bias)]
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    s = inputs[0] @ inputs[1].mT * 8**-0.5 + inputs[2]
    weights = s.masked_fill(~allowed, -torch.inf).softmax(-1)
    right = torch.autograd.grad((weights @ value).square().sum(), inputs)
    for got, exact in zip((query.grad, key.grad, bias.grad), right, strict=True):
        near(got, exact)


def each_place(given: Any) -> dict[str, Any]:
    """Calls of a NumPy query with a tensor somewhere."""
    q, k, v = ARRAYS
    return {
        "key": lambda: qkv.attention(q, given, v),
        "value": lambda: qkv.attention(q, k, given),
        "an array of Bias": lambda: qkv.attention(q, k, v, qkv.Bias(given[0, :, :1])),
    }


@pytest.mark.parametrize("role", ["key", "value", "an array of Bias"])
def test_what_torch_follows_is_not_lost_in_silence(role: str) -> None:
    """A NumPy output carries no gradient, of either mode, and nothing of `torch.func`."""
    message = f"torch differentiates or traces {role}.* array of numpy(.|\n)*Pass query as an array"

    def call(given: Any) -> Any:
        return each_place(given)[role]()

    followed = tensor(ARRAYS[1]).requires_grad_()
    with pytest.raises(qkv.UnsupportedError, match=message):
        call(followed)
    for transformed in (
        torch.func.grad(lambda x: call(x).sum()),
        torch.vmap(lambda x: call(x[None])),
        lambda x: call(forward_ad.make_dual(x, x)),
    ):
        with forward_ad.dual_level(), pytest.raises(qkv.UnsupportedError, match=message):
            transformed(followed.detach())
    with torch.no_grad():
        assert isinstance(call(followed), np.ndarray)


def test_any_numpy_array_beside_a_tensor(recwarn: pytest.WarningsRecorder) -> None:
    """The array may be one that torch cannot have as it is: read-only, or of negative strides."""
    q, k, v = ARRAYS
    k = k[:, ::-1]
    v = np.broadcast_to(v, v.shape)
    found = qkv.attention(tensor(q).requires_grad_(), k, v)
    near(found.detach(), truth(q, k, v, []).out)
    assert not recwarn.list


def backwards(array: np.ndarray) -> np.ndarray:
    return array[::-1].copy()[::-1]


def read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.setflags(write=False)
    return copy


def table(bias: np.ndarray) -> qkv.ScoreMod:
    return qkv.ScoreMod(lambda s, b, h, q, kv: s + bias[q, kv])


VALUES = {
    "blocks": lambda a: qkv.BlockSparse(a(np.tri(9, dtype=bool)), 1, 1),
    "slopes": lambda a: qkv.ALiBi(a(np.array([0.5, 0.25]))),
    "lengths": lambda a: qkv.KeyLengths(a(np.array([9, 5]))),
    "table": lambda a: table(a(BIAS)),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("memory", [backwards, read_only])
@pytest.mark.parametrize("value", VALUES)
def test_a_call_again_whose_variant_holds_any_array(
    value: str, memory: Any, gradients: bool, recwarn: pytest.WarningsRecorder
) -> None:
    variant, operands = VALUES[value](memory), [np.stack([a, a], 1) for a in ARRAYS]
    right = truth(*operands, [VALUES[value](np.copy)]).out
    for _ in range(4):
        leaves = [tensor(a).requires_grad_(gradients) for a in operands]
        out = qkv.attention(*leaves, variant)
        if gradients:
            out.sum().backward()
        near(out.detach(), right)
    assert not recwarn.list


@pytest.mark.parametrize("place", ["key", "mask", "bias"])
def test_numpy_arrays_in_compiled_code(place: str) -> None:
    q, k, v = ARRAYS
    mask = np.tri(9, dtype=bool)

    def f(x: Any) -> Any:
        if place == "key":
            return qkv.attention(x, k, v, qkv.Causal())
        return qkv.attention(x, x, x, mask if place == "mask" else qkv.Bias(BIAS))

    call_variants = {"key": [qkv.Causal()], "mask": [mask], "bias": [BIAS]}[place]
    arrays = (q, k, v) if place == "key" else (q, q, q)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    near(compiled(tensor(q)), truth(*arrays, call_variants).out)


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("dtype", [">f4", "float8_e5m2", np.longdouble, object, "S3"])
def test_types_that_torch_lacks_are_named(dtype: Any, differentiated: bool) -> None:
    """What torch says of them names no array of the call."""
    exotic = np.dtype(dtype) if dtype != "float8_e5m2" else np.dtype(ml_dtypes.float8_e5m2)
    query, key, value = (torch.from_numpy(a.astype(np.float32)) for a in ARRAYS)
    query.requires_grad_(differentiated)
    with pytest.raises(qkv.DTypeError, match="key has dtype"):
        qkv.attention(query, ARRAYS[1].astype(exotic), value)
    with pytest.raises(qkv.DTypeError, match=r"(bias|variant) has dtype"):
        qkv.attention(query, key, value, BIAS.astype(exotic))


def test_a_number_of_numpy_is_no_key() -> None:
    with pytest.raises(qkv.DTypeError, match="key is a float32, not an array"):
        qkv.attention(tensor(ARRAYS[0]), np.float32(1), tensor(ARRAYS[2]))


def test_fields_of_packed_records_beside_what_torch_differentiates() -> None:
    """Strides of such fields are no multiples of the size of a number, as those of torch are."""
    packed = [np.empty(a.shape, [("number", a.dtype), ("byte", "u1")]) for a in (*ARRAYS, BIAS)]
    for records, array in zip(packed, (*ARRAYS, BIAS), strict=True):
        records["number"] = array
    _, key, value, bias = (records["number"] for records in packed)
    query = tensor(ARRAYS[0]).requires_grad_()
    near(qkv.attention(query, key, value, bias, qkv.Causal()).detach(), RIGHT)


def test_a_repeated_row_is_not_written_out_for_torch() -> None:
    """A broadcast bias took as much memory as the matrix of weights."""
    rows = np.broadcast_to(BIAS[0], (9, 9))
    made = as_tensor(rows, "bias")
    assert made.stride() == (0, 1)
    near(made, rows)
    query = tensor(ARRAYS[0]).requires_grad_()
    found = qkv.attention(query, tensor(ARRAYS[1]), tensor(ARRAYS[2]), rows)
    near(found.detach(), truth(*ARRAYS, [rows]).out)
