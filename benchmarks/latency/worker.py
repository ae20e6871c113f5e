"""One front end's process: it checks each row, and times its calls in turns with the plain causal
call of the same size."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

import qkv
from benchmarks.latency.front_ends import FrontEnd, front_end
from benchmarks.latency.rows import BASE, CALL, LAYERS, STEP_STARTS, STEPS, Row, row_of, step
from benchmarks.problems.moved import Shape
from benchmarks.running.worker import answered, serve
from qkv.errors import QkvError

__all__ = ["MANY", "answer"]

Array: TypeAlias = NDArray[Any]
Run: TypeAlias = Callable[[], Any]

MANY = 9
"""Batch rows of the large call. What eight more of them cost, divided by eight, is the kernel."""

_LARGEST_ERROR = 2e-4
"""The largest error of an output in float32, of inputs of unit variance."""
_LEAST_CALLS, _MOST_CALLS = 3, 40


def answer(message: Mapping[str, Any]) -> dict[str, Any]:
    """The times of one row: {"calls": {name: seconds of each round}, "steps": {...}}."""
    return answered(_measured, message)


def _measured(front: str, row: str, rounds: int, seconds: float) -> dict[str, Any]:
    one, chosen = front_end(front), row_of(row)
    runs = _runs(one, chosen)
    steps: dict[str, list[float]] = {}
    if one.steps:
        steps = _steps(one, chosen)
    return {"state": "ready", "calls": _turns(runs, rounds, seconds), "steps": steps}


def _runs(one: FrontEnd, row: Row) -> dict[str, Run]:
    """What is timed in turns: the call of `BASE` and of the row, and what else this front end has.

    Names with "many" are the same with `MANY` batch rows.
    """
    runs = {}
    many = replace(CALL, batch_shape=(MANY,))
    sizes = {"": CALL, " many": many} if one.name in ("NumPy", "torch") else {"": CALL}
    for suffix, shape in sizes.items():
        variants = _variants(row, CALL)
        if suffix and not _serves(variants, shape):
            variants = _variants(row, shape)
        for name, what in (("base", BASE), ("call", row)):
            if one.name == "NumPy" or not suffix:
                chosen = variants if what is row else _variants(what, CALL)
                runs[f"{name}{suffix}"] = _checked(one, chosen, shape)
        if one.name == "NumPy":
            arrays = _arrays(shape)
            runs[f"inspect{suffix}"] = partial(qkv.inspect, *arrays, *variants)
            runs[f"gradient{suffix}"] = partial(_there_and_back, arrays, variants)
        elif one.name == "torch":
            runs[f"gradient{suffix}"] = _torch_gradient(one, variants, shape)
    return runs


def _there_and_back(arrays: tuple[Array, ...], variants: tuple[Any, ...]) -> Any:
    out, pullback = qkv.vjp(*arrays, *variants)
    return pullback(out)


def _torch_gradient(one: FrontEnd, variants: tuple[Any, ...], shape: Shape) -> Run:
    import torch

    bound = one.bind(variants, (shape.q_len, shape.kv_len), {})
    arrays = tuple(one.place(array).requires_grad_() for array in _arrays(shape))
    grad = torch.ones(*shape.batch_shape, shape.num_heads, shape.q_len, shape.v_head_dim)
    return lambda: torch.autograd.grad(bound(*arrays), arrays, grad)


def _checked(one: FrontEnd, variants: tuple[Any, ...], shape: Shape) -> Run:
    """The call of a row, compared with the reference backend once."""
    arrays = _arrays(shape)
    bound = one.bind(variants, (shape.q_len, shape.kv_len), {})
    run = partial(bound, *map(one.place, arrays))
    _compare(one.read(run()), qkv.attention(*arrays, *variants, backend="reference"))
    return run


def _compare(found: Array, expected: Array) -> None:
    error = float(np.abs(found - expected).max())
    if not error <= _LARGEST_ERROR:
        raise ValueError(f"out is off by {error:.1e}; the bound is {_LARGEST_ERROR:.0e}")


def _turns(runs: Mapping[str, Run], rounds: int, seconds: float) -> dict[str, list[float]]:
    """The lower quartile of some calls of each, round after round."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in runs.items():
                run()
                found[name].append(_several(run, seconds))
    finally:
        gc.enable()
    return found


def _several(run: Run, seconds: float) -> float:
    times: list[float] = []
    while len(times) < _LEAST_CALLS or (sum(times) < seconds and len(times) < _MOST_CALLS):
        times.append(_timed(run))
    return _quartile(times)


def _quartile(times: Sequence[float]) -> float:
    """The lower one: whoever else is at a core can only add to the time of a short call."""
    return sorted(times)[len(times) // 4]


def _timed(run: Run) -> float:
    began = time.perf_counter()
    result = run()
    taken = time.perf_counter() - began
    del result
    return taken


def _steps(one: FrontEnd, row: Row) -> dict[str, list[float]]:
    """Seconds of a call at a number of keys not seen before, and of the same once more.

    Keys and values are new arrays in each step, as a cache that grows gives them. "first" is the
    first layer that meets a length, "later" the mean of the others; one value for each of
    `STEP_STARTS`, the lower quartile of the steps from there on.
    """
    longest = STEP_STARTS[-1] + STEPS
    layers = [_arrays(step(longest), seed) for seed in range(LAYERS)]
    variants = _step_variants(row)
    for kv_len in (STEP_STARTS[0] - 3, STEP_STARTS[0] - 2):
        found = _one_step(one, layers, variants(kv_len), kv_len)[1]
        expected = qkv.attention(
            *_until(layers[0], kv_len), *variants(kv_len), q_offset="end", backend="reference"
        )
        _compare(found, expected)
    columns: dict[str, list[float]] = {}
    for start in STEP_STARTS:
        lengths = range(start, start + STEPS)
        for kind in ("new", "seen"):
            taken = [_one_step(one, layers, variants(n), n)[0] for n in lengths]
            columns.setdefault(f"{kind} first", []).append(_quartile([t[0] for t in taken]))
            later = [sum(t[1:]) / (LAYERS - 1) for t in taken]
            columns.setdefault(f"{kind} later", []).append(_quartile(later))
    return columns


def _one_step(
    one: FrontEnd, layers: list[tuple[Array, ...]], variants: tuple[Any, ...], kv_len: int
) -> tuple[list[float], Array]:
    """Seconds of each layer, and the output of the first."""
    bound = one.bind(variants, (1, kv_len), {"q_offset": "end"})
    outs, times = [], []
    for layer in layers:
        run = partial(bound, *map(one.place, _until(layer, kv_len)))
        began = time.perf_counter()
        outs.append(run())
        times.append(time.perf_counter() - began)
    return times, one.read(outs[0])


def _until(layer: tuple[Array, ...], kv_len: int) -> tuple[Array, ...]:
    query, key, value = layer
    return query, key[:, :, :kv_len].copy(), value[:, :, :kv_len].copy()


def _step_variants(row: Row) -> Callable[[int], tuple[Any, ...]]:
    """Variants of a step: one object for all lengths, as a model keeps it, where it serves them."""
    kept = _variants(row, step(STEP_STARTS[-1] + STEPS))
    if _serves(kept, step(STEP_STARTS[0])):
        return lambda kv_len: kept
    return lambda kv_len: _variants(row, step(kv_len))


def _serves(variants: tuple[Any, ...], shape: Shape) -> bool:
    """Whether variants that were made for another shape mean something for this one."""
    try:
        qkv.attention(*_arrays(shape), *variants, q_offset="end", backend="reference")
    except QkvError:
        return False
    return True


def _variants(row: Row, shape: Shape) -> tuple[Any, ...]:
    return row.variants(shape, np.random.default_rng(1))


def _arrays(shape: Shape, seed: int = 0) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)

    def drawn(heads: int, length: int) -> Array:
        size = (*shape.batch_shape, heads, length, shape.head_dim)
        return rng.standard_normal(size, np.float32)

    return (
        drawn(shape.num_heads, shape.q_len),
        drawn(shape.num_kv_heads, shape.kv_len),
        drawn(shape.num_kv_heads, shape.kv_len),
    )


if __name__ == "__main__":
    serve(answer)
