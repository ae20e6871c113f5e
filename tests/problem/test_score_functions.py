"""Functions of NumPy and torch in score mods: what they give, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import qkv

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = RNG.normal(size=(3, 2, 20, 8))
HEAD, Q_POS, KV_POS = np.arange(2)[:, None, None], np.arange(20)[:, None], np.arange(20)
WEIGHT = np.array([0.5, -1.5])
BITS = SimpleNamespace(of_heads=np.array([6, 3]))
INTEGERS = torch.tensor([4, 1])
Mod = Callable[..., Any]
jnp = pytest.importorskip("jax.numpy")


def expected(mod: Mod, library: Any = np.asarray, query: Any = QUERY) -> Any:
    """The formula with whole matrices, where the mod gets matrices of positions."""
    score = library(query @ KEY.swapaxes(-1, -2) / np.sqrt(8))
    positions = [
        library(np.broadcast_to(each, score.shape).copy()) for each in (HEAD, Q_POS, KV_POS)
    ]
    scores = np.asarray(mod(score, 0, *positions)).astype(np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ VALUE


def check(mod: Mod, library: Any = np.asarray, query: Any = QUERY) -> None:
    right = expected(mod, library, query)
    for as_array in (np.asarray, torch.from_numpy):
        operands = [as_array(array) for array in (query, KEY, VALUE)]
        for backend in ("cpu", "reference", *(["torch"] if as_array is torch.from_numpy else [])):
            out = np.asarray(qkv.attention(*operands, qkv.ScoreMod(mod), backend=backend))
            np.testing.assert_allclose(out, right, rtol=1e-6, atol=1e-6)


OF_NUMPY: dict[str, Mod] = {
    "clip by name": lambda s, b, h, i, j: s + np.clip(i - j, a_min=0, a_max=3),
    "clip by another name": lambda s, b, h, i, j: s + np.clip(i - j, min=-2, max=3),
    "clip above": lambda s, b, h, i, j: s + np.clip(i - j, None, a_max=3),
    "clip, a method": lambda s, b, h, i, j: s + (i - j).clip(min=0) + s.clip(-1, max=0.5),
    "clip to crossed bounds": lambda s, b, h, i, j: s + np.clip(i - j, 5, 3) + np.clip(s, i, j),
    "astype int": lambda s, b, h, i, j: s + ((i - j) / 3).astype(int),
    "astype int32": lambda s, b, h, i, j: s + (7 * s).astype(np.int32) % 3,
    "astype bool": lambda s, b, h, i, j: s + (i - j).astype(bool) * 2.0,
    "astype by name": lambda s, b, h, i, j: s + (i >= j).astype(dtype="int64") / 2,
    "astype float": lambda s, b, h, i, j: s + i.astype(np.float32) / 8,
    "an integer": lambda s, b, h, i, j: (i - j) // 4,
    "sign": lambda s, b, h, i, j: np.sign(s) + 2 * np.sign(i - j),
    "bits of an array": lambda s, b, h, i, j: s + (+BITS.of_heads ^ 1 << BITS.of_heads >> 2)[h],
    "a product of arrays": lambda s, b, h, i, j: s + (BITS.of_heads[:, None] @ WEIGHT[None])[h, 1],
}
OF_TORCH: dict[str, Mod] = {
    "clamp by name": lambda s, b, h, i, j: s + torch.clamp(i - j, min=0, max=3),
    "clamp to crossed bounds": lambda s, b, h, i, j: s + torch.clamp(i - j, 5, 3),
    "clamp_min": lambda s, b, h, i, j: s + (i - j).clamp_min(min=2) + s.clamp_max(max=0.5),
    "clip": lambda s, b, h, i, j: s + torch.clip(i - j, min=0, max=3),
    "to int32": lambda s, b, h, i, j: s + ((j - i) / 3).to(torch.int32),
    "to int64 by name": lambda s, b, h, i, j: s + (j / 3).to(dtype=torch.long, copy=True),
    "to bool": lambda s, b, h, i, j: s + 0.5 * (j - 3).to("cpu", torch.bool),
    "to float": lambda s, b, h, i, j: s + j.to(torch.float32) / 4,
    "to a device": lambda s, b, h, i, j: s + (j / 4).to("cpu"),
    "to the type of a table": lambda s, b, h, i, j: s + (j / 3).to(INTEGERS) + INTEGERS[h],
    "type_as a position": lambda s, b, h, i, j: s + (5 * s).type_as(i),
    "type_as a table": lambda s, b, h, i, j: s + (5 * s).type_as(INTEGERS) * INTEGERS[h],
    "int": lambda s, b, h, i, j: s + (j / 3).int() + (-j / 3).long(),
    "bool": lambda s, b, h, i, j: s + (i - j).bool().float(),
    "exclusive or": lambda s, b, h, i, j: s + ((i > j) ^ (j % 2 == 0)) * 2.0,
    "new_ones": lambda s, b, h, i, j: s + s.new_ones(()) * j + i.new_zeros((), dtype=torch.int8),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_NUMPY)
def test_functions_of_numpy(name: str) -> None:
    check(OF_NUMPY[name])


@pytest.mark.parametrize("name", OF_TORCH)
def test_functions_of_torch(name: str) -> None:
    check(OF_TORCH[name], torch.from_numpy)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OF_TORCH if "table" not in name])
def test_functions_of_torch_in_one_graph(name: str) -> None:
    mod = OF_TORCH[name]
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *arrays: qkv.attention(*arrays, qkv.ScoreMod(mod)), backend="eager", fullgraph=True
    )
    out = compiled(*map(torch.from_numpy, (QUERY, KEY, VALUE)))
    np.testing.assert_allclose(out, expected(mod, torch.from_numpy), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", [np.fmax, np.fmin, np.maximum, np.minimum])
def test_numbers_that_are_none_are_ignored_where_numpy_does(function: Any) -> None:
    query = QUERY.copy()
    query[0, 3, 0] = np.nan
    check(lambda s, b, h, i, j: function(s, 0.25), query=query)
    check(lambda s, b, h, i, j: function(0.25, s), query=query)
    check(lambda s, b, h, i, j: function(i, j) + 0.0 * s)


def test_the_sign_of_nan_is_that_of_the_library() -> None:
    query = QUERY.copy()
    query[0, 3, 0] = np.nan
    check(lambda s, b, h, i, j: np.sign(s), query=query)
    check(lambda s, b, h, i, j: torch.sign(s), torch.from_numpy, query)


def test_the_derivative_of_fmax() -> None:
    query = torch.from_numpy(QUERY).requires_grad_()
    out = qkv.attention(query, KEY, VALUE, qkv.ScoreMod(lambda s, b, h, i, j: np.fmax(s, -0.1)))
    (found,) = torch.autograd.grad(out.square().sum(), query)
    scores = torch.fmax(
        query @ torch.from_numpy(KEY).mT / 8**0.5, torch.tensor(-0.1, dtype=torch.float64)
    )
    right = (scores.softmax(-1) @ torch.from_numpy(VALUE)).square().sum()
    np.testing.assert_allclose(found, torch.autograd.grad(right, query)[0], rtol=1e-10, atol=1e-12)


REFUSED: dict[str, Mod] = {
    "out": lambda s, b, h, i, j: torch.sin(s, out=WEIGHT),
    "dtype": lambda s, b, h, i, j: np.clip(s, 0, 1, dtype=np.float32),
    "where": lambda s, b, h, i, j: np.add(s, 1.0, where=i > j),
    "a fourth argument of clip": lambda s, b, h, i, j: np.clip(s, 0, 1, WEIGHT),
    "alpha": lambda s, b, h, i, j: torch.rsub(s, 1.0, alpha=2),
    "decimals": lambda s, b, h, i, j: np.round(s, decimals=1),
    "one argument of where": lambda s, b, h, i, j: np.where(i > j),
    "two arguments of exp": lambda s, b, h, i, j: s.exp(2),
    "in place": lambda s, b, h, i, j: torch.exp_(s),
    "relu in place": lambda s, b, h, i, j: torch.nn.functional.relu(s, inplace=True),
    "8 bits": lambda s, b, h, i, j: s + j.to(torch.int8),
    "no sign": lambda s, b, h, i, j: s + (i - j).astype(np.uint32),
    "complex": lambda s, b, h, i, j: s.astype(complex),
    "an infinite power": lambda s, b, h, i, j: s ** float("inf"),
    "a power of infinity": lambda s, b, h, i, j: float("inf") ** j,
    "new_zeros of a size": lambda s, b, h, i, j: s.new_zeros(3),
    "new_zeros of sizes": lambda s, b, h, i, j: s.new_zeros(2, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_taken_is_an_error(name: str) -> None:
    for as_array in (np.asarray, torch.from_numpy, jnp.asarray):
        operands = [as_array(array) for array in (QUERY, KEY, VALUE)]
        with pytest.raises(qkv.ArgumentError):
            qkv.attention(*operands, qkv.ScoreMod(REFUSED[name]))


# Elementary functions


def each_alone(function: Callable[[Any], Any], count: int, offset: int, dtype: Any, backend: str):
    """The function of each of so many positions, as the lse of a query that sees one key."""
    rows = np.zeros((1, count, 1), dtype)
    mod = qkv.ScoreMod(lambda s, b, h, i, j: s + function(i))
    alone = qkv.SlidingWindow(0, 0)
    where = {"q_offset": offset, "kv_offset": offset}
    return qkv.attention(
        rows, rows, rows, mod, alone, backend=backend, return_lse=True, **where
    )[1][0]  # fmt: skip


POWERS: dict[str, tuple[Callable[[Any], Any], Callable[[int], float]]] = {
    "log2": (lambda i: np.floor(np.log2(i)), lambda i: i.bit_length() - 1),
    "log10": (lambda i: np.floor(np.log10(i)), lambda i: len(str(i)) - 1),
    "2 ** i": (lambda i: 2 ** (i % 64), lambda i: 2.0 ** (i % 64)),
    "0.5 ** i": (lambda i: 0.5 ** (i % 64), lambda i: 2.0 ** -(i % 64)),
    "3 ** i": (lambda i: 3 ** (i % 10), lambda i: 3.0 ** (i % 10)),
    "exp2": (lambda i: np.exp2(5 - i % 20), lambda i: 2.0 ** (5 - i % 20)),
    "power": (lambda i: np.power(10.0, i % 8), lambda i: 10.0 ** (i % 8)),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.sampled(
    ("name", "dtype"), [(n, t) for n in POWERS for t in (np.float32, np.float64)], one_in=2
)
def test_powers_of_whole_numbers_are_exact(name, dtype, backend) -> None:
    """floor(log2(8)) was 2, and 2 ** 3 less than 8."""
    function, exact = POWERS[name]
    found = each_alone(function, 1100, 1, dtype, backend)
    np.testing.assert_array_equal(found, [exact(i) for i in range(1, 1101)])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_windows_that_double_from_head_to_head(backend) -> None:
    query = RNG.normal(size=(6, 40, 4))
    mask = qkv.Mask(lambda b, h, i, j: abs(i - j) <= 2**h)
    distance = abs(np.arange(40)[:, None] - np.arange(40))
    right = qkv.attention(query, query, query, distance <= 2 ** np.arange(6)[:, None, None])
    found = qkv.attention(query, query, query, mask, backend=backend)
    np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("function", [np.sin, np.cos])
def test_angles_of_far_positions(function, backend) -> None:
    """The error in float32 was once 3e-4 at 12,000 and 4e-3 at 100,000."""
    for offset in (0, 12_000, 100_000, 800_000):
        found = each_alone(function, 100, offset, np.float32, backend)
        exact = function(np.arange(offset, offset + 100).astype(np.float64))
        np.testing.assert_allclose(found, exact, rtol=0, atol=2e-7)


OF_SCORES: dict[str, Mod] = {
    "sigmoid": lambda s, b, h, i, j: 8.0 * torch.sigmoid(s),
    "log of sigmoid": lambda s, b, h, i, j: torch.log(torch.sigmoid(12.0 * s)),
    "log1p": lambda s, b, h, i, j: 1e5 * torch.log1p(1e-5 * s) + torch.log1p(s * s),
    "expm1": lambda s, b, h, i, j: 1e5 * torch.expm1(1e-5 * s) - torch.expm1(-s),
    "sin": lambda s, b, h, i, j: torch.sin(20.0 * s) + torch.cos(20.0 * s),
    "logarithms": lambda s, b, h, i, j: torch.log2(1.0 + s * s) + torch.log10(2.0 + s),
}


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.sampled("name", list(OF_SCORES), one_in=2)
def test_elementary_functions_of_scores(name, backend) -> None:
    """Values in float32 and derivatives in float64 are right, also of scores of exactly 0."""
    mod, query = OF_SCORES[name], np.clip(QUERY, -1, 1)
    query[:, ::3] = 0
    as_tensors = [torch.tensor(array, requires_grad=True) for array in (query, KEY, VALUE)]
    scores = mod(as_tensors[0] @ as_tensors[1].mT / 8**0.5, 0, 0, 0, 0)
    right = torch.softmax(scores, -1) @ as_tensors[2]
    narrow = [array.astype(np.float32) for array in (query, KEY, VALUE)]
    found = qkv.attention(*narrow, qkv.ScoreMod(mod), backend=backend)
    np.testing.assert_allclose(found, right.detach(), rtol=2e-5, atol=2e-5)
    out, pullback = qkv.vjp(query, KEY, VALUE, qkv.ScoreMod(mod), backend=backend)
    np.testing.assert_allclose(out, right.detach(), rtol=1e-12, atol=1e-12)
    exact = torch.autograd.grad(right.sum(), as_tensors)
    gradients = pullback(np.ones_like(out))
    for ours, theirs in zip((gradients.query, gradients.key, gradients.value), exact, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


MASKS: dict[str, Mod] = {
    "remainders": lambda b, h, i, j: (7 * j + i) % 2**32 % 3 == 0,
    "quotients": lambda b, h, i, j: (j - i) // 2**33 < h,
    "a hash": lambda b, h, i, j: (j * 2654435761 + i * 40503) % 2**32 < 2**31,
    "the smaller": lambda b, h, i, j: np.minimum(5 * j, 2**40) % 7 <= i,
    "comparisons": lambda b, h, i, j: (np.where(j % 3 == 0, j, -1) < 2**32) & (i >= j),
    "the top bits of a hash": lambda b, h, i, j: (j * 6364136223846793005 + i) // 2**60 < 2,
    "roundings of integers": lambda b, h, i, j: np.floor(2**60 + i) >= np.ceil(2**60 + 2 * j - 9),
    "beyond 64 bits": lambda b, h, i, j: (i >= j) & (j < 10.0**30) & (j > -(10.0**30)),
}


@pytest.mark.parametrize("backend", ["cpu", "blocked", "torch"])
@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize("name", MASKS)
def test_integers_of_more_than_32_bits(name, q_len, backend) -> None:
    """Small results of them were computed with the lower half of each constant."""
    with np.errstate(over="ignore"):
        allowed = np.broadcast_to(MASKS[name](0, HEAD, Q_POS[:q_len], KV_POS), (2, q_len, 20))
    operands = [QUERY[:, :q_len], KEY, VALUE]
    right = qkv.attention(*operands, allowed)
    if backend == "torch":
        operands = [torch.from_numpy(array) for array in operands]
    found = qkv.attention(*operands, qkv.Mask(MASKS[name]), q_offset=0, backend=backend)
    np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpu", "blocked", "torch"])
@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_arithmetic_of_narrow_integers_does_not_wrap_around(name, backend) -> None:
    largest = int(np.iinfo(name).max)
    numbers = [largest - n for n in range(20)]
    table, wide, within = np.array(numbers, name), np.array(numbers), np.arange(20, dtype=name)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (table[i] * 3 > largest) & (table[i] - table[j] - 3 < table[within[j]] * 0)

    allowed = wide[:, None] - wide - 3 < 0
    right = qkv.attention(QUERY, KEY, VALUE, allowed)
    as_array = torch.from_numpy if backend == "torch" else np.asarray
    operands = [as_array(array) for array in (QUERY, KEY, VALUE)]
    found = qkv.attention(*operands, qkv.Mask(mask), backend=backend)
    np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12)


BEYOND: dict[str, tuple[int, Callable[[Any], Mod]]] = {
    "where": (-(10**30), lambda n: lambda s, b, h, i, j: np.where(i >= j, s, n)),
    "a product": (10**30, lambda n: lambda s, b, h, i, j: s - n * (j > i)),
    "a quotient": (2**70, lambda n: lambda s, b, h, i, j: s + j / n * 2.0**69),
    "a bound": (-(2**63) - 1, lambda n: lambda s, b, h, i, j: np.maximum(s, n)),
    "a comparison": (10**25, lambda n: lambda s, b, h, i, j: np.where((s < n) & (j < n), s, 0.0)),
}


@pytest.mark.parametrize("backend", ["cpu", "blocked", "torch"])
@pytest.mark.parametrize("name", BEYOND)
def test_whole_numbers_beyond_64_bits_are_floating_ones(name, backend) -> None:
    number, mod = BEYOND[name]
    right = expected(mod(float(number)))
    operands = [torch.from_numpy(array) for array in (QUERY, KEY, VALUE)]
    found = qkv.attention(*operands, qkv.ScoreMod(mod(number)), backend=backend)
    np.testing.assert_allclose(found, right, rtol=1e-12, atol=1e-12)


def test_whole_numbers_beyond_float64_are_refused() -> None:
    with pytest.raises(qkv.ArgumentError, match="1329 bits is beyond the range of float64"):
        qkv.attention(QUERY, KEY, VALUE, qkv.ScoreMod(lambda s, *_: s + 10**400))


def test_an_array_is_gone_through_to_its_end() -> None:
    """Python counts on while there is an entry, and NumPy goes through what it converts."""
    program = """
import numpy as np, qkv
x = np.random.default_rng(0).normal(size=(2, 3, 4))
weights = np.arange(6.0).reshape(2, 3)

def of_rows(score, batch, head, q_pos, kv_pos):
    first, second = weights
    return score + sum(list(first)) * sum(row[kv_pos] for row in weights) + second[q_pos]

out = qkv.attention(x, x, x, qkv.ScoreMod(of_rows))
added = 3 * weights.sum(0) + weights[1][:, None]
assert np.abs(out - qkv.attention(x, x, x, qkv.Bias(added))).max() < 1e-12
row = weights[0]
try:
    qkv.attention(x, x, x, qkv.ScoreMod(lambda s, b, h, i, j: s + np.asarray(row)[j]))
except qkv.ArgumentError as error:
    print(error)
"""
    run = [sys.executable, "-c", program]
    ran = subprocess.run(run, capture_output=True, text=True, timeout=180, check=True)
    assert "was not found among what the function captures" in ran.stdout
