"""Tangents and second derivatives, against PyTorch's double backward of the formula."""

from __future__ import annotations

import tracemalloc
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from formula import TYPES, Dense, tensor, ulp
from test_cases import cotangents, own_arrays

import qkv
from forced import instruction_sets
from qkv.backends.cpu.passes import tangents as tangent_pass
from qkv.backends.cpu.plan import table_gradients
from qkv.call.binding.bound import bind
from qkv.call.binding.options import option_values
from qkv.call.derivatives.jvp import SecondGradients
from qkv.call.derivatives.jvp import second_vjp as second_vjp_of_bound
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.testing import Case, cases

Array = np.ndarray[Any, Any]

BACKENDS = ("cpu", "blocked")
"""Both ways to second derivatives: compiled, and in NumPy."""
ORDERS = 6
EXACT = [case for case in cases() if "float64" in case.dtypes]
ROUNDED = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for dtype in ("float32", "float16", "bfloat16")
    for case in [c for c in cases() if c.shape.q_len * c.shape.kv_len < 400 and dtype in c.dtypes][
        :: 7 if dtype == "float32" else 24
    ]
]
"""Small ones: the formula is differentiated twice in each of the orders."""


def tangents_of(arrays: list[Array]) -> list[Array]:
    rng = np.random.default_rng(11)
    return [rng.normal(size=a.shape).astype(a.dtype) for a in arrays]


def second_vjp(query, key, value, *variants, grad_out, tangents, grad_lse=None, wrt=(), **options):
    bound = bind(query, key, value, variants, option_values("second_vjp", options))
    return second_vjp_of_bound(
        bound, grad_out=grad_out, tangents=tangents, grad_lse=grad_lse, wrt=wrt, given=variants
    )


def torch_second(
    dense: Dense, grad_out: Array, grad_lse: Array, along: list[Array], own: list[int]
) -> list[Array]:
    """d phi / d (query, key, value, own arrays, grad_out, grad_lse), phi = <gradients, along>.

    The last two are the tangents of output and lse.
    """
    leaves = [*dense.leaves, *(dense.own[n] for n in own)]
    cotangents = [tensor(g, dense.dtype) for g in (grad_out, grad_lse)]
    finite = ~torch.isneginf(dense.lse)
    lse = torch.where(finite, dense.lse, 0.0)
    total = (dense.out * cotangents[0]).sum() + (lse * cotangents[1] * finite).sum()
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    phi = sum(
        (g * tensor(t, dense.dtype)).sum()
        for g, t in zip(first, along, strict=True)
        if g is not None
    )
    wanted = [*leaves, *cotangents]
    found = torch.autograd.grad(phi, wanted, allow_unused=True)
    return [
        np.zeros(leaf.shape) if g is None else g.double().numpy()
        for g, leaf in zip(found, wanted, strict=True)
    ]


class Second:
    """The second derivatives of one case along random tangents, by qkv and by torch."""

    def __init__(self, case: Case, dtype: str) -> None:
        self.case, self.dtype = case, dtype
        self.inputs = inputs = case.build(dtype)
        self.own = own_arrays(case, dtype)
        self.variants = [inputs.variants[n] for n in self.own]
        self.grad_out, self.grad_lse = cotangents(case, dtype)
        truth = case.truth(dtype)
        self.plain = [case.plain_order(a) for a in inputs.arrays]
        held = Dense(*self.plain, truth, case.scale)
        arrays = [*self.plain, *(held.own[n].detach().numpy() for n in self.own)]
        self.along = tangents_of(arrays)

    def exact(self) -> list[Array]:
        return self.by_torch("float64")

    def by_torch(self, dtype: str, order: int = 0) -> list[Array]:
        dense = Dense(
            *self.plain, self.case.truth(self.dtype), self.case.scale, TYPES[dtype], order
        )
        return torch_second(dense, self.grad_out, self.grad_lse, self.along, self.own)

    def tangents(self) -> qkv.Tangents:
        query, key, value = (self.turned(t) for t in self.along[:3])
        own = zip(self.variants, self.along[3:], strict=True)
        return qkv.Tangents(query, key, value, [(v, None, t) for v, t in own])

    def turned(self, array: Array) -> Array:
        """The array as the call has it, without the case's way of lying in memory."""
        if not self.case.head_axis:
            return array[0]
        return array.swapaxes(-3, -2) if self.case.layout == "blhd" else array

    def by_qkv(self, backend: str = "blocked") -> list[Array]:
        inputs, case = self.inputs, self.case
        found = second_vjp(
            *inputs.arrays,
            *inputs.variants,
            **inputs.keywords,
            grad_out=self.turned(self.grad_out),
            grad_lse=self.grad_lse if case.head_axis else self.grad_lse[0],
            tangents=self.tangents(),
            wrt=self.variants,
            backend=backend,
        )
        operands = found.query, found.key, found.value, found.grad_out
        for got, given in zip(operands, inputs.arrays, strict=False):
            assert (got.shape, got.dtype) == (given.shape, given.dtype)
        *plain, out = (case.plain_order(g) for g in operands)
        lse = found.grad_lse if case.head_axis else found.grad_lse[None]
        return [*plain, *(found.of(variant) for variant in self.variants), out, lse]


def hold(found: list[Array], exact: list[Array], limits: list[float]) -> None:
    for n, (got, right, limit) in enumerate(zip(found, exact, limits, strict=True)):
        assert got.shape == right.shape
        # A variant's array may be of another type than the operands, and so is its gradient.
        limit += ulp(float(np.max(np.abs(right), initial=0.0)), got.dtype.name) / 2
        error = np.max(np.abs(got.astype(np.float64) - right), initial=0.0)
        assert error <= limit, f"result {n} is {error:.3g} off, allowed is {limit:.3g}"


def hold_in_float64(case: Case, backend: str) -> None:
    second = Second(case, "float64")
    exact = second.by_torch("float64")
    largest = [np.max(np.abs(right), initial=0.0) for right in exact]
    hold(second.by_qkv(backend), exact, [64 * 2.0**-52 * max(1.0, size) for size in largest])


@pytest.mark.slow
@pytest.mark.sampled("case", EXACT, one_in=3, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_in_float64(case: Case, backend: str) -> None:
    hold_in_float64(case, backend)


MANY = [case for case in EXACT if len(case.build("float64").variants) > 2][::4]
"""Cases with several variants."""


@pytest.mark.slow
@pytest.mark.sampled(
    ("isa", "case"), list(product(instruction_sets(), MANY)), one_in=6,
    ids=lambda value: value if isinstance(value, str) else value.name,
)  # fmt: skip
def test_instruction_sets(isa: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    hold_in_float64(case, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), ROUNDED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_double_backward_in_narrow_types(case: Case, dtype: str, backend: str) -> None:
    """Errors are within three times that of the formula in the same type, and three units."""
    second = Second(case, dtype)
    exact = second.by_torch("float64")
    errors = [0.0] * len(exact)
    for order in range(ORDERS):
        for n, (plain, right) in enumerate(zip(second.by_torch(dtype, order), exact, strict=True)):
            errors[n] = max(errors[n], np.max(np.abs(plain - right), initial=0.0))
    largest = [float(np.max(np.abs(right), initial=0.0)) for right in exact]
    limits = [3 * e + 3 * ulp(size, dtype) for e, size in zip(errors, largest, strict=True)]
    hold(second.by_qkv(backend), exact, limits)


def test_every_kind_of_variant_is_met() -> None:
    met = {type(v) for case in EXACT for v in case.build("float64").variants}
    assert set(qkv.variants.ALL) <= met


# Against other ways to a derivative

RNG = np.random.default_rng(0)


def draw(*shape: int) -> Array:
    return RNG.normal(size=shape)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own use of it
def test_jvp_is_that_of_torch() -> None:
    arrays = draw(2, 3, 7, 4), draw(2, 3, 9, 4), draw(2, 3, 9, 5), draw(7, 9)
    along = tuple(draw(*a.shape) for a in arrays)

    def formula(q: Any, k: Any, v: Any, bias: Any) -> Any:
        s = 10 * torch.tanh((q @ k.mT / 2 + bias) / 10)
        return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)

    on_tape = [tuple(map(torch.as_tensor, group)) for group in (arrays, along)]
    (out, lse), (out_dot, lse_dot) = torch.func.jvp(formula, *on_tape)
    *operands, bias = arrays
    own = qkv.Bias(bias), qkv.Softcap(10.0)
    tangents = qkv.Tangents(*along[:3], [(own[0], None, along[3])])
    found = qkv.jvp(*operands, *own, tangents=tangents, return_lse=True)
    expected = (out, lse), (out_dot, lse_dot)
    for got, right in zip(sum(found, ()), sum(expected, ()), strict=True):
        np.testing.assert_allclose(got, right.numpy(), rtol=1e-13, atol=1e-13)


class Everything:
    """One call that has an array of each kind, and its first derivatives."""

    grad_out, grad_lse = draw(2, 4, 9, 5), draw(2, 4, 9)

    def __init__(self, arrays: dict[str, Array], backend: str) -> None:
        bias, values = arrays["bias"], arrays["values"]
        self.operands = arrays["query"], arrays["key"], arrays["value"]
        self.own = {
            "bias": qkv.Bias(bias),
            "slopes": qkv.ALiBi(arrays["slopes"]),
            "table": qkv.RelativeBias(arrays["table"], max_distance=5),
            "cap": qkv.Softcap(float(arrays["cap"])),
            "values": qkv.ScoreMod(
                lambda s, b, h, i, j: s * values[h] + np.exp(0.1 * s * values[j % 4]) * values[h]
            ),
            "sinks": qkv.Sinks(arrays["sinks"]),
        }
        self.variants = qkv.RoPE(), *self.own.values(), qkv.Causal(), qkv.Dropout(0.2, 3)
        self.keywords = {"q_offset": "end", "backend": backend}

    def first(self) -> dict[str, Array]:
        (out, lse), pullback = qkv.vjp(
            *self.operands, *self.variants, **self.keywords, return_lse=True
        )
        found = pullback(self.grad_out, self.grad_lse, wrt=self.own.values())
        return self.named(found) | {"out": out, "lse": lse}

    def second(self, along: dict[str, Array]) -> dict[str, Array]:
        operands = along["query"], along["key"], along["value"]
        own = [(variant, None, along[name]) for name, variant in self.own.items()]
        found = second_vjp(
            *self.operands,
            *self.variants,
            **self.keywords,
            grad_out=self.grad_out,
            grad_lse=self.grad_lse,
            tangents=qkv.Tangents(*operands, own),
            wrt=self.own.values(),
        )
        return self.named(found) | {"out": found.grad_out, "lse": found.grad_lse}

    def named(self, found: qkv.Gradients) -> dict[str, Array]:
        operands = {"query": found.query, "key": found.key, "value": found.value}
        return operands | {name: found.of(variant) for name, variant in self.own.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_central_differences_of_vjp(backend: str) -> None:
    arrays = {
        "query": draw(2, 4, 9, 6), "key": draw(2, 2, 11, 6), "value": draw(2, 2, 11, 5),
        "bias": draw(9, 11), "slopes": RNG.random(4), "table": draw(8, 4), "cap": np.array(2.0),
        "values": draw(4), "sinks": draw(4),
    }  # fmt: skip
    along = {name: draw(*array.shape) for name, array in arrays.items()}
    step = 1e-5
    ahead, behind = (
        Everything(
            {name: a + sign * step * along[name] for name, a in arrays.items()}, backend
        ).first()
        for sign in (1, -1)
    )
    for name, found in Everything(arrays, backend).second(along).items():
        np.testing.assert_allclose(
            found, (ahead[name] - behind[name]) / (2 * step), atol=1e-7, err_msg=name
        )


def test_tables_too_large_for_a_copy_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that add to the same entries then run one after the other."""
    q, k, v, grad_out, *along = (draw(2, 4, 400, 8) for _ in range(7))
    bias, slopes = qkv.Bias(draw(400, 400)), qkv.ALiBi(RNG.random(4))

    def tables() -> list[Array]:
        found = second_vjp(
            q, k, v, bias, slopes, grad_out=grad_out, tangents=qkv.Tangents(*along),
            wrt=[bias, slopes], backend="cpu",
        )  # fmt: skip
        return [found.of(bias), found.of(slopes)]

    copied = tables()
    monkeypatch.setattr(table_gradients, "_COPIES_BYTES", 0)
    for one, several in zip(tables(), copied, strict=True):
        np.testing.assert_allclose(one, several, rtol=0, atol=1e-12 * np.abs(several).max())


# What is forbidden, empty, large or long


OWN = [(), (qkv.Softcap(2.0),), (qkv.RoPE(), qkv.Sinks(0.5))]
FIRST, LAST = np.arange(100), np.arange(100, 300)
HIDDEN = np.arange(40, 60)


def blocks_of_a_mask() -> Array:
    """The first queries see keys below 150, the others all keys but the hidden ones."""
    mask = np.random.default_rng(2).random((300, 300)) < 0.5
    mask[FIRST, 150:] = False
    mask[np.ix_(LAST, HIDDEN)] = False
    return mask


def with_poison(
    poison: float, places: dict[str, Array], own: tuple[Any, ...], backend: str
) -> SecondGradients:
    """Second derivatives where some rows of some arrays are poison."""
    rng = np.random.default_rng(1)
    names = "query", "key", "value", "grad_out", "query_dot", "key_dot", "value_dot"
    arrays = {name: rng.normal(size=(2, 300, 8)) for name in names}
    arrays["grad_lse"] = rng.normal(size=(2, 300))
    for name, rows in places.items():
        arrays[name][:, rows] = poison
    return second_vjp(
        *(arrays[name] for name in names[:3]),
        blocks_of_a_mask(),
        *own,
        grad_out=arrays["grad_out"],
        grad_lse=arrays["grad_lse"],
        tangents=qkv.Tangents(*(arrays[name] for name in names[4:])),
        backend=backend,
    )


def same_bits(before: SecondGradients, after: SecondGradients, rows: Array, keys: Array) -> None:
    for name in ("query", "grad_out", "grad_lse"):
        assert getattr(before, name)[:, rows].tobytes() == getattr(after, name)[:, rows].tobytes()
    for name in ("key", "value"):
        assert getattr(before, name)[:, keys].tobytes() == getattr(after, name)[:, keys].tobytes()


@pytest.mark.sampled(("poison", "own"), list(product([np.nan, np.inf], OWN)), one_in=3)
@pytest.mark.parametrize("backend", BACKENDS)
def test_forbidden_keys_reach_nothing(poison: float, own: tuple[Any, ...], backend: str) -> None:
    before = with_poison(poison, {}, own, backend)
    places = dict.fromkeys(("key", "value", "key_dot", "value_dot"), HIDDEN)
    after = with_poison(poison, places, own, backend)
    # A key feels what happens to the rows that attend to it, and no other.
    same_bits(before, after, rows=LAST, keys=np.arange(150, 300))
    sees = blocks_of_a_mask()[:, HIDDEN].any(axis=1)
    assert np.isnan(after.query[:, sees]).all() or np.isinf(poison)


@pytest.mark.sampled(("poison", "own"), list(product([np.nan, np.inf], OWN)), one_in=3)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_change_gradients_of_their_own_keys_alone(
    poison: float, own: tuple[Any, ...], backend: str
) -> None:
    before = with_poison(poison, {}, own, backend)
    names = "query", "query_dot", "grad_out", "grad_lse"
    after = with_poison(poison, dict.fromkeys(names, FIRST[:10]), own, backend)
    felt = blocks_of_a_mask()[:10].any(axis=0)
    same_bits(before, after, rows=np.arange(10, 300), keys=~felt)
    assert np.isnan(after.key[:, felt]).all() or np.isinf(poison)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_keys(backend: str) -> None:
    """The cotangents of such rows are never used, even where nothing is behind them."""
    q, k, v, grad_out, *along = (draw(2, 40, 8) for _ in range(7))
    mask = RNG.random((40, 40)) < 0.5
    mask[[3, 17]] = False
    mask[:, 5] = False
    grad_lse = draw(2, 40)
    grad_out[:, 3] = grad_lse[:, 3] = np.nan
    tangents = qkv.Tangents(*along)
    of = {"grad_out": grad_out, "grad_lse": grad_lse, "tangents": tangents, "backend": backend}
    found = second_vjp(q, k, v, mask, **of)
    assert not found.grad_out[:, [3, 17]].any()
    assert not found.grad_lse[:, [3, 17]].any()
    assert not found.query[:, [3, 17]].any()
    assert not found.key[:, 5].any()
    assert all(np.isfinite(g).all() for g in (found.query, found.key, found.value))
    sink = qkv.Sinks(0.5)
    tangents = qkv.Tangents(*along, [(sink, None, np.array(2.0))])
    of = {"tangents": tangents, "return_lse": True, "backend": backend}
    _, (out_dot, lse_dot) = qkv.jvp(q, k, v, mask, sink, **of)
    np.testing.assert_array_equal(lse_dot[:, [3, 17]], 2.0)
    assert not out_dot[:, [3, 17]].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_batch_are_what_they_are_alone_on_any_number_of_threads(backend: str) -> None:
    """Heads are computed together, six of them in two parts, with masks that differ by row."""
    shapes = [(3, 6, 300, 8), (3, 2, 300, 8), (3, 2, 300, 8), (3, 6, 300, 8)]
    q, k, v, grad_out = (draw(*shape) for shape in shapes)
    moves = [draw(*a.shape) for a in (q, k, v)]
    lengths = np.array([300, 170, 40])
    sinks = qkv.Sinks(draw(6))

    def derivatives(rows: slice, threads: int) -> list[Array]:
        variants = qkv.Causal(), qkv.KeyLengths(lengths[rows]), qkv.ALiBi(), qkv.RoPE(), sinks
        arrays = [a[rows] for a in (q, k, v)]
        tangents = qkv.Tangents(*(a[rows] for a in moves))
        qkv.set_num_threads(threads)
        try:
            along = {"tangents": tangents, "backend": backend}
            found = second_vjp(*arrays, *variants, grad_out=grad_out[rows], **along)
            out_dot = qkv.jvp(*arrays, *variants, **along)[1]
        finally:
            qkv.set_num_threads(None)
        return [found.query, found.key, found.value, found.grad_out, found.grad_lse, out_dot]

    whole = derivatives(slice(None), 1)
    for mine, same in zip(derivatives(slice(None), 4), whole, strict=True):
        np.testing.assert_array_equal(mine, same)
    for n in range(3):
        for mine, row in zip(derivatives(slice(n, n + 1), 2), whole, strict=True):
            np.testing.assert_array_equal(mine[0], row[n])


@pytest.mark.parametrize("level", [300.0, -1e4, -1e9])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_rounding_took_of_lse_is_given_back(level: float, backend: str) -> None:
    """A bias that is the same for all keys of a row changes no derivative."""
    q, k, v, grad_out, *along = (draw(64, 8).astype(np.float32) for _ in range(7))
    # Scores on a coarse grid: a large bias takes nothing from them, only from lse.
    q, k = (np.zeros_like(a) if level == -1e9 else np.round(a) for a in (q, k))
    near, far = (
        second_vjp(
            q, k, v, qkv.Bias(np.full((64, 1), height, np.float32)),
            grad_out=grad_out, tangents=qkv.Tangents(*along), scale=0.5, backend=backend,
        )
        for height in (0.0, level)
    )  # fmt: skip
    for name in ("query", "key", "value", "grad_out", "grad_lse"):
        a, b = getattr(near, name), getattr(far, name)
        np.testing.assert_allclose(b, a, atol=2e-6 * np.abs(a).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize("size", [1e8, 1e12, 1e30])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_whose_last_bit_is_more_than_a_weight(size: float, dtype: str, backend: str) -> None:
    """Scores of the backend and of NumPy differ by thousands: tangents were once NaN, or 0."""
    k, v, q, grad_out, dk, dv, dq = (draw(n, 24).astype(dtype) for n in (40, 40, 5, 5, 40, 40, 5))
    q *= np.asarray(size, dtype)
    sink = qkv.Sinks(np.zeros(1))
    given = dq, dk, dv, [(sink, None, np.ones(1))]
    # Each row sees the one key of the largest score, or the sink beside scores below 0.
    exact = q.astype(float) @ k.astype(float).T
    rows, best, seen = np.arange(5), exact.argmax(axis=1), exact.max(axis=1, keepdims=True) > 0
    along = {"tangents": qkv.Tangents(*given), "backend": backend}
    second = second_vjp(q, k, v, sink, grad_out=grad_out, **along)
    _, (out, lse) = qkv.jvp(q, k, v, sink, return_lse=True, **along)
    np.testing.assert_array_equal(out, np.where(seen, dv[best], 0))
    np.testing.assert_array_equal(second.grad_out, out)
    moved = ((dq.astype(float) @ k.T + q.astype(float) @ dk.T) * 24**-0.5)[rows, best]
    eps = 8 * np.finfo(dtype).eps * np.abs(moved).max()
    np.testing.assert_allclose(lse, np.where(seen[:, 0], moved, 1), rtol=0, atol=eps)
    assert all(np.isfinite(getattr(second, name)).all() for name in ("query", "key", "value"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_grows_with_the_length(backend: str) -> None:
    n, window = 8_192, qkv.SlidingWindow(100, 0)
    q, k, v, grad_out, *along = (draw(n, 16).astype(np.float32) for _ in range(7))
    tangents = qkv.Tangents(*along)
    tracemalloc.start()
    try:
        qkv.jvp(q, k, v, window, tangents=tangents, backend=backend)
        second_vjp(q, k, v, window, grad_out=grad_out, tangents=tangents, backend=backend)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20e6, "the matrix would take 268e6 bytes"


# Arguments

Q, K, V, G = (draw(2, 9, 4) for _ in range(4))


def test_the_output_is_that_of_attention() -> None:
    call_variants = qkv.Causal(), qkv.Sinks(0.3)
    tangents = qkv.Tangents(query=Q)
    out, lse = qkv.attention(Q, K, V, *call_variants, return_lse=True)
    (got, rows), _ = qkv.jvp(Q, K, V, *call_variants, tangents=tangents, return_lse=True)
    np.testing.assert_array_equal(got, out)
    np.testing.assert_array_equal(rows, lse)
    np.testing.assert_array_equal(qkv.jvp(Q, K, V, *call_variants, tangents=tangents)[0], out)


def test_a_tangent_that_is_none_is_zero() -> None:
    call_variants, one, all_of_them = (
        qkv.Causal(),
        qkv.Tangents(key=K),
        qkv.Tangents(0 * Q, K, 0 * V),
    )
    for tangents in (one, all_of_them):
        assert qkv.jvp(Q, K, V, call_variants, tangents=tangents)[1].any()
    np.testing.assert_array_equal(
        qkv.jvp(Q, K, V, call_variants, tangents=one)[1],
        qkv.jvp(Q, K, V, call_variants, tangents=all_of_them)[1],
    )
    assert not qkv.jvp(Q, K, V, call_variants, tangents=qkv.Tangents())[1].any()


def test_a_bias_that_is_given_twice_moves_twice() -> None:
    bias, other = qkv.Bias(draw(9, 9)), draw(9, 9)
    along = draw(9, 9)
    once = qkv.jvp(Q, K, V, bias, qkv.Bias(bias.array),
                   tangents=qkv.Tangents(of_variants=[(bias, None, 2 * along)]))  # fmt: skip
    twice = qkv.jvp(Q, K, V, bias, bias, tangents=qkv.Tangents(of_variants=[(bias, None, along)]))
    np.testing.assert_allclose(once[1], twice[1], rtol=1e-12)
    bare = qkv.jvp(Q, K, V, other, tangents=qkv.Tangents(of_variants=[(other, None, along)]))
    assert bare[1].any()


def test_one_of_several_arrays_of_a_score_mod() -> None:
    first, second = draw(2), draw(9)
    mod = qkv.ScoreMod(lambda s, b, h, q, k: s * first[h] + second[k])

    def along(*of_variants: Any) -> Array:
        return qkv.jvp(Q, K, V, mod, tangents=qkv.Tangents(of_variants=of_variants))[1]

    parts = [(mod, first, draw(2)), (mod, second, draw(9))]
    np.testing.assert_allclose(along(*parts), sum(along(part) for part in parts), atol=1e-14)
    with pytest.raises(ArgumentError, match="has 2 arrays"):
        along((mod, None, draw(9)))
    with pytest.raises(ArgumentError, match="no such array"):
        along((mod, draw(9), draw(9)))


@pytest.mark.parametrize("variant", [qkv.Bias(draw(9, 9)), qkv.Sinks(draw(2))])
def test_an_array_that_is_named_twice_is_refused(variant: Any) -> None:
    own = variant.array if isinstance(variant, qkv.Bias) else variant.values
    of_variants = [(variant, None, own), (variant, None, 2 * own)]
    with pytest.raises(ArgumentError, match="twice"):
        qkv.jvp(Q, K, V, variant, tangents=qkv.Tangents(of_variants=of_variants))


@pytest.mark.parametrize(
    ("tangents", "kind", "match"),
    [
        (
            {"query": G[:, :3]},
            ShapeError,
            r"tangent of query.*\(2, 3, 4\).*\(2, 9, 4\).*Pass a tangent",
        ),
        ({"value": G.astype(np.float32)}, DTypeError, "tangent of value.*float32.*float64"),
        ({"key": [[1.0]]}, DTypeError, "tangent of key.*not an array"),
        ({"of_variants": [(qkv.Causal(), None, G)]}, ArgumentError, "no score of this call"),
        ({"of_variants": [("cap", None, np.ones(2))]}, ShapeError, r"\(2,\).*Softcap.*\(\)"),
        ({"of_variants": [("cap", None, np.array(1))]}, DTypeError, "int64"),
    ],
)
def test_what_is_refused(tangents: dict[str, Any], kind: type[Exception], match: str) -> None:
    cap = qkv.Softcap(2.0)
    own = [(cap if v == "cap" else v, a, t) for v, a, t in tangents.pop("of_variants", [])]
    with pytest.raises(kind, match=f"(?s){match}"):
        qkv.jvp(Q, K, V, qkv.Causal(), cap, tangents=qkv.Tangents(**tangents, of_variants=own))


def test_a_tuple_is_no_direction() -> None:
    x = np.ones((3, 4))
    with pytest.raises(ArgumentError, match="tangents is a tuple"):
        qkv.jvp(x, x, x, tangents=(x, x, x))  # type: ignore[arg-type]  # what is refused


def test_stored_rows_have_no_tangents() -> None:
    q, pages = Q.astype(np.float32), np.zeros((3, 2, 4, 4), np.float32)
    paged = qkv.Paged(pages, np.zeros((3,), int))
    with pytest.raises(DTypeError, match=r"key is a .*Paged, not an array"):
        qkv.jvp(q, paged, paged, tangents=qkv.Tangents())


INFINITE = [(), (qkv.Sinks(0.3),), (qkv.Dropout(0.2, 3),), (qkv.KeyLengths(90),), (qkv.Causal(),)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", INFINITE, ids=lambda own: type(own[0]).__name__ if own else "none")
def test_a_score_of_minus_infinity_forbids_its_pair(own: tuple[Any, ...], backend: str) -> None:
    """An infinite key that no query looks at changes nothing but its own gradients."""
    q, k, v, grad_out, dq, dk, dv = (draw(2, 100, 6) for _ in range(7))
    q, dq = np.abs(q), np.abs(dq)
    k[:, 7] = -np.inf

    def derivatives(*variants: Any) -> list[Array]:
        along = {"tangents": qkv.Tangents(dq, dk, dv), "backend": backend}
        found = second_vjp(q, k, v, *own, *variants, grad_out=grad_out, **along)
        out_dot = qkv.jvp(q, k, v, *own, *variants, **along)[1]
        return [found.query, found.key, found.value, found.grad_out, found.grad_lse, out_dot]

    hidden = np.arange(100) != 7
    for got, right in zip(derivatives(), derivatives(hidden), strict=True):
        np.testing.assert_allclose(got, right, rtol=0, atol=1e-12 * np.abs(right).max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [40.0, 1e3, 1e5, 1e12])
def test_what_is_left_where_one_key_has_all_the_weight(size: float, backend: str) -> None:
    """There dQ is `dlse k[0]`, so that its tangent is `dlse dk[0]`: other terms cancel."""
    q, k, v = np.array([[1.0, 0.0]]), np.array([[size, 0.0], [0.0, 0.0]]), draw(2, 3)
    dq, dk, dv, grad_out = draw(1, 2), draw(2, 2), draw(2, 3), draw(1, 3)
    found = second_vjp(
        q, k, v, grad_out=grad_out, grad_lse=np.array([0.7]), scale=1.0, backend=backend,
        tangents=qkv.Tangents(dq, dk, dv),
    )  # fmt: skip
    np.testing.assert_allclose(found.query[0], 0.7 * dk[0], rtol=0, atol=64 * 2.0**-52)
    np.testing.assert_allclose(found.key[0], 0.7 * dq[0], rtol=0, atol=64 * 2.0**-52)
    np.testing.assert_allclose(found.grad_out[0], dv[0], rtol=0, atol=64 * 2.0**-52)


def test_long_rows_of_a_batch_are_what_they_are_alone() -> None:
    """Parts of dK and dV are added up, and with more work in several steps."""
    q, k, v, grad_out = (draw(4, 2, 1_700, 8).astype(np.float32) for _ in range(4))
    along = [draw(4, 2, 1_700, 8).astype(np.float32) for _ in range(3)]

    def derivatives(rows: slice) -> list[Array]:
        tangents = qkv.Tangents(*(a[rows] for a in along))
        found = second_vjp(
            q[rows], k[rows], v[rows], qkv.Causal(), grad_out=grad_out[rows], tangents=tangents
        )
        return [found.query, found.key, found.value, found.grad_out, found.grad_lse]

    whole = derivatives(slice(None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tangent_pass, "_TASK_OPERATIONS", 1e7)
        in_steps = derivatives(slice(None))
    alone = derivatives(slice(1, 2))
    for one, other, row in zip(whole, in_steps, alone, strict=True):
        assert one.tobytes() == other.tobytes()
        assert one[1].tobytes() == row[0].tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_that_float32_rounds_or_that_are_extreme(backend: str) -> None:
    q, k, v = np.zeros((1, 4), np.float32), np.zeros((2, 4), np.float32), draw(2, 2)
    v = v.astype(np.float32)
    for sink, moves, expected in (
        (1e30, 1.0, 1.0), (-1e30, 1.0, 0.0), (-np.inf, np.nan, 0.0), (np.inf, 1.0, 1.0),
    ):  # fmt: skip
        sinks = qkv.Sinks(np.array([sink]))
        tangents = qkv.Tangents(of_variants=[(sinks, None, np.array([moves]))])
        _, (out, lse) = qkv.jvp(q, k, v, sinks, tangents=tangents, backend=backend, return_lse=True)
        np.testing.assert_array_equal(lse, [expected])
        np.testing.assert_array_equal(out, np.zeros((1, 2)))


def test_rows_that_are_repeated_are_not_copied() -> None:
    q = draw(64, 1, 16, 16).astype(np.float32)
    k, v = (draw(1, 1, 4_000, 16).astype(np.float32) for _ in range(2))
    qkv.jvp(q, k, v, tangents=qkv.Tangents(query=q))
    tracemalloc.start()
    try:
        qkv.jvp(q, k, v, tangents=qkv.Tangents(query=q))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * k.nbytes
