"""The step back equals PyTorch's derivative of the plain formula, and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.inspection.traces import gradient
from qkv.problem.language.derivative import RULES, derivative
from qkv.problem.language.evaluate import evaluate
from qkv.problem.language.expressions import OPERATIONS, SCORE, Load, constant, operation
from qkv.testing import Case, cases, truth

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, V_DIM = 2, 4, 2, 5, 7, 6, 3
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}

Tensor = torch.Tensor
I = torch.arange(Q_LEN)[:, None] + KV_LEN - Q_LEN
J = torch.arange(KV_LEN)[None, :]
HEAD = torch.arange(HEADS)[:, None, None]


def inputs(seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(BATCH, HEADS, Q_LEN, DIM))
    k = rng.normal(size=(BATCH, KV_HEADS, KV_LEN, DIM))
    v = rng.normal(size=(BATCH, KV_HEADS, KV_LEN, V_DIM))
    return q, k, v, rng.normal(size=(BATCH, HEADS, Q_LEN, V_DIM))


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mod: Callable[[Tensor], Tensor] = lambda s: s,
    mask: Any = True,
    sinks: Any = None,
    factors: Any = 1.0,
    turn: Callable[[Tensor, Tensor], Tensor] = lambda x, pos: x,
) -> Tensor:
    """Attention as the formula is written, for autograd."""
    k, v = (a.repeat_interleave(HEADS // KV_HEADS, dim=-3) for a in (k, v))
    s = mod(turn(q, I[:, 0]) @ turn(k, J[0]).transpose(-1, -2) * DIM**-0.5)
    s = torch.where(torch.as_tensor(mask), s, -torch.inf)
    empty = torch.isneginf(s).all(-1, keepdim=True)
    if sinks is None:
        # softmax of nothing is NaN forwards and backwards: such rows are given zeros first.
        w = torch.softmax(torch.where(empty, 0.0, s), -1)
    else:
        sink = torch.as_tensor(sinks)[:, None, None].expand(*s.shape[:-1], 1)
        w = torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1]
    return torch.where(empty, 0.0, w * torch.as_tensor(factors)) @ v


def rotary(x: Tensor, pos: Tensor) -> Tensor:
    n = DIM // 2
    angle = pos[:, None] * 10000.0 ** (-torch.arange(n, dtype=torch.float64) / n)
    a, b = x[..., :n], x[..., n:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def interleaved(x: Tensor, pos: Tensor) -> Tensor:
    angle = pos[:, None] * 50.0 ** (-torch.arange(2, dtype=torch.float64) / 2)
    z = torch.view_as_complex(x[..., :4].reshape(*x.shape[:-1], 2, 2).contiguous())
    turned = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return torch.cat([turned, x[..., 4:]], -1)


RNG = np.random.default_rng(3)
HOLES = np.where(RNG.random((Q_LEN, KV_LEN)) < 0.4, -np.inf, RNG.normal(size=(Q_LEN, KV_LEN)))
EMPTY_ROWS = RNG.random((BATCH, 1, Q_LEN, KV_LEN)) < 0.4
EMPTY_ROWS[:, :, 2] = False
SINKS = RNG.normal(size=HEADS)
PER_HEAD = RNG.normal(size=HEADS)
KEPT = qkv.Dropout(0.4, 11)


def factors() -> np.ndarray:
    x = np.zeros((BATCH, HEADS, Q_LEN, 1)), np.zeros((BATCH, HEADS, KV_LEN, 1))
    return truth(x[0], x[1], x[1], [KEPT]).factors


def wavy(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    near = np.where(q - k > 1, np.sqrt(s * s + 1.0), np.maximum(s, 0.2) - np.minimum(-s, 0.1))
    return near / (1.0 + np.exp(-s)) + abs(s - 0.3) * PER_HEAD[h] - np.log(s * s + 2.0)


def wavy_torch(s: Tensor) -> Tensor:
    left = torch.sqrt(s * s + 1.0)
    right = torch.clamp(s, min=0.2) - torch.clamp(-s, max=0.1)
    near = torch.where(I - J > 1, left, right)
    per_head = torch.as_tensor(PER_HEAD)[HEAD]
    return near * torch.sigmoid(s) + (s - 0.3).abs() * per_head - torch.log(s * s + 2.0)


SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None]
FORMULAS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "causal": ((qkv.Causal(),), {"mask": J <= I}),
    "window": ((qkv.SlidingWindow(2, 1),), {"mask": (J >= I - 2) & (J <= I + 1)}),
    "empty rows": ((EMPTY_ROWS,), {"mask": EMPTY_ROWS}),
    "softcap": ((qkv.Softcap(0.7),), {"mod": lambda s: 0.7 * torch.tanh(s / 0.7)}),
    "alibi": ((qkv.ALiBi(),), {"mod": lambda s: s - SLOPES * (I - J).abs()}),
    "bias with holes, softcap": (
        (qkv.Bias(HOLES), qkv.Softcap(2.0)),
        {"mod": lambda s: 2 * torch.tanh((s + torch.as_tensor(np.maximum(HOLES, -9.0))) / 2),
         "mask": ~np.isneginf(HOLES)},
    ),
    "softcap, then cubed": (
        (qkv.Softcap(2.0), qkv.ScoreMod(lambda s, b, h, q, k: s * s * s)),
        {"mod": lambda s: (2 * torch.tanh(s / 2)) ** 3},
    ),
    "any function": ((qkv.ScoreMod(wavy), qkv.Causal()), {"mod": wavy_torch, "mask": J <= I}),
    "a constant score": (
        (qkv.ScoreMod(lambda s, b, h, q, k: 0.1 * k),), {"mod": lambda s: s * 0 + 0.1 * J.double()},
    ),
    "rope": ((qkv.RoPE(), qkv.Causal()), {"turn": rotary, "mask": J <= I}),
    "rope, interleaved": (
        (qkv.RoPE(base=50.0, layout="interleaved", rotary_dim=4),), {"turn": interleaved},
    ),
    "sinks": ((qkv.Sinks(SINKS), qkv.Causal()), {"sinks": SINKS, "mask": J <= I}),
    "sinks, empty rows": ((qkv.Sinks(SINKS), EMPTY_ROWS), {"sinks": SINKS, "mask": EMPTY_ROWS}),
    "dropout": ((KEPT, qkv.Causal()), {"factors": factors(), "mask": J <= I}),
    "all of them": (
        (qkv.RoPE(), qkv.ALiBi(), qkv.Softcap(1.0), qkv.Sinks(SINKS), KEPT, EMPTY_ROWS),
        {"turn": rotary, "mod": lambda s: torch.tanh(s - SLOPES * (I - J).abs()), "sinks": SINKS,
         "factors": factors(), "mask": EMPTY_ROWS},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_equal_autograd(name: str) -> None:
    variants, formula = FORMULAS[name]
    q, k, v, d_out = inputs()
    leaves = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    output = dense(*leaves, **formula)
    np.testing.assert_allclose(
        qkv.attention(q, k, v, *variants, q_offset="end"), output.detach(), **TOLERANCE
    )
    wanted = torch.autograd.grad(output, leaves, torch.tensor(d_out), allow_unused=True)
    trace = qkv.explain(q, k, v, *variants, q_offset="end", grad=True, cotangent=d_out)
    found = trace.gradient
    for ours, theirs in zip((found.d_query, found.d_key, found.d_value), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, **TOLERANCE)
    for head in trace.heads:
        for row in head.rows:
            place = (head.batch, head.head, row.q_index)
            np.testing.assert_array_equal(row.back.d_query, found.d_query[place])
            np.testing.assert_array_equal(row.back.cotangent, d_out[place])
            np.testing.assert_allclose(
                row.back.d_scores, row.back.jacobian @ row.back.d_weights, **TOLERANCE
            )


@pytest.mark.slow
@pytest.mark.sampled(
    "case",
    [c for c in cases() if c.shape.q_len * c.shape.kv_len <= 150 and c.magnitude <= 1],
    one_in=5,
    ids=lambda case: case.name,
)
def test_gradients_equal_finite_differences(case: Case) -> None:
    """Each argument moves along a random direction, in the caller's own shapes and layout."""
    call = case.build("float64")
    rng = np.random.default_rng(1)
    arrays = [np.array(a) for a in call.arrays]
    output = qkv.attention(*arrays, *call.variants, **call.keywords)
    d_out = rng.normal(size=output.shape)
    found = qkv.explain(
        *arrays, *call.variants, **call.keywords, grad=True, cotangent=d_out
    ).gradient
    np.testing.assert_array_equal(found.cotangent, d_out)
    ours = (found.d_query, found.d_key, found.d_value)
    for which, (array, d_array) in enumerate(zip(arrays, ours, strict=True)):
        assert d_array.shape == array.shape
        assert d_array.dtype == np.float64
        direction = rng.normal(size=array.shape)

        def loss(step: float, which: int = which, direction: np.ndarray = direction) -> float:
            moved = list(arrays)
            moved[which] = moved[which] + step * direction
            return float((qkv.attention(*moved, *call.variants, **call.keywords,
                                        backend="reference") * d_out).sum())  # fmt: skip

        h = 1e-5
        slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
        assert (d_array * direction).sum() == pytest.approx(slope, rel=1e-6, abs=1e-7)


def test_the_cotangent_is_ones_by_default() -> None:
    q, k, v, d_out = inputs()
    plain = qkv.explain(q, k, v, grad=True).gradient
    ones = qkv.explain(q, k, v, grad=True, cotangent=np.ones_like(d_out)).gradient
    np.testing.assert_array_equal(plain.d_key, ones.d_key)
    assert qkv.explain(q, k, v).gradient is None


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_masked_does_not_reach_a_gradient(poison: float) -> None:
    q, k, v, d_out = inputs()
    mask = np.ones((Q_LEN, KV_LEN), bool)
    mask[:, 3] = mask[1] = False
    bad_q, bad_k, bad_v, bad_d = q.copy(), k.copy(), v.copy(), d_out.copy()
    bad_k[:, :, 3] = bad_v[:, :, 3] = poison
    bad_q[:, :, 1] = bad_d[:, :, 1] = poison
    for variants in ((), (qkv.RoPE(), qkv.Softcap(2.0), KEPT)):
        clean, dirty = (
            qkv.explain(*arrays[:3], *variants, mask, q_offset=0, grad=True, cotangent=arrays[3])
            for arrays in ((q, k, v, d_out), (bad_q, bad_k, bad_v, bad_d))
        )
        for name in ("d_query", "d_key", "d_value"):
            ours = getattr(dirty.gradient, name)
            np.testing.assert_array_equal(ours, getattr(clean.gradient, name))
        assert not dirty.gradient.d_query[:, :, 1].any()
        assert not dirty.gradient.d_key[:, :, 3].any()
        assert not dirty.gradient.d_value[:, :, 3].any()


def test_nan_in_an_allowed_pair_reaches_the_gradient() -> None:
    q, k, v, _ = inputs()
    k[0, 0, 2, 0] = np.nan
    found = qkv.explain(q, k, v, grad=True).gradient
    assert np.isnan(found.d_query[0, :2]).all()
    assert np.isfinite(found.d_query[1]).all()


def test_the_step_back_refuses_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient, "DENSE_LIMIT", 1000)
    q, k, v, _ = inputs()
    with pytest.raises(qkv.UnsupportedError, match="for one head") as raised:
        qkv.explain(q, k, v, grad=True, q_index=0)
    assert "q_len=5, kv_len=7" in str(raised.value)


def test_every_operation_has_a_rule() -> None:
    floats = {
        name
        for name, rule in OPERATIONS.items()
        if "float" in rule.takes and rule.gives(*["float"] * rule.arity) == "float"
    }
    assert set(RULES) == floats
    assert len(OPERATIONS) > len(RULES)


SCORES = np.array([0.3, 1.7, 2.5, 0.9])
A = operation("add", operation("mul", SCORE, SCORE), constant(0.25))
B = operation("sub", constant(3.0), SCORE)


@pytest.mark.parametrize("name", RULES)
def test_each_rule_by_finite_differences(name: str) -> None:
    args = {
        1: (A,),
        2: (A, B),
        3: (operation("lt", A, B), operation("exp", A), B),
    }[OPERATIONS[name].arity]
    node = operation(name, *args)

    def at(n: Any, s: np.ndarray) -> np.ndarray:
        return np.asarray(evaluate(n, {"score": s}, {}, np.dtype(np.float64)))

    h = 1e-6
    slope = (at(node, SCORES + h) - at(node, SCORES - h)) / (2 * h)
    np.testing.assert_allclose(at(derivative(node), SCORES), slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "at", "wanted"), [("max", 1.0, 0.5), ("min", 1.0, 0.5), ("abs", 0.0, 0.0)]
)
def test_where_pieces_meet(name: str, at: float, wanted: float) -> None:
    args = (SCORE, constant(1.0))[: OPERATIONS[name].arity]
    found = evaluate(
        derivative(operation(name, *args)), {"score": np.array(at)}, {}, np.dtype(np.float64)
    )
    assert found == wanted


def test_steps_and_integers_do_not_change() -> None:
    steps = operation("floor", SCORE)
    zero = constant(0.0)
    assert derivative(steps) == zero
    assert derivative(operation("add", operation("mul", steps, constant(2.5)), SCORE)) == constant(
        1.0
    )
    assert derivative(Load("t0", "float", (steps,))) == zero
    assert derivative(operation("mul", constant(0.5), constant(2.0))) == zero


def test_a_part_without_the_score_is_zero_even_beside_infinity() -> None:
    node = operation("where", operation("lt", SCORE, constant(0.0)),
                     constant(-np.inf), operation("mul", SCORE, constant(3.0)))  # fmt: skip
    found = evaluate(derivative(node), {"score": np.array([-1.0, 1.0])}, {}, np.dtype(np.float64))
    np.testing.assert_array_equal(found, [0.0, 3.0])


def test_derivative_by_a_table_entry() -> None:
    """What the gradient of a bias or a slope will need."""
    slope = Load("t0", "float", (constant(1),))
    other = Load("t0", "float", (constant(0),))
    node = operation("add", operation("mul", slope, operation("mul", SCORE, slope)), other)
    tables = {"t0": np.array([5.0, 3.0])}
    found = evaluate(derivative(node, slope), {"score": 2.0}, tables, np.dtype(np.float64))
    assert found == 2 * 3.0 * 2.0
    assert derivative(node, other) == constant(1.0)


def test_gradients_beside_one_row_are_of_all_rows() -> None:
    """The text says so, and a cotangent that is 0 elsewhere gives those of the row alone."""
    q, k, v = np.random.default_rng(3).normal(size=(3, 2, 5, 4))
    whole = qkv.explain(q, k, v, grad=True)
    one = qkv.explain(q, k, v, head=1, q_index=2, grad=True)
    np.testing.assert_array_equal(one.gradient.d_key, whole.gradient.d_key)
    assert "Of all 10 rows, not of the 1 above alone." in str(one)
    assert "above alone" not in str(whole)
    cotangent = np.zeros((2, 5, 4))
    cotangent[1, 2] = 1
    alone = qkv.explain(q, k, v, head=1, q_index=2, grad=True, cotangent=cotangent)
    w = one.heads[0].rows[0].softmax.weights
    np.testing.assert_allclose(alone.gradient.d_value[1], np.outer(w, np.ones(4)), atol=1e-12)
    assert not alone.gradient.d_value[0].any()
