"""Python numbers that change between calls of a compiled function, also beyond torch's limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import qkv

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(2, 2, 9, 8, generator=GENERATOR, dtype=torch.float64)
TABLE = torch.randn(64, generator=GENERATOR, dtype=torch.float64)
query_at, key_at = torch.arange(9)[:, None], torch.arange(9)


def by_hand(query: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The formula; a row that may attend to nothing is 0."""
    return change(query @ query.mT * 8**-0.5).softmax(-1).nan_to_num() @ query


def where(allowed: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scores: scores.masked_fill(~allowed, -torch.inf)


def compared(position: Any, n: Any) -> Any:
    left = (position < n) + 2 * (position <= n) + 4 * (position == n) + 8 * (position != n)
    return left + 16 * (n < position) + 32 * (n <= position) + 64 * (n == position)


Function = Callable[[torch.Tensor, Any], torch.Tensor]
NUMBERS: dict[str, tuple[Function, Callable[[Any], Any], tuple[Any, ...]]] = {
    "Softcap": (
        lambda q, n: qkv.attention(q, q, q, qkv.Softcap(n)),
        lambda n: lambda scores: n * torch.tanh(scores / n),
        (1.0, 2.0, 3.0, 4),
    ),
    "q_offset": (
        lambda q, n: qkv.attention(q, q, q, qkv.Causal(), q_offset=n),
        lambda n: where(query_at + n >= key_at),
        (0, 1, 2, 5),
    ),
    "both offsets": (
        lambda q, n: qkv.attention(q, q, q, qkv.Causal(), q_offset=n + 2, kv_offset=n),
        lambda n: where(query_at + 2 >= key_at),
        (0, 1, 2, 5),
    ),
    "SlidingWindow": (
        lambda q, n: qkv.attention(q, q, q, qkv.SlidingWindow(n, 0)),
        lambda n: where((query_at >= key_at) & (query_at - key_at <= n)),
        (0, 1, 2, 5),
    ),
    "Prefix": (
        lambda q, n: qkv.attention(q, q, q, qkv.Prefix(n)),
        lambda n: where((key_at < n) & (query_at >= 0)),
        (1, 2, 5),
    ),
    "KeyLengths": (
        lambda q, n: qkv.attention(q, q, q, qkv.KeyLengths(n)),
        lambda n: where((key_at < n) & (query_at >= 0)),
        (1, 2, 5),
    ),
    "KeyLengths of a list": (
        lambda q, n: qkv.attention(q, q, q, qkv.KeyLengths([n % 9, 3])),
        lambda n: where(key_at < torch.tensor([n % 9, 3])[:, None, None, None]),
        (1, 2, 5),
    ),
    "scale": (
        lambda q, n: qkv.attention(q, q, q, scale=n),
        lambda n: lambda scores: scores * 8**0.5 * n,
        (0.1, 0.2, 0.5),
    ),
    "ScoreMod": (
        lambda q, n: qkv.attention(q, q, q, qkv.ScoreMod(lambda s, b, h, i, j: n * s + j * n)),
        lambda n: lambda scores: n * scores + key_at * n,
        (1, 2, 5, 0.5, 0.25),
    ),
    "comparisons of positions": (
        lambda q, n: qkv.attention(q, q, q, qkv.ScoreMod(lambda s, b, h, i, j: s + compared(j, n))),
        lambda n: lambda scores: scores + compared(key_at, n),
        (1, 2, 5, 0.5, 0.25),
    ),
    "Mask that compares with a size": (
        lambda q, n: qkv.attention(
            q, q, q, qkv.Mask(lambda b, h, i, j: (j == q.new_zeros(n).shape[0]) | (i != j))
        ),
        lambda n: where((key_at == n) | (query_at != key_at)),
        (1, 2, 5),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.one_in(4)
def test_every_value_is_part_of_one_graph(name: str) -> None:
    function, right, numbers = NUMBERS[name]
    torch.compiler.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    for number in numbers:
        assert_close(compiled(QUERY, number), by_hand(QUERY, right(number)))


def test_functions_are_called_uncompiled_where_comparisons_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A torch whose tables of comparisons have other names is such a case."""
    from qkv.bridges.torch import score_mods

    lets = torch.compiler.assume_constant_result(lambda kind: False)
    monkeypatch.setattr(score_mods, "let_compare", lets)
    function, right, numbers = NUMBERS["comparisons of positions"]
    torch.compiler.reset()
    compiled = torch.compile(function, backend="eager")
    for number in numbers[:2]:
        assert_close(compiled(QUERY, number), by_hand(QUERY, right(number)))


@pytest.mark.slow
@pytest.mark.parametrize("made", [qkv.Dropout, lambda p, n: qkv.RandomBlocks(2, 1, seed=n)])
def test_seeds_are_part_of_one_graph(made: Callable[..., Any]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, n: qkv.attention(q, q, q, made(0.5, n)), backend="eager", fullgraph=True
    )
    array = QUERY.numpy()
    for number in (0, 1, 2, 5):
        right = qkv.attention(array, array, array, made(0.5, number))
        assert_close(compiled(QUERY, number).numpy(), right)


# A table and NumPy's functions: a graph cannot have it, and each call makes it anew.
WITH_NUMPY: Function = lambda q, n: qkv.attention(  # noqa: E731 - as its like in a table
    q, q, q, qkv.ScoreMod(lambda s, b, h, i, j: s + TABLE[np.clip(j, 0, 63)] * n)
)
BEYOND = {
    **{name: NUMBERS[name][:2] for name in NUMBERS if name != "Softcap"},
    "Softcap": (
        lambda q, n: NUMBERS["Softcap"][0](q, n + 1.0),
        lambda n: NUMBERS["Softcap"][1](n + 1.0),
    ),
    "NumPy": (WITH_NUMPY, lambda n: lambda scores: scores + TABLE[:9] * n),
}


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", BEYOND)
@pytest.mark.one_in(4)
@torch._dynamo.config.patch(recompile_limit=2)  # It is 8.
def test_beyond_the_limit_of_graphs_calls_run_uncompiled(name: str, learns: bool) -> None:
    """Calls once ended with an error inside of the library, and so did unrelated calls later."""
    function, right = BEYOND[name]
    torch.compiler.reset()
    query = QUERY.clone().requires_grad_(learns)
    compiled = torch.compile(function, backend="eager")
    unrelated = torch.compile(lambda q: qkv.attention(q, q, q, qkv.Prefix(4)), backend="eager")
    for number in (*range(4), 3, 0):
        found, expected = compiled(query, number), by_hand(query, right(number))
        assert_close(found, expected)
        if learns:
            gradients = [torch.autograd.grad(o.square().sum(), query) for o in (found, expected)]
            assert_close(*gradients)
        assert_close(unrelated(QUERY), by_hand(QUERY, where((key_at < 4) & (query_at >= 0))))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_positions_that_are_sizes(dynamic: bool | None) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k: qkv.attention(q, k, k, qkv.Causal(), q_offset=k.shape[-2] - 3),
        backend="eager",
        dynamic=dynamic,
    )
    query = QUERY[:, :, :2]
    for length in range(3, 16):
        key = QUERY.repeat(1, 1, 2, 1)[:, :, :length]
        allowed = torch.arange(2)[:, None] + length - 3 >= torch.arange(length)
        scores = (query @ key.mT * 8**-0.5).masked_fill(~allowed, -torch.inf)
        assert_close(compiled(query, key), scores.softmax(-1) @ key)


def test_a_call_outside_of_graphs_compiles_nothing_again() -> None:
    """What is inside of the call was compiled again for each new score mod."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda q: WITH_NUMPY(q, 1), backend="eager")
    frames = []
    for _ in range(4):
        compiled(QUERY)
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert frames[1] == frames[3]
