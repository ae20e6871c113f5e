"""Statistics of weights that no rank holds, and decoding over tokens that are spread out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qkv
from tests.distributed.cases import CASES, HEADS, KV_HEADS, LENGTH, Case, operands


def dense_weights(name: str) -> torch.Tensor:
    """Weights `(batch, heads, queries, keys)` from the definition, in float64."""
    case: Case = CASES[name]
    query, key, *_ = operands()
    scores = query @ key.repeat_interleave(HEADS // KV_HEADS, dim=1).mT / query.shape[-1] ** 0.5
    scores = case.dense(scores, *case.arrays)
    total = torch.logsumexp(scores, -1)
    if name == "sinks":
        total = torch.logaddexp(total, case.arrays[0][:, None])
    weights = torch.exp(scores - total[..., None])
    return torch.nan_to_num(weights, nan=0.0)


def look(rank: int, ranks: int, name: str, backend: str) -> dict[str, Any]:
    from qkv.distributed import Order, inspect

    order = Order.zigzag(LENGTH, ranks)
    case = CASES[name]
    shards = [order.shard(t, rank).float() for t in operands()[:3]]
    record = inspect(*shards, *case.variants(*case.arrays), order=order, backend=backend)
    numbers, best = record.top(5)
    return {
        "entropy": record.entropy, "max_weight": record.max_weight, "received": record.received(),
        "top": best, "numbers": numbers, "tile": record.tile(slice(20, 60), slice(3, 31)),
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("name", ["causal", "sinks", "packed documents", "mask array", "softcap"])
@pytest.mark.one_in(4)
@pytest.mark.slow
def test_statistics_over_ranks(group: Any, name: str, backend: str) -> None:
    from qkv.distributed import Order

    order = Order.zigzag(LENGTH, 3)
    found = group(3)(look, name, backend)
    weights = dense_weights(name)
    joined = {
        key: order.unshard([of[key].double() for of in found], axis)
        for key, axis in (("entropy", -1), ("max_weight", -1), ("received", -1), ("top", -2))
    }
    entropy = -torch.xlogy(weights, weights).sum(-1)
    close = {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(joined["entropy"], entropy, **close)
    torch.testing.assert_close(joined["max_weight"], weights.amax(-1), **close)
    torch.testing.assert_close(joined["received"], weights.sum(-2), **close)
    torch.testing.assert_close(joined["top"], weights.topk(5, dim=-1).values, **close)
    numbers = order.unshard([of["numbers"] for of in found], -2)
    at_numbers = torch.take_along_dim(weights, numbers.clamp(min=0), dim=-1)
    torch.testing.assert_close(joined["top"], at_numbers.masked_fill(numbers < 0, 0.0), **close)
    for of in found:
        torch.testing.assert_close(of["tile"].double(), weights[..., 20:60, 3:31], **close)


def look_at_little(rank: int, ranks: int, what: str, backend: str) -> dict[str, Any]:
    """A record on ranks of which one has queries that see no key, or has no rows at all."""
    from qkv.distributed import inspect

    sizes, variants = LITTLE[what]
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    shards = [t.float()[..., rows, :] for t in operands()[:3]]
    record = inspect(*shards, *variants, backend=backend, timeout=60)
    numbers, best = record.top(2)
    return {
        "entropy": record.entropy, "max_weight": record.max_weight, "received": record.received(),
        "lse": record.lse, "numbers": numbers, "top": best,
        "tile": record.tile(slice(0, 40), slice(0, 9)),
    }  # fmt: skip


LITTLE: dict[str, Any] = {
    "no rows": ((30, 0, LENGTH - 30), (qkv.Causal(),)),
    "no rows, a sink": ((30, 0, LENGTH - 30), (qkv.Causal(), qkv.Sinks(torch.zeros(HEADS)))),
    "no keys": ((24, 24, 24), (qkv.SlidingWindow(2, 0), qkv.Prefix(4))),
    "no keys, a sink": (
        (24, 24, 24),
        (qkv.SlidingWindow(2, 0), qkv.Prefix(4), qkv.Sinks(torch.zeros(HEADS))),
    ),
    "no pair": ((24, 24, 24), (torch.zeros(LENGTH, LENGTH, dtype=torch.bool),)),
}


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("what", LITTLE)
@pytest.mark.one_in(2)
def test_ranks_without_rows_or_without_keys(group: Any, what: str, backend: str) -> None:
    found = group(3)(look_at_little, what, backend)
    query, key, *_ = operands()
    scores = query @ key.repeat_interleave(HEADS // KV_HEADS, dim=1).mT / query.shape[-1] ** 0.5
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    allowed = {"no rows": j <= i, "no keys": (j <= i) & (i - j <= 2) & (j < 4), "no pair": j < 0}
    scores = scores.masked_fill(~allowed[what.split(",")[0]], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    if "sink" in what:
        lse = torch.logaddexp(lse, torch.zeros(()))
    weights = torch.nan_to_num(torch.exp(scores - lse[..., None]), nan=0.0)
    right = {
        "entropy": -torch.xlogy(weights, weights).sum(-1), "max_weight": weights.amax(-1),
        "received": weights.sum(-2), "lse": lse, "top": weights.topk(2, dim=-1).values,
    }  # fmt: skip
    close = {"rtol": 2e-5, "atol": 2e-5}
    for name, of in right.items():
        whole = torch.cat([rank[name].double() for rank in found], -2 if name == "top" else -1)
        torch.testing.assert_close(whole, of, **close)
    for rank in found:
        torch.testing.assert_close(rank["tile"].double(), weights[..., :40, :9], **close)
        assert ((rank["numbers"] < 0) == (rank["top"] == 0)).all()


def look_at_own_tiles(rank: int, ranks: int) -> str:
    from qkv.distributed import Order, inspect

    order = Order.zigzag(LENGTH, ranks)
    shards = [order.shard(t, rank).float() for t in operands()[:3]]
    record = inspect(*shards, order=order, timeout=60)
    try:
        record.tile(slice(8 * rank, 8 * rank + 8), slice(0, 9))
    except qkv.DistributedError as error:
        return str(error)
    return "no error"


def test_tiles_that_differ_between_ranks_are_refused(group: Any) -> None:
    for said in group(3)(look_at_own_tiles):
        assert "queries differs between ranks" in said
        assert "range(8, 16)" in said


TOKENS = (31, 0, LENGTH - 31)


def decode_step(rank: int, ranks: int, storage: str) -> Any:
    from qkv.distributed import decode

    query, key, value, *_ = (t.float() for t in operands())
    first = sum(TOKENS[:rank])
    rows = slice(first, first + TOKENS[rank])
    k, v = (t[:, :, rows] for t in (key, value))
    variants = (qkv.Causal(), qkv.Sinks(CASES["sinks"].arrays[0].float()))
    if storage == "int8":
        k, v = (_quantized(t) for t in (k, v))
    return decode(query[:, :, -2:], k, v, *variants, q_offset="end", return_lse=True)


def _quantized(rows: torch.Tensor) -> qkv.Quantized:
    scales = rows.abs().amax(-1).clamp(min=1e-9) / 127
    return qkv.Quantized(torch.round(rows / scales[..., None]).to(torch.int8), scales)


@pytest.mark.parametrize("storage", ["plain", "int8"])
def test_a_decoding_step_over_tokens_on_three_ranks(group: Any, storage: str) -> None:
    found = group(3)(decode_step, storage)
    query, key, value, *_ = operands()
    k, v = (t.float() for t in (key, value))
    if storage == "int8":
        k, v = (of.values.float() * of.scales[..., None] for of in map(_quantized, (k, v)))
    k, v = (t.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = query[:, :, -2:].float().double() @ k.mT / query.shape[-1] ** 0.5
    scores[..., 0, -1] = -np.inf
    sinks = CASES["sinks"].arrays[0].float().double()[:, None]
    lse = torch.logaddexp(torch.logsumexp(scores, -1), sinks)
    right = torch.exp(scores - lse[..., None]) @ v
    for out, its_lse in found:
        torch.testing.assert_close(out.double(), right, rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(its_lse.double(), lse, rtol=3e-5, atol=3e-5)
        assert torch.equal(out, found[0][0])


OFFSET_VARIANTS = {"softcap": qkv.Softcap(5.0), "rotation": qkv.RoPE()}


def decode_int8_caches(rank: int, ranks: int, name: str, paged: bool) -> Any:
    """A step over each rank's own cache, whose keys are kept less a mean of its own."""
    from qkv.cache import ContiguousCache, PagedCache
    from qkv.distributed import decode

    query, key, value, *_ = (t.float() for t in operands())
    rows = slice(24 * rank, 24 * rank + 24)
    cache = PagedCache(8, dtype="int8") if paged else ContiguousCache(dtype="int8")
    part = cache.append(key[:, :, rows] + 20 * (rank - 1), value[:, :, rows]).parts[0]
    stored = part.key.pages if paged else part.key
    assert stored.offset is not None
    out = decode(query[:, :, -2:], part.key, part.value, OFFSET_VARIANTS[name], q_offset="end")
    dense = [
        of.values.double() * of.scales.double()[..., None]
        for of in ((part.key.pages, part.value.pages) if paged else (part.key, part.value))
    ]
    if paged:
        table = torch.from_numpy(part.key.page_table)
        dense = [of[table].swapaxes(1, 2).flatten(2, 3) for of in dense]
    dense[0] += stored.offset.double()[:, None]
    return out, *dense


@pytest.mark.parametrize(
    ("name", "paged"), [("softcap", False), ("softcap", True), ("rotation", False)]
)
def test_a_decoding_step_over_int8_caches_of_biased_keys(
    group: Any, name: str, paged: bool
) -> None:
    found = group(3)(decode_int8_caches, name, paged)
    query = operands()[0][:, :, -2:].float().double()
    key, value = (torch.cat([of[n] for of in found], dim=2) for n in (1, 2))
    if name == "rotation":
        frequencies = 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
        query = _rotated(query, frequencies, LENGTH - 2)
        key = _rotated(key, frequencies, 0)
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key, value))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if name == "softcap":
        scores = 5 * torch.tanh(scores / 5)
    right = torch.softmax(scores, -1) @ value
    for out, *_ in found:
        torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-4)


def _rotated(x: torch.Tensor, frequencies: torch.Tensor, first: int) -> torch.Tensor:
    """Su et al. (2021): pairs (i, i + 8) turned by position times frequency."""
    angles = torch.arange(first, first + x.shape[-2])[:, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def decode_far_apart(rank: int, ranks: int) -> float:
    from qkv.distributed import decode

    query, far = torch.tensor([[[1.0, 0.0]]]), (-1000.0, 1000.0, 0.0)[rank]
    key, value = torch.tensor([[[far, 0.0]]]), torch.tensor([[[1.0 if rank else torch.nan]]])
    return decode(query, key, value, scale=1.0, timeout=60).item()


def test_a_value_that_is_not_finite_reaches_every_rank(group: Any) -> None:
    """The value counts as in one process, though its weight, exp(-2000), is 0 in every type."""
    assert np.isnan(group(3)(decode_far_apart)).all()


def look_after_writing(rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
    """Statistics of a record after everything that it was made of was written to."""
    from qkv.distributed import inspect

    rows = slice(rank * LENGTH // ranks, (rank + 1) * LENGTH // ranks)
    shards = [t[..., rows, :].clone() for t in operands()[:3]]
    bias, offsets = CASES["bias"].arrays[0].clone(), np.array([0, 3])
    variants = qkv.Causal(), qkv.Bias(bias)
    record = inspect(*shards, *variants, q_offset=offsets, backend="blocked", timeout=60)
    for tensor in (*shards, bias):
        tensor.fill_(9.0)
    offsets[:] = 50
    every = slice(0, LENGTH)
    return record.received(), record.top(5)[1], record.tile(every, every)


def test_a_record_keeps_copies_of_what_it_was_made_of(group: Any) -> None:
    """A record once computed weights of what was written to the buffers later, with the old lse."""
    found = group(2)(look_after_writing)
    query, key, *_ = operands()
    scores = query @ key.repeat_interleave(HEADS // KV_HEADS, dim=1).mT / query.shape[-1] ** 0.5
    rows, keys = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    allowed = keys <= rows + torch.tensor([0, 3])[:, None, None, None]
    scores = (scores + CASES["bias"].arrays[0]).masked_fill(~allowed, -torch.inf)
    weights = torch.softmax(scores, -1)
    received, best = (torch.cat([of[n] for of in found], axis) for n, axis in ((0, -1), (1, -2)))
    torch.testing.assert_close(received, weights.sum(-2))
    torch.testing.assert_close(best, weights.topk(5, dim=-1).values)
    for of in found:
        torch.testing.assert_close(of[2], weights)


def look_far_down(rank: int, ranks: int) -> tuple[torch.Tensor, ...]:
    from qkv.distributed import Order, inspect

    order = Order.zigzag(LENGTH, ranks)
    shards = [order.shard(t, rank).float() for t in operands()[:3]]
    record = inspect(*shards, qkv.Bias(FAR_DOWN), order=order, backend="cpu")
    return record.received(), record.top(3)[1], record.top(300)[1]


FAR_DOWN = torch.full((LENGTH, LENGTH), -3e4)


@pytest.mark.slow
def test_a_bias_far_below_zero_leaves_statistics_over_ranks_exact(group: Any) -> None:
    """The lse of a row, near -30,000, has an error in float32 that would change each weight."""
    from qkv.distributed import Order

    found = group(3)(look_far_down)
    query, key, *_ = (t.float().double() for t in operands())
    scores = query @ key.repeat_interleave(HEADS // KV_HEADS, dim=1).mT / query.shape[-1] ** 0.5
    weights = torch.softmax((scores - 3e4).float().double(), -1)
    received, three, many = (
        Order.zigzag(LENGTH, 3).unshard([of[n].double() for of in found], axis)
        for n, axis in ((0, -1), (1, -2), (2, -2))
    )
    # A score near -30,000 is a multiple of 2**-9 in float32, whoever computes it.
    close = {"rtol": 2.1 * 2**-9, "atol": 1e-6}
    torch.testing.assert_close(received, weights.sum(-2), **close)
    torch.testing.assert_close(three, weights.topk(3, dim=-1).values, **close)
    torch.testing.assert_close(
        many[..., :LENGTH], weights.sort(-1, descending=True).values, **close
    )
    torch.testing.assert_close(
        received.sum(-1), torch.full(received.shape[:-1], float(LENGTH)).double(), rtol=1e-4, atol=0
    )
