"""`qkv.plan`: counts against brute force, reasons as data, and nothing computed."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import qkv
from host_backends import HOST_BACKENDS
from qkv.backends import backends


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def test_full_attention_counts_every_pair() -> None:
    x = zeros(1000, 512)
    plan = qkv.plan(x, x, x)
    assert plan.operations == 4 * 1000 * 1000 * 512 == 2_048_000_000
    assert plan.dense_bytes == 1000 * 1000 * 4
    assert plan.tiles.partial == plan.tiles.empty == 0
    assert plan.output_bytes == 1000 * 512 * 4 + 1000 * 4


@pytest.mark.parametrize(
    ("variant", "allowed"),
    [
        (qkv.Causal(), lambda i, j: j <= i),
        (qkv.SlidingWindow(100, 0), lambda i, j: (j <= i) & (i - j <= 100)),
        (qkv.Causal() | qkv.Prefix(700), lambda i, j: (j <= i) | (j < 700)),
        (qkv.Segments(np.arange(1500) // 400), lambda i, j: i // 400 == j // 400),
        (qkv.KeyLengths(300), lambda i, j: (j < 300) & (i >= 0)),
        (~qkv.SlidingWindow(None, None), lambda i, j: (i < 0) & (j < 0)),
    ],
    ids=lambda v: "" if callable(v) else repr(v),
)
@pytest.mark.parametrize("backend", HOST_BACKENDS)
def test_tiles_are_those_of_the_dense_mask(variant: object, allowed: object, backend: str) -> None:
    x = zeros(2, 3, 1500, 16)
    plan = qkv.plan(x, x, x, variant, backend=backend)
    mask = allowed(*np.ogrid[:1500, :1500])  # type: ignore[operator]
    empty = partial = full = pairs = 0
    for i in range(0, 1500, plan.block_q):
        for j in range(0, 1500, plan.block_kv):
            tile = mask[i : i + plan.block_q, j : j + plan.block_kv]
            empty += not tile.any()
            full += bool(tile.all())
            partial += bool(tile.any() and not tile.all())
            pairs += tile.size if tile.any() else 0
    counts = plan.tiles
    assert (counts.empty, counts.partial, counts.full) == (6 * empty, 6 * partial, 6 * full)
    assert plan.operations == 6 * pairs * 2 * (16 + 16)
    assert plan.backend == backend


def test_masks_that_differ_by_batch_and_head_are_counted_separately() -> None:
    x = zeros(2, 2, 600, 8)
    mask = np.zeros((2, 2, 600, 600), bool)
    mask[0, 0] = mask[1, 1] = True
    plan = qkv.plan(x, x, x, mask, backend="reference")
    assert (plan.tiles.empty, plan.tiles.full) == (2, 2)


@pytest.mark.parametrize(
    ("variants", "allowed"),
    [
        ([qkv.Causal()], lambda i, j: j <= i),
        ([qkv.Causal(), qkv.SlidingWindow(900, 0)], lambda i, j: (j <= i) & (i - j <= 900)),
        ([qkv.Segments(np.arange(20_000) // 4_000)], lambda i, j: i // 4_000 == j // 4_000),
    ],
)
def test_squares_of_many_tiles_are_counted_as_their_tiles(variants: list, allowed: object) -> None:
    """More tiles than are classified at once, by the largest and least of a mask of their pairs."""
    x = zeros(20_000, 8)
    plan = qkv.plan(x, x, x, *variants)
    counts, found = plan.tiles, np.zeros(3, int)
    starts = np.arange(0, 20_000, plan.block_kv)
    for i in range(0, 20_000, plan.block_q):
        mask = allowed(*np.ogrid[i : min(i + plan.block_q, 20_000), :20_000])
        some = np.logical_or.reduceat(mask.any(axis=0), starts)
        whole = np.logical_and.reduceat(mask.all(axis=0), starts)
        found += [(~some).sum(), (some & ~whole).sum(), whole.sum()]
    assert [counts.empty, counts.partial, counts.full] == found.tolist()


def test_reasons_of_the_others_are_data_and_text() -> None:
    x = np.zeros((100_000, 8))
    plan = qkv.plan(x, x, x, qkv.Dropout(0.1, 0), backend="blocked")
    assert set(plan.refusals) == {b.name for b in backends()} - {"blocked"}
    (refusal,) = plan.refusals["reference"]
    assert refusal.accepts == "up to 2.0 GiB"
    text = str(plan)
    assert "would hold 232.8 GiB of scores (accepts up to 2.0 GiB)" in text
    assert "Dropout(0.1, 0)" in text


@pytest.mark.slow
def test_a_long_problem_is_planned_without_being_held() -> None:
    x = np.broadcast_to(np.float32(0), (200_000, 64))
    plan = qkv.plan(x, x, x, qkv.Causal(), qkv.SlidingWindow(255, 0))
    assert plan.dense_bytes == 200_000**2 * 4
    assert plan.operations < 200_000 * 2048 * 256
    assert plan.scratch_bytes < 64 * 2**20


def test_nothing_to_do_is_a_plan_too() -> None:
    plan = qkv.plan(zeros(0, 2, 0, 4), zeros(0, 2, 3, 4), zeros(0, 2, 3, 4))
    assert plan.operations == plan.tiles.total == plan.output_bytes == 0


def test_the_error_when_none_can_run_lists_every_reason() -> None:
    x = zeros(100_000, 8)
    with pytest.raises(qkv.UnsupportedError, match="reference cannot run") as caught:
        qkv.attention(x, x, x, backend="reference")
    assert dict(caught.value.seen)["reference"].startswith("would hold")
    assert "q_len=100000" in dict(caught.value.seen)["problem"]


HELD = {
    "nothing": (),
    "a mask": (qkv.Causal(),),
    "scores and a mask": (qkv.ALiBi(), qkv.Causal()),
    "many steps": (qkv.ScoreMod(lambda s, b, h, i, j: s - np.sqrt(abs(i - j)) + np.tanh(s) * h),),
    "dropout": (qkv.Dropout(0.1, 0),),
}


@pytest.mark.parametrize("variants", HELD.values(), ids=HELD)
@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_scratch_is_what_numpy_holds(backend: str, variants: tuple[Any, ...]) -> None:
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 1024, 16)).astype(np.float32)
    plan = qkv.plan(query, key, value, *variants, backend=backend)
    qkv.attention(query, key, value, *variants, backend=backend)
    tracemalloc.start()
    try:
        qkv.attention(query, key, value, *variants, backend=backend)
        held = tracemalloc.get_traced_memory()[1] - plan.output_bytes
    finally:
        tracemalloc.stop()
    assert 0.8 * plan.scratch_bytes < held < 1.1 * plan.scratch_bytes
