"""Prepared calls and records that are copied or pickled compute the same."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qkv

pytestmark = pytest.mark.usefixtures("no_prepared_calls")

WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def definition(query: Any, key: Any, value: Any, allowed: Any = True, bias: Any = 0.0) -> Any:
    """The definition in float64."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1]) + bias
    weights = np.exp(np.where(allowed, scores, -np.inf))
    return weights / weights.sum(-1, keepdims=True) @ value


def near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("arrays", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("way", WAYS)
def test_the_copy_computes_the_same_call(way: str, arrays: Any, watched: Any) -> None:
    bias = normal(20, 20, seed=9)
    query, key, value = (normal(2, 20, 4, 8, seed=i) for i in range(3))
    given = list(map(arrays, (query, key, value)))
    made = qkv.prepare(*given, qkv.Causal(), qkv.Bias(arrays(bias)), layout="blhd")
    again = WAYS[way](made)
    assert again.form == made.form
    assert repr(again) == repr(made)
    others = [normal(2, 20, 4, 8, seed=i + 5) for i in range(3)]
    computed = watched.computed
    found = again(*map(arrays, others))
    assert watched.computed == computed, "it was checked, and not prepared"
    first = [a.swapaxes(1, 2) for a in others]
    near(np.asarray(found).swapaxes(1, 2), definition(*first, np.tri(20, dtype=bool), bias))
    with pytest.raises(qkv.ShapeError, match="prepared for"):
        again(given[0][:, :9], *given[1:])


@pytest.mark.parametrize("way", WAYS)
def test_strides_and_a_free_number_of_keys(way: str) -> None:
    rows = normal(2, 4, 60, 8)[..., ::-1]
    query, key = normal(2, 4, 1, 8, seed=1), rows[:, :, ::-2]
    fixed = WAYS[way](qkv.prepare(query, key, np.broadcast_to(key[:, :1], key.shape)))
    assert fixed.form.key.strides == tuple(s // 4 for s in key.strides)
    near(fixed(query, key, np.broadcast_to(key[:, :1], key.shape)),
         definition(query, key, np.broadcast_to(key[:, :1], key.shape)))  # fmt: skip
    step = qkv.prepare(query, key, key, qkv.Causal(), free=("kv_len",), q_offset=3)
    step = WAYS[way](step)
    assert step.form.key.shape == (2, 4, None, 8)
    near(step(query, rows, rows, q_offset=40), definition(query, rows, rows, np.arange(60) <= 40))


@pytest.mark.parametrize("way", WAYS)
def test_gradients_and_bfloat16(way: str) -> None:
    given = [torch.from_numpy(normal(1, 2, 9, 8, seed=i)).requires_grad_() for i in range(3)]
    again = WAYS[way](qkv.prepare(*given, qkv.Causal(), backward=True))
    theirs = torch.nn.functional.scaled_dot_product_attention
    found = torch.autograd.grad(again(*given).square().sum(), given)
    expected = torch.autograd.grad(theirs(*given, is_causal=True).square().sum(), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    narrow = [tensor.detach().bfloat16() for tensor in given]
    again = WAYS[way](qkv.prepare(*narrow))
    assert again.form.query.dtype == "bfloat16"
    torch.testing.assert_close(again(*narrow), theirs(*narrow), atol=2e-2, rtol=2e-2)


@dataclass
class Held:
    call: Any


def test_what_holds_one_can_be_copied() -> None:
    x = torch.from_numpy(normal(1, 2, 9, 8))
    module = torch.nn.Module()
    module.bias = torch.nn.Parameter(torch.zeros(9, 9), requires_grad=False)
    module.call = qkv.prepare(x, x, x, qkv.Bias(module.bias))
    other = copy.deepcopy(module)
    other.bias += torch.from_numpy(normal(9, 9, seed=3))
    near(other.call(x, x, x), definition(x, x, x, bias=other.bias.numpy()))
    near(module.call(x, x, x), definition(x, x, x))
    held = copy.deepcopy(Held(qkv.prepare(x, x, x, qkv.Mask(lambda b, h, i, j: i >= j))))
    near(held.call(x, x, x), definition(x, x, x, np.tri(9, dtype=bool)))


def test_another_process_reads_it(tmp_path: Path) -> None:
    x = normal(1, 2, 9, 8)
    made = qkv.prepare(x, x, x, qkv.SlidingWindow(3, 0), scale=0.5)
    (tmp_path / "call").write_bytes(pickle.dumps(made))
    np.save(tmp_path / "x.npy", x)
    program = (
        "import pickle, sys, numpy as np; x = np.load(sys.argv[2]); "
        "np.save(sys.argv[2], pickle.load(open(sys.argv[1], 'rb'))(x, x, x))"
    )
    paths = [str(tmp_path / name) for name in ("call", "x.npy")]
    subprocess.run([sys.executable, "-c", program, *paths], check=True, timeout=120)
    np.testing.assert_array_equal(np.load(paths[1]), made(x, x, x))


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_record_is_copied_whether_its_call_was_prepared_or_not(way: str, times: int) -> None:
    x = normal(2, 9, 8)
    for _ in range(times):
        record = qkv.inspect(x, x, x, qkv.Causal())
    again = WAYS[way](record)
    allowed = np.tri(9, dtype=bool)
    near(again.weights[...] @ x, definition(x, x, x, allowed))
    np.testing.assert_array_equal(again.entropy, record.entropy)
    np.testing.assert_array_equal(again.received, record.received)
