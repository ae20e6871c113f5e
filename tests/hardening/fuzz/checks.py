"""What is required of the library for a problem, by its purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qkv
from qkv.call.repeated.cache import CALLS

from .bounds import LUCKY, NEIGHBOURS, ORDERS, Result, largest, near, neighbour, require, ulp
from .calls import Call, calls, keywords, spoiled
from .forcing import forced
from .oracle import Oracle
from .oracle.derivatives import Plain, gradients, tangents
from .problem import DTYPES, Problem
from .tensors import through_torch

Array = NDArray[Any]

__all__ = ["CHECKS", "check"]


def check(problem: Problem) -> None:
    """Raise AssertionError unless the library gets every draw of a problem right."""
    with forced(problem.forced):
        CHECKS[problem.purpose](problem)


# Outputs


def forward(problem: Problem) -> None:
    """Output and lse, of the first call and of those like it, which are prepared."""
    oracle = Oracle(problem)
    given = spoiled(problem, oracle)
    options = {**keywords(given), "return_lse": True}
    found = [qkv.attention(*call.arguments, **options) for call in calls(given)]
    outputs(oracle, found)
    last = list(calls(given))[-1]
    CALLS.clear()
    again = qkv.attention(*last.arguments, **options)
    require(
        all(a.tobytes() == b.tobytes() for a, b in zip(again, found[-1], strict=True)),
        "a call like an earlier one has other bits than a first one",
    )
    reaching(oracle, last, options, again)


def outputs(oracle: Oracle, found: Sequence[tuple[Any, Any]]) -> None:
    """Require that outputs and lse of all draws are right."""
    problem = oracle.problem
    dtype = DTYPES[problem.dtype]
    compute = np.dtype(np.float64 if problem.dtype == "float64" else np.float32)
    require(found[0][0].dtype == dtype, f"the output has dtype {found[0][0].dtype}")
    require(found[0][1].dtype == compute, f"lse has dtype {found[0][1].dtype}")
    out = heads_first(problem, np.stack([np.asarray(a) for a, _ in found]))
    lse = np.stack([b for _, b in found])
    nothing = np.isneginf(oracle.lse)
    require((out[~oracle.allowed.any(axis=-1)] == 0).all(), "a row that sees no key is not 0")
    require((np.isneginf(lse) == nothing).all(), "lse is -inf in the wrong rows")
    near(oracle, Result("the output", out, lambda o, t, n: Plain(o, t, n, True).out, dtype))
    rows = np.where(nothing, 0.0, lse)
    near(oracle, Result("lse", rows, plain_lse, compute))


def plain_lse(oracle: Oracle, dtype: Any, order: int) -> Array:
    """0 where it is -inf; it is held to the type of computation."""
    compute = np.float64 if dtype == np.float64 else np.float32
    found = Plain(oracle, compute, order, True).lse
    return np.where(np.isneginf(oracle.lse), 0.0, found)


def reaching(oracle: Oracle, call: Call, options: Mapping[str, Any], before: Any) -> None:
    """A NaN value reaches the rows that see it, and changes no bit of the others."""
    allowed = oracle.allowed[-1]
    keys = np.flatnonzero(allowed.any(axis=tuple(range(allowed.ndim - 1))))
    value = np.array(call.value)
    if not (len(keys) and value.shape[-1] and oracle.factors.ndim == 0):
        return
    key = keys[oracle.problem.seed % len(keys)]
    rows = value.swapaxes(-3, -2) if oracle.problem.layout == "blhd" else value
    rows[..., key, :] = np.nan
    after = qkv.attention(*call._replace(value=value).arguments, **options)
    reached = allowed[..., key]
    first, second = (heads_first(oracle.problem, out[None])[0] for out in (before[0], after[0]))
    require(np.isnan(second[reached]).all(), "a NaN value did not reach a row that sees it")
    kept = first[~reached].tobytes() == second[~reached].tobytes()
    require(kept, "a NaN value changed a row that may not see it")
    require(before[1].tobytes() == after[1].tobytes(), "a NaN value changed lse")


def heads_first(problem: Problem, array: Array) -> Array:
    """An output, or a gradient, of all draws as the oracle has it, but for leading dimensions."""
    return array.swapaxes(-3, -2) if problem.layout == "blhd" else array


# Derivatives


def cotangents(oracle: Oracle) -> tuple[Array, Array]:
    """Random cotangents of output and lse, with heads before rows."""
    rng = np.random.default_rng(oracle.problem.seed)
    compute = np.float64 if oracle.problem.dtype == "float64" else np.float32
    grad_out = rng.normal(size=oracle.out.shape).astype(DTYPES[oracle.problem.dtype])
    return grad_out, rng.normal(size=oracle.lse.shape).astype(compute)


def own_arrays(problem: Problem, oracle: Oracle) -> dict[str, int]:
    """Variants whose arrays have gradients: by the oracle's name, which variant of the problem."""
    found = {
        str(n): next(i for i, v in enumerate(problem.variants) if v is mod.variant)
        for n, mod in enumerate(oracle.mods)
        if mod.of_own is not None
    }
    for n, v in enumerate(problem.variants):
        if v.name == "Sinks":
            found["sinks"] = n
    return {
        name: n
        for name, n in found.items()
        if not any(
            isinstance(field, np.ndarray) and 0 in field.strides
            for field in problem.variants[n].fields.values()
        )
    }


def pulled_back(problem: Problem) -> None:
    """Gradients of operands and variants, of the first call and of those like it."""
    oracle = Oracle(problem)
    given = spoiled(problem, oracle)
    grad_out, grad_lse = cotangents(oracle)
    # Calls that name variants are not prepared, and few draws of them say as much as many.
    own = own_arrays(problem, oracle) if problem.draws < 10 and oracle.scores.size else {}
    options = {**keywords(given), "return_lse": True}
    outs, found = [], []
    for draw, call in enumerate(calls(given)):
        results, pullback = qkv.vjp(*call.arguments, **options)
        wrt = [call.variants[n] for n in own.values()]
        got = pullback(heads_first(problem, grad_out[draw]), grad_lse[draw], wrt=wrt)
        outs.append(results)
        found.append(
            {"query": got.query, "key": got.key, "value": got.value}
            | {name: got.of(call.variants[n]) for name, n in own.items()}
        )
    outputs(oracle, outs)
    right_gradients(oracle, found, (grad_out, grad_lse))


def right_gradients(
    oracle: Oracle, found: Sequence[Mapping[str, Any]], along: tuple[Array, Array]
) -> None:
    """Require that gradients of all draws are within their bounds."""
    problem = oracle.problem
    dtype = DTYPES[problem.dtype]
    grad_out, grad_lse = (a.astype(np.float64) for a in along)
    known: dict[Any, dict[str, Array]] = {}

    def plain(o: Oracle, held: Any, order: int) -> dict[str, Array]:
        key = id(o), np.dtype(held), order
        if key not in known or o is not oracle:
            known[key] = gradients(o, o.own(grad_out), o.own(grad_lse), held, order)
        return known[key]

    for name in found[0]:
        got = np.stack([np.asarray(each[name]) for each in found])
        held = got.dtype
        if name in ("query", "key", "value"):
            got = heads_first(problem, got)
            require(held == dtype, f"the gradient of {name} has dtype {held}")
        else:
            held = coarser(held, np.dtype(np.float64 if problem.dtype == "float64" else np.float32))

        def of_name(
            o: Oracle, t: Any, n: int, name: str = name, shape: tuple[int, ...] = got.shape[1:]
        ) -> Array:
            gradient = plain(o, t, n)[name]
            if name == "sinks" and not shape:  # one for all heads
                gradient = gradient.sum(axis=-1)
            return gradient.reshape(len(gradient), *shape)

        near(oracle, Result(f"the gradient of {name}", got, of_name, held, is_gradient=True))


def coarser(a: Any, b: Any) -> Any:
    """Which of two types has the larger unit."""
    return max(a, b, key=lambda dtype: float(ulp(np.ones(()), dtype)))


def pushed_forward(problem: Problem) -> None:
    """Tangents of output and lse along those of operands, biases and sinks."""
    oracle = Oracle(problem)
    dtype = DTYPES[problem.dtype]
    compute = np.dtype(np.float64 if problem.dtype == "float64" else np.float32)
    rng = np.random.default_rng(problem.seed)
    operands = {
        name: rng.normal(size=array.shape).astype(dtype)
        for name, array in zip(
            ("query", "key", "value"), (problem.query, problem.key, problem.value), strict=True
        )
    }
    own = {
        name: (n, rng.normal(size=np.shape(next(iter(problem.variants[n].fields.values())))))
        for name, n in own_arrays(problem, oracle).items()
        if problem.variants[n].name in ("array", "Bias", "Sinks") and oracle.scores.size
    }
    outs, moved = [], []
    options = {**keywords(problem), "return_lse": True}
    for draw, call in enumerate(calls(problem)):
        of_variants = [
            (call.variants[n], None, t[draw] if problem.variants[n].varies else t)
            for n, t in own.values()
        ]
        along = qkv.Tangents(*(t[draw] for t in operands.values()), of_variants=of_variants)
        results, changes = qkv.jvp(*call.arguments, tangents=along, **options)
        outs.append(results)
        moved.append(changes)
    outputs(oracle, outs)
    whole = replace(problem, **operands)
    query, key, value = Oracle(replace(whole, variants=()))._operands()
    directions = {"query": query, "key": key, "value": value}
    directions |= {name: t for name, (_, t) in own.items()}
    sinks = directions.get("sinks", np.zeros(()))
    directions["sinks"] = np.broadcast_to(sinks.reshape(-1), oracle.num_heads)[:, None][..., 0]

    def plain(o: Oracle, held: Any, order: int) -> tuple[Array, Array]:
        own = {
            name: o.own(t) if len(t) == problem.draws and name != "sinks" else t
            for name, t in directions.items()
        }
        return tangents(o, own, held, order)

    out = heads_first(problem, np.stack([out for out, _ in moved]))
    lse = np.stack([lse for _, lse in moved])
    near(
        oracle,
        Result("the tangent of the output", out, lambda o, t, n: plain(o, t, n)[0], dtype, True),
    )
    near(
        oracle,
        Result("the tangent of lse", lse, lambda o, t, n: plain(o, t, n)[1], compute, True),
    )


# Inspection


def inspection(problem: Problem) -> None:
    """Weights, and what is told of them."""
    oracle = Oracle(problem)
    given = spoiled(problem, oracle)
    records = [qkv.inspect(*call.arguments, **keywords(given)) for call in calls(given)]
    outputs(oracle, [(record.output, record.lse) for record in records])
    weights, allowed = oracle.weights, oracle.allowed
    with np.errstate(all="ignore"):
        logs = np.where(weights > 0, np.log(weights), 0.0)
    expected = {
        "entropy": (
            -(weights * logs).sum(axis=-1),
            [r.entropy for r in records],
            # What an error of 1 in each weight does to `sum w log w`.
            np.sum(np.where(allowed, 1 - logs, 0), axis=-1) + 1,
        ),
        "max_weight": (weights.max(axis=-1, initial=0.0), [r.max_weight for r in records], 1),
        "received": (weights.sum(axis=-2), [r.received for r in records], max(1, oracle.q_len)),
    }
    if problem.seed % 4 == 0:  # These take as long as all others.
        expected |= replayed(oracle, records)
    top = [record.top(3) for record in records] if oracle.kv_len else []
    for limit in limits_of_weights(oracle):
        wrong = [
            name
            for name, (right, got, share) in expected.items()
            if not close(np.stack(got), right, limit, share)
        ] + ["top(3)" for _ in top[:1] if not best(top, weights, allowed, limit)]
        if not wrong:
            return
    raise AssertionError(f"{' and '.join(wrong)}: beyond the bound of weights, {limit}")


def replayed(oracle: Oracle, records: Sequence[Any]) -> dict[str, tuple[Array, list[Array], Any]]:
    """What is computed again from operands: weights, and their sums over some keys."""
    weights = oracle.weights
    q_pos, kv_pos = oracle.positions
    offset = oracle.problem.seed % 5 - 3
    some = np.random.default_rng(oracle.problem.seed).random(oracle.kv_len) < 0.5
    at = np.sum(weights * (kv_pos == q_pos + offset), axis=-1)
    mass = weights[..., some].sum(axis=-1)
    return {
        "weights": (weights, [r.weights[...] for r in records], 1),
        "mass": (mass, [r.mass(some) for r in records], max(1, some.sum())),
        "mass_at": (at, [r.mass_at(offset) for r in records], max(1, oracle.kv_len)),
    }


def limits_of_weights(oracle: Oracle) -> Any:
    """Bounds of an output whose values are the unit vectors, and of lse, added; they grow."""
    compute = np.dtype(np.float64 if oracle.problem.dtype == "float64" else np.float32)
    lse = np.where(np.isneginf(oracle.lse), 0.0, oracle.lse)
    if compute == np.float64:
        yield 64 * 2.0**-52 * (1 + np.maximum(1, largest(lse)))
        return
    unit = ulp(largest(oracle.weights), compute) + ulp(largest(lse), compute)
    yield unit
    worst = np.zeros(len(unit))
    for order in range(ORDERS[-1]):
        plain = Plain(oracle, compute, order, True)
        rows = np.where(np.isneginf(oracle.lse), 0.0, plain.lse)
        worst = np.maximum(worst, largest(plain.weights - oracle.weights) + largest(rows - lse))
        if order + 1 in ORDERS:
            yield unit + 2 * worst
    LUCKY["weights"] += 1
    for number in range(NEIGHBOURS):
        beside = Oracle(neighbour(oracle.problem, number))
        plain = Plain(beside, compute, number, True)
        rows = np.where(np.isneginf(oracle.lse), 0.0, plain.lse)
        right = np.where(np.isneginf(oracle.lse), 0.0, beside.lse)
        worst = np.maximum(worst, largest(plain.weights - beside.weights) + largest(rows - right))
    yield unit + 2 * worst


def close(found: Array, right: Array, limit: Array, share: Any) -> bool:
    """Whether all entries are within a share of the limit of their draw."""
    require(found.shape == right.shape, f"a statistic has shape {found.shape}, not {right.shape}")
    allowance = limit.reshape(-1, *(1,) * (right.ndim - 1)) * share
    return bool(np.all(np.abs(found - right) <= allowance))


def best(top: Sequence[Any], weights: Array, allowed: Array, limit: Array) -> bool:
    """Whether the best keys are those of the largest weights, in falling order."""
    indices, values = (np.stack(a) for a in zip(*top, strict=True))
    missing = indices < 0
    few = np.minimum(allowed.sum(axis=-1), 3)
    require((missing.sum(axis=-1) == 3 - few).all(), "top(3) has a wrong number of keys")
    fallen = -np.sort(-weights, axis=-1)[..., :3]
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, 3 - fallen.shape[-1])]
    fallen = np.where(missing, 0.0, np.pad(fallen, padding))
    named = np.take_along_axis(weights, np.maximum(indices, 0), axis=-1)
    named = np.where(missing, 0.0, named)
    return close(values, fallen, limit, 1) and close(named, fallen, limit, 2)


# Tensors


def tensors(problem: Problem) -> None:
    """torch: output, lse, and gradients by autograd."""
    oracle = Oracle(problem)
    grad_out, grad_lse = cotangents(oracle)
    own = {
        name: n
        for name, n in own_arrays(problem, oracle).items()
        if problem.variants[n].name == "Bias" and oracle.scores.size
    }
    given = spoiled(problem, oracle)
    along = [heads_first(problem, g) for g in grad_out], grad_lse
    outs, found = through_torch(given, along, own)
    outputs(oracle, outs)
    right_gradients(oracle, found, (grad_out, grad_lse))


CHECKS: Mapping[str, Callable[[Problem], None]] = {
    "forward": forward,
    "decoding": forward,
    "gradients": pulled_back,
    "tangents": pushed_forward,
    "inspection": inspection,
    "torch": tensors,
}
"""The check of problems of each purpose."""
