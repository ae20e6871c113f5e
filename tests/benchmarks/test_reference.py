"""The benchmark's own truth against torch in float64; and that it tells right from wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.problems import rules
from benchmarks.problems.reference import Inputs, Quantised, judge, make_inputs
from benchmarks.problems.rules import Rule
from benchmarks.problems.workloads import Workload, choose, workloads
from qkv.errors import ArgumentError
from qkv.problem.building.builder import Shape

SHAPE = Shape((2,), 4, 2, 40, 40, 8, 8)

RULES = {
    "all": rules.everything(),
    "causal": rules.causal(),
    "window": rules.window(5),
    "alibi": rules.alibi_causal(4),
    "lengths": rules.key_lengths((40, 13)),
    "segments": rules.segments((10, 25, 5)),
}


def workload(rule: Rule, **changes: Any) -> Workload:
    return Workload(**{
        "name": "test", "shape": SHAPE, "rule": rule, "dtype": "float32", "ceiling": "float32",
        "contenders": ("qkv",), **changes,
    })  # fmt: skip


def by_torch(inputs: Inputs, name: str) -> dict[str, np.ndarray]:
    """Each rule written down once more, as torch says it."""
    leaves = [
        torch.from_numpy(np.asarray(a, np.float64)).requires_grad_()
        for a in (inputs.query, inputs.key, inputs.value)
    ]
    i, j = torch.arange(40)[:, None], torch.arange(40)[None, :]
    group = torch.repeat_interleave(torch.arange(3), torch.tensor([10, 25, 5]))
    mask: Any = {
        "all": None,
        "causal": i >= j,
        "window": (i >= j) & (i - j < 5),
        "alibi": torch.where(
            i >= j,
            -torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])[:, None, None] * (i - j),
            -torch.inf,
        ).double(),
        "lengths": (torch.tensor([40, 13])[:, None, None, None] > j),
        "segments": group[:, None] == group[None, :],
    }[name]
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=mask, enable_gqa=leaves[0].shape[1] != leaves[1].shape[1]
    )
    found = {"out": out.detach().numpy()}
    if inputs.grad_out is not None:
        grads = torch.autograd.grad(out, leaves, torch.from_numpy(inputs.grad_out).double())
        found |= dict(zip(("query", "key", "value"), (g.numpy() for g in grads), strict=True))
    return found


@pytest.mark.parametrize("name", RULES)
def test_the_truth_is_that_of_torch(name: str) -> None:
    asked = workload(RULES[name], dtype="float64")
    inputs = make_inputs(asked)
    verdict = judge(asked, inputs, by_torch(inputs, name))
    assert verdict.right, verdict


@pytest.mark.parametrize("name", ["all", "causal"])
def test_gradients_are_those_of_torch(name: str) -> None:
    shape = replace(SHAPE, num_kv_heads=4)
    asked = workload(RULES[name], dtype="float64", shape=shape, direction="both")
    inputs = make_inputs(asked)
    found = by_torch(inputs, name)
    assert judge(asked, inputs, found).right
    for output in ("out", "query", "key", "value"):
        off = {**found, output: found[output] * 1.0001}
        verdict = judge(asked, inputs, off)
        assert not verdict.right
        assert verdict.output == output


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("other", RULES)
def test_another_rule_is_wrong_and_the_same_is_right(name: str, other: str, dtype: str) -> None:
    asked = workload(RULES[name], dtype=dtype)
    inputs = make_inputs(asked)
    assert judge(asked, inputs, by_torch(inputs, other)).right == (name == other)


MISTAKES: dict[str, Callable[[Inputs], Inputs]] = {
    "scale": lambda i: replace(i, query=i.query * np.float32(1.01)),
    "one key": lambda i: replace(i, key=np.roll(i.key, 1, axis=-2)),
    "heads in another order": lambda i: replace(i, key=i.key[:, ::-1]),
    "bfloat16": lambda i: replace(i, query=_bfloat16(i.query), key=_bfloat16(i.key)),
}


def _bfloat16(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).bfloat16().float().numpy()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    asked = workload(RULES["all"])
    inputs = make_inputs(asked)
    assert not judge(asked, inputs, by_torch(MISTAKES[mistake](inputs), "all")).right


def test_nan_is_wrong() -> None:
    asked = workload(RULES["all"])
    inputs = make_inputs(asked)
    found = by_torch(inputs, "all")
    found["out"][0, 0, 0, 0] = np.nan
    assert not judge(asked, inputs, found).right


def test_quantised_rows_are_near_what_they_were() -> None:
    array = np.random.default_rng(0).normal(size=(3, 5, 16)).astype(np.float32)
    stored = Quantised.of(array)
    assert stored.values.dtype == np.int8
    step = np.abs(array).max(axis=-1, keepdims=True) / 127
    assert (np.abs(stored.restored() - array) <= step * 0.5001).all()


def test_the_same_workload_has_the_same_inputs() -> None:
    asked = next(w for w in workloads() if w.name == "short-16")
    first, second = make_inputs(asked), make_inputs(asked)
    np.testing.assert_array_equal(first.query, second.query)
    np.testing.assert_array_equal(first.value, second.value)


# --- the table -----------------------------------------------------------------------------------


def test_pairs_are_those_that_are_allowed() -> None:
    counts = {name: workload(rule).pairs // SHAPE.num_heads for name, rule in RULES.items()}
    triangle = 40 * 41 // 2
    assert counts == {
        "all": 2 * 40 * 40,
        "causal": 2 * triangle,
        "window": 2 * (40 * 5 - 10),
        "alibi": 2 * triangle,
        "lengths": 40 * (40 + 13),
        "segments": 2 * (10**2 + 25**2 + 5**2),
    }


def test_work_is_two_products_forward_and_seven_with_the_way_back() -> None:
    forward = workload(RULES["all"])
    assert forward.work == 4 * 8 * 2 * 4 * 40 * 40
    assert workload(RULES["all"], direction="both").work == 14 * 8 * 2 * 4 * 40 * 40
    assert workload(RULES["all"], ceiling="read").work == 2 * 2 * 2 * 40 * 8 * 4
    assert workload(RULES["all"], ceiling="read", dtype="int8").work == 2 * 2 * 2 * 40 * (8 + 4)


def test_names_choose_workloads_by_name_or_beginning() -> None:
    assert [w.name for w in choose(["short-16"])] == ["short-16"]
    assert [w.name for w in choose(["fp32-1024-d64"])] == ["fp32-1024-d64"]
    lengths = (1, 16, 64, 128)
    assert [w.name for w in choose(["short"])] == [f"short-{n}" for n in lengths]
    assert choose([]) == workloads()
    assert 0 < len(choose([], quick=True)) < 5
    with pytest.raises(ArgumentError, match="no workload 'shrt'"):
        choose(["shrt"])
