"""The backward pass in products of parts: sizes, what has no parts or is hidden, every product."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import qkv
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.passes import backward as backward_pass
from qkv.backends.cpu.passes import forward as forward_pass
from qkv.backends.cpu.split_bf16 import terms
from qkv.problem.building.check import check
from qkv.testing import DTYPES
from rebuilt import rebuilt_kernels

pytestmark = pytest.mark.usefixtures("tiles")

Q_LEN, KV_LEN, DIM, V_DIM = 700, 300, 64, 48
NAMES = ("query", "key", "value", "grad_out")


def operands(q_len=Q_LEN, kv_len=KV_LEN, dtype="float32") -> dict[str, np.ndarray]:
    """Two heads of Q for one of K and V."""
    rng = np.random.default_rng(0)
    sizes = (2, q_len, DIM), (1, kv_len, DIM), (1, kv_len, V_DIM), (2, q_len, V_DIM)
    return {n: rng.normal(size=s).astype(dtype) for n, s in zip(NAMES, sizes, strict=True)}


def pullback_of(arrays: dict[str, np.ndarray], *variants: object) -> qkv.Pullback:
    q, k, v, _ = arrays.values()
    problem = check(q, k, v, variants, q_offset=0)
    assert backward_pass.backward_shape(problem, host()).terms > 1, "another kernel runs"
    return qkv.vjp(q, k, v, *variants, q_offset=0, backend="cpu")[1]


def gradients(arrays: dict[str, np.ndarray], *variants: object) -> list[np.ndarray]:
    found = pullback_of(arrays, *variants)(arrays["grad_out"])
    return [found.query, found.key, found.value]


def formula(
    arrays: dict[str, np.ndarray], allowed: np.ndarray | None = None, kind=torch.float64
) -> list[np.ndarray]:
    """The gradients by torch's derivative of softmax(Q K^T / sqrt(d)) V."""
    q, k, v, grad_out = (torch.tensor(a.astype(np.float64)).to(kind) for a in arrays.values())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = q @ k.mT / DIM**0.5
    if allowed is not None:
        scores = scores.masked_fill(~torch.tensor(allowed), -torch.inf)
    (torch.softmax(scores, -1) @ v).backward(grad_out)
    return [x.grad.double().numpy() for x in leaves]


def limits(arrays: dict[str, np.ndarray], allowed: np.ndarray | None = None) -> list[float]:
    """Three times the error of the formula in float32, and three units in the last place."""
    pairs = zip(formula(arrays, allowed, torch.float32), formula(arrays, allowed), strict=True)
    return [
        3 * np.abs(plain - exact).max() + 3 * np.spacing(np.float32(np.abs(exact).max()))
        for plain, exact in pairs
    ]


def errors(arrays: dict[str, np.ndarray], *variants: object, allowed=None) -> list[float]:
    return errors_of(gradients(arrays, *variants), formula(arrays, allowed))


def errors_of(found: list[np.ndarray], exact: list[np.ndarray]) -> list[float]:
    return [float(np.abs(ours - right).max()) for ours, right in zip(found, exact, strict=True)]


CAUSAL = np.tri(Q_LEN, KV_LEN, dtype=bool)


@pytest.mark.slow
@pytest.mark.sampled(("causal", "keys"), list(product([False, True], [KV_LEN, 299, 257])), one_in=2)
def test_within_the_bound(keys, causal) -> None:
    """The last pair of keys may have one key, and blocks need not be whole."""
    arrays, allowed = operands(kv_len=keys), np.tri(Q_LEN, keys, dtype=bool) if causal else None
    found = errors(arrays, *[qkv.Causal("start")] * causal, allowed=allowed)
    assert all(map(np.less_equal, found, limits(arrays, allowed)))


MISSING = [
    (t, n) for t in ("_PRODUCTS", "_WEIGHT_PRODUCTS") for n in range(len(terms._PRODUCTS[3]))
]


@pytest.mark.slow
@pytest.mark.sampled(("table", "number"), MISSING, one_in=4)
def test_a_missing_product_is_found(table, number, monkeypatch) -> None:
    """The product is missing in the backward kernel alone: output and lse are right.

    All but the least products are 2**-9 of the sum or more each; the least are 2**-18 of it.
    """
    arrays = operands()
    exact, pullback = formula(arrays), pullback_of(arrays)
    whole = errors_of(gradients(arrays), exact)
    assert all(e <= 2.0**-20 * np.abs(x).max() for e, x in zip(whole, exact, strict=True))
    products = getattr(terms, table)[3]
    monkeypatch.setitem(getattr(terms, table), 3, products[:number] + products[number + 1 :])
    with rebuilt_kernels() as built:
        found = pullback(arrays["grad_out"])
    assert [(emit.name, key.shape.terms) for emit, key in built] == [("emit_split_backward", 3)]
    fewer = errors_of([found.query, found.key, found.value], exact)
    assert any(less > 4 * e for less, e in zip(fewer, whole, strict=True))


@pytest.mark.parametrize("size", [2.0**-140, 2.0**-99, 2.0**-61, 2.0**59, 2.0**62, 1e30])
def test_gradients_scale_as_the_cotangent_does(size) -> None:
    """Down to where parts would be subnormal, and up to where there are none."""
    arrays, up = operands(200, 170), np.float64(size)
    size = np.float32(size)
    allowed = limits(arrays)
    arrays["grad_out"] *= size
    unit = np.float64(np.finfo(np.float32).smallest_subnormal)
    exact = formula(arrays)
    for found, right, limit in zip(gradients(arrays), exact, allowed, strict=True):
        assert np.abs(found - right).max() <= limit * up + unit


def test_a_tiny_cotangent_beside_large_values() -> None:
    """Lifted by 2^64 as others are, it made gradients NaN that are near 1e18."""
    arrays = operands(200, 170)
    arrays["grad_out"] *= np.float32(2.0**-63)
    arrays["value"] *= np.float32(2.0**122)
    for found, right in zip(gradients(arrays), formula(arrays), strict=True):
        assert np.abs(found - right).max() <= 2.0**-18 * np.abs(right).max()


@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize("size", [1e-28, 1e-36])
def test_tiny_operands(name, size) -> None:
    """Gradients keep the bound down to 1e-28, and below it with the limit of semantics.md added."""
    arrays = operands(200, 170)
    arrays[name] /= np.abs(arrays[name]).max()
    arrays[name] *= np.float32(size)
    of_product = 0.0 if size >= 1e-28 else 1e-37 * max(np.abs(a).max() for a in arrays.values())
    exact = formula(arrays)
    for found, right, limit, count in zip(
        gradients(arrays), exact, limits(arrays), (170, 200, 200), strict=True
    ):
        assert np.abs(found - right).max() <= limit + 2 * count * of_product


@pytest.mark.sampled(
    ("name", "number"), list(product(NAMES, [np.inf, -np.inf, np.nan, 3e18, -1e25])), one_in=4
)
def test_odd_elements(name, number) -> None:
    """Odd elements give what float32 makes of them, where that is finite and where it is not."""
    arrays = operands(200, 170)
    places = {"an element": (0, 37, 5), "a row": (0, 41), "rows": (0, slice(30, 100, 17), 3)}
    for place in places.values():
        changed = {n: array.copy() for n, array in arrays.items()}
        changed[name][place] = number
        exact, plain = formula(changed), formula(changed, kind=torch.float32)
        for found, right, theirs in zip(gradients(changed), exact, plain, strict=True):
            finite = np.isfinite(right) & np.isfinite(theirs)
            assert np.isfinite(found[finite]).all()
            assert not np.isfinite(found[~np.isfinite(theirs) & ~np.isfinite(right)]).any()
            scale = np.abs(right[finite]).max(initial=1.0)
            error = np.abs(found[finite] - right[finite]).max(initial=0.0)
            rounding = np.abs(theirs[finite] - right[finite]).max(initial=0.0)
            assert error <= 3 * rounding + 2.0**-20 * scale


@pytest.mark.slow
@pytest.mark.sampled("number", [np.inf, np.nan, 3e38, -1e25, 1e-35], one_in=2)
def test_what_is_hidden_leaves_no_bit(number) -> None:
    """Keys and queries that may not see each other, in the same blocks."""
    arrays = operands()
    allowed = np.ones((Q_LEN, KV_LEN), bool)
    blind, hidden = np.arange(3, Q_LEN, 5), np.arange(1, KV_LEN, 7)
    allowed[np.ix_(blind, hidden)] = False
    before = gradients(arrays, qkv.Mask(allowed))
    changed = {n: array.copy() for n, array in arrays.items()}
    for name in ("key", "value"):
        changed[name][:, hidden, ::3] = number
    found = gradients(changed, qkv.Mask(allowed))
    assert found[0][:, blind].tobytes() == before[0][:, blind].tobytes()
    changed = {n: array.copy() for n, array in arrays.items()}
    for name in ("query", "grad_out"):
        changed[name][:, blind, ::3] = number
    found = gradients(changed, qkv.Mask(allowed))
    for side in (1, 2):
        assert found[side][:, hidden].tobytes() == before[side][:, hidden].tobytes()


def test_one_key_with_all_the_weight() -> None:
    """dP and delta are equal: what is left of their difference would be all there is."""
    arrays = operands()
    arrays["key"][:, 7] = 0
    arrays["query"] *= 0
    arrays["query"][..., 0] = 200
    arrays["key"][..., 0] = -20
    arrays["key"][:, 7, 0] = 20
    found = gradients(arrays)
    assert not found[0].any()
    assert not found[1].any()


def test_scores_far_below_zero() -> None:
    """Where there is no key, the weight of a score of 0 would be infinite."""
    arrays = operands(kv_len=299)
    arrays["query"][..., 0] = 27.55
    arrays["key"][..., 0] = -27.55
    assert all(map(np.less_equal, errors(arrays), limits(arrays)))


@pytest.mark.slow
@pytest.mark.sampled("dtype", ["float32", "bfloat16"], one_in=2)
def test_gradients_of_keys_have_the_same_bits_alone_and_in_a_batch(dtype) -> None:
    rng = np.random.default_rng(3)
    sizes = (20, 900, DIM), (20, 200, DIM), (20, 200, V_DIM), (20, 900, V_DIM)
    arrays = [rng.normal(size=size).astype(DTYPES[dtype]) for size in sizes]
    found = []
    for heads in (1, 20):
        *given, grad_out = (array[:heads] for array in arrays)
        gradients = qkv.vjp(*given, backend="cpu")[1](grad_out)
        found.append((gradients.key[0].tobytes(), gradients.value[0].tobytes()))
    assert found[0] == found[1]


def test_heads_and_ranges_of_keys(monkeypatch) -> None:
    """Several tasks for a head: parts of dQ are added up."""
    monkeypatch.setattr(backward_pass, "_TASK_KEYS_WITH_TILES", 128)
    arrays = operands()
    assert all(map(np.less_equal, errors(arrays), limits(arrays)))


def test_a_large_scale_has_no_parts() -> None:
    q, k, v, _ = operands().values()
    assert backward_pass.backward_shape(check(q, k, v, (), scale=1025.0), host()).terms == 1
    assert forward_pass.ForwardPass(check(q, k, v, (), scale=1025.0)).shape.terms == 1
