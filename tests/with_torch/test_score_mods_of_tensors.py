"""Score mods as users of FlexAttention write them: torch's functions, tensors from anywhere."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import qkv
import qkv.torch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

GENERATOR = torch.Generator().manual_seed(0)
QUERY, KEY, VALUE = (
    torch.randn(2, 2, 9, 8, generator=GENERATOR, dtype=torch.float64) for _ in range(3)
)
BATCH, HEAD = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
Q_POS, KV_POS = torch.arange(9)[:, None], torch.arange(9)


def written_out(mod: Any, query: torch.Tensor, dtype: Any = torch.int64) -> torch.Tensor:
    """torch's formula with whole matrices, where the mod gets matrices of positions."""
    scores = mod(query @ KEY.mT * 8**-0.5, BATCH, HEAD, Q_POS.to(dtype), KV_POS.to(dtype))
    return scores.softmax(-1) @ VALUE


def zero() -> torch.Tensor:
    return torch.tensor(0.0, dtype=torch.float64)


FUNCTIONS = {
    "where": lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf),
    "power": lambda s, b, h, i, j: s - 0.125 * (i - j) ** 2,
    "real power": lambda s, b, h, i, j: s + (0.5 + (i + j) * 0.25) ** 1.5,
    "power of a number": lambda s, b, h, i, j: s * 0.5 ** abs(i - j),
    "exp2": lambda s, b, h, i, j: s * torch.exp2(-0.25 * torch.abs(i - j)),
    "sin": lambda s, b, h, i, j: s + torch.sin(3.0 * s) + torch.sin(40.0 * s),
    "cos": lambda s, b, h, i, j: s * torch.cos(2.0 * s),
    "sigmoid": lambda s, b, h, i, j: s * torch.sigmoid(s),
    "maximum": lambda s, b, h, i, j: torch.maximum(s, zero()) + torch.minimum(s, zero()) / 4,
    "clamp": lambda s, b, h, i, j: torch.clamp(s, -0.5, 0.5) + s.clamp(min=0.1),
    "methods": lambda s, b, h, i, j: s.tanh() + s.abs() + s.exp().log(),
    "logarithms": lambda s, b, h, i, j: torch.log2(2 + s * s) + torch.log1p(s * s),
    "signs": lambda s, b, h, i, j: s + torch.sign(s) + torch.relu(s),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.one_in(4)
def test_functions_of_torch(name: str) -> None:
    mod = FUNCTIONS[name]
    found = []
    for function in (
        lambda q: qkv.attention(q, KEY, VALUE, qkv.ScoreMod(mod)),
        # torch computes with integers and Python's numbers in float32.
        partial(written_out, mod, dtype=torch.float64),
    ):
        query = QUERY.clone().requires_grad_()
        out = function(query)
        found.append((out, torch.autograd.grad(out.square().sum(), query)[0]))
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=1e-10, atol=1e-10)


class Module(torch.nn.Module):
    """Holds a weight for each head, a bias for each key, and both as arrays of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 1.5], dtype=torch.float64))
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, 18).reshape(2, 9).double())
        self.register_buffer("bias", torch.linspace(0, 2, 9).double())

    def mod(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.weight[h] + self.bias[j]


MODULE = Module()
WEIGHT = MODULE.weight


class Called:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.weight[h]


def closure(weight: torch.Tensor) -> Any:
    return lambda s, b, h, i, j: s * weight[h]


def with_default(s: Any, b: Any, h: Any, i: Any, j: Any, weight: Any = WEIGHT) -> Any:
    return s * weight[h]


def last(weight: Any, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * weight[h]


CAPTURES = {
    "closure": closure(WEIGHT),
    "default": with_default,
    "global": lambda s, b, h, i, j: s * WEIGHT[h],
    "parameter": lambda s, b, h, i, j: s * MODULE.weight[h],
    "buffer": lambda s, b, h, i, j: s * MODULE.weight[h] + MODULE.bias[j],
    "method": MODULE.mod,
    "partial": partial(last, WEIGHT),
    "called object": Called(WEIGHT),
    "entry of a list": lambda s, b, h, i, j: s * [WEIGHT][0][h],
    "function of it": lambda s, b, h, i, j: s * torch.exp(MODULE.weight)[h],
    "method of it": lambda s, b, h, i, j: s * MODULE.weight.exp()[h],
    "one entry": lambda s, b, h, i, j: s * MODULE.weight[0],
    "chained": lambda s, b, h, i, j: s * MODULE.weight[h] + MODULE.table[h][j],
}


# With matrices of heads, a second index would count what the first one has made.
WRITTEN_OUT = {"chained": lambda s, b, h, i, j: s * MODULE.weight[h] + MODULE.table[h, j]}


def gradients(function: Any) -> list[torch.Tensor]:
    MODULE.zero_grad()
    out = function(QUERY)
    out.square().sum().backward()
    assert MODULE.weight.grad is not None
    return [out.detach(), MODULE.weight.grad.clone()]


@pytest.mark.parametrize("name", CAPTURES)
@pytest.mark.one_in(4)
def test_tensors_are_found_and_learned(name: str) -> None:
    mod = CAPTURES[name]
    right = gradients(partial(written_out, WRITTEN_OUT.get(name, mod)))
    found = gradients(lambda q: qkv.attention(q, KEY, VALUE, qkv.ScoreMod(mod)))
    for one, other in zip(found, right, strict=True):
        assert_close(one, other)


# Dynamo looks at `grad` of the tensors that it finds where its graph breaks.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.sampled("name", list(CAPTURES), one_in=4)
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_tensors_are_learned_in_compiled_functions(name: str, place: str) -> None:
    mod = CAPTURES[name]
    made = qkv.ScoreMod(mod)
    functions = {
        "inside": lambda q: qkv.attention(q, KEY, VALUE, qkv.ScoreMod(mod)),
        "outside": lambda q: qkv.attention(q, KEY, VALUE, made),
    }
    torch.compiler.reset()
    found = gradients(torch.compile(functions[place], backend="eager"))
    right = gradients(partial(written_out, WRITTEN_OUT.get(name, mod)))
    for one, other in zip(found, right, strict=True):
        assert_close(one, other)


@pytest.mark.slow
@pytest.mark.sampled("name", list(CAPTURES), one_in=4)
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_tensors_are_learned_in_one_graph(name: str, place: str) -> None:
    mod = CAPTURES[name]
    made = qkv.ScoreMod(mod)
    functions = {
        "inside": lambda q: qkv.attention(q, KEY, VALUE, qkv.ScoreMod(mod)),
        "outside": lambda q: qkv.attention(q, KEY, VALUE, made),
    }
    torch.compiler.reset()
    found = gradients(torch.compile(functions[place], backend="aot_eager", fullgraph=True))
    right = gradients(partial(written_out, WRITTEN_OUT.get(name, mod)))
    for one, other in zip(found, right, strict=True):
        assert_close(one, other)


def in_one_graph(mod: Any, query: torch.Tensor = QUERY) -> torch.Tensor:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: qkv.attention(q, KEY, VALUE, qkv.ScoreMod(mod)), backend="eager", fullgraph=True
    )
    found: torch.Tensor = compiled(query)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.one_in(4)
def test_functions_of_torch_in_one_graph(name: str) -> None:
    mod = FUNCTIONS[name]
    right = written_out(mod, QUERY, dtype=torch.float64)
    assert_close(in_one_graph(mod), right, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_indices_of_positions_and_constants_in_one_graph() -> None:
    bias = torch.linspace(-1, 1, 4 * 81 * 2, dtype=torch.float64).reshape(2, 2, 9, 9, 2)
    array = np.linspace(0.0, 1.0, 2)

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        same = (i == i) & (i - j == i - j)
        return torch.where(same, s + bias[b, h, i, j, -1], 0.0) * array[h] - bias[0][h][i, 0, 0]

    def right(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        heads = torch.from_numpy(array)[:, None, None]
        return (s + bias[..., -1]) * heads - bias[0, :, :, 0, 0, None]

    assert_close(in_one_graph(mod), written_out(right, QUERY))


@pytest.mark.slow
def test_sizes_that_change_are_part_of_one_graph() -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: qkv.attention(
            q, KEY, VALUE, qkv.ScoreMod(lambda s, b, h, i, j: s + i / q.shape[-2])
        ),
        backend="eager",
        fullgraph=True,
        dynamic=True,
    )
    for length in (9, 5, 7):
        query = QUERY[:, :, :length]
        slope = torch.arange(length)[:, None].double() / length
        right = ((query @ KEY.mT * 8**-0.5) + slope).softmax(-1) @ VALUE
        assert_close(compiled(query), right)


def test_a_tensor_that_is_replaced_is_seen() -> None:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([0.5, 1.5], dtype=torch.float64))

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            mod = qkv.ScoreMod(lambda s, b, h, i, j: s * self.weight[h])
            return qkv.attention(q, KEY, VALUE, mod)

    holder = Holder()
    torch.compiler.reset()
    compiled = torch.compile(holder, backend="eager", fullgraph=True)
    for value in (None, [2.0, -1.0], [0.0, 3.0]):
        if value is not None:
            holder.weight = torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))
        right = written_out(lambda s, b, h, i, j: s * holder.weight[h], QUERY)
        assert_close(compiled(QUERY), right)
        with torch.no_grad():
            holder.weight += 1.0
        right = written_out(lambda s, b, h, i, j: s * holder.weight[h], QUERY)
        assert_close(compiled(QUERY), right)


REFUSED = {
    "branch": (lambda s, b, h, i, j: s if i > j else -s, "write torch.where"),
    "whole tensor": (lambda s, b, h, i, j: s * WEIGHT, r"as in w\[head\]"),
    "NumPy": (lambda s, b, h, i, j: np.where(i >= j, s * WEIGHT[h], -np.inf), "as torch.where"),
    "no such function": (lambda s, b, h, i, j: torch.erf(s * WEIGHT[h]), "erf is not part"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_function_of_scores_is_refused_in_one_graph(name: str) -> None:
    mod, words = REFUSED[name]
    with pytest.raises(Exception, match=words):
        in_one_graph(mod)


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_masks_that_are_functions_are_part_of_a_graph(fullgraph: bool) -> None:
    document = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    outside = qkv.Mask(lambda b, h, i, j: document[i] == document[j])
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: qkv.attention(
            q, KEY, VALUE, outside & qkv.Causal(), qkv.Mask(lambda b, h, i, j: i - j < 2)
        ),
        backend="eager",
        fullgraph=fullgraph,
    )
    allowed = (document[:, None] == document) & (Q_POS >= KV_POS) & (Q_POS - KV_POS < 2)
    right = torch.nn.functional.scaled_dot_product_attention(QUERY, KEY, VALUE, attn_mask=allowed)
    assert_close(compiled(QUERY), right)


def test_masks_that_are_functions() -> None:
    document = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    mask = qkv.Mask(lambda b, h, i, j: (document[i] == document[j]) & (i >= j))
    allowed = (document[:, None] == document) & (Q_POS >= KV_POS)
    right = torch.nn.functional.scaled_dot_product_attention(QUERY, KEY, VALUE, attn_mask=allowed)
    assert_close(qkv.attention(QUERY, KEY, VALUE, mask), right)
    arrays = [t.numpy() for t in (QUERY, KEY, VALUE)]
    np.testing.assert_allclose(qkv.attention(*arrays, mask), right.numpy())


def test_what_is_no_function_of_scores_says_what_is() -> None:
    mod = qkv.ScoreMod(lambda s, b, h, i, j: torch.softmax(s, -1))
    with pytest.raises(qkv.ArgumentError, match=r"softmax is not part(.|\n)*sigmoid"):
        qkv.attention(QUERY, KEY, VALUE, mod)


class Exported(torch.nn.Module):
    def __init__(self, mod: Any) -> None:
        super().__init__()
        self.variant = mod
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 1.5], dtype=torch.float64))

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        variant = self.variant or qkv.ScoreMod(lambda s, b, h, i, j: s * self.weight[h])
        return qkv.attention(q, q.cos(), q.sin(), variant)


NEAR = qkv.ScoreMod(lambda s, b, h, i, j: s - 0.5 * abs(i - j))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mod", "strict"),
    [(NEAR, True), (NEAR, False), (None, False), (None, True)],
    ids=["", "eager", "tensor", "tensor strict"],
)
@pytest.mark.one_in(2)
# torch counts what the reading of the function notes as a side effect of the model.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_exported_programs_hold_the_expression(mod: Any, strict: bool, tmp_path: Any) -> None:
    """Programs once held a number, which stood for another score mod in another process."""
    module = Exported(mod)
    torch.save((QUERY, module(QUERY).detach()), tmp_path / "values.pt")
    program = torch.export.export(module, (QUERY,), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    script = f"""
import torch, qkv.torch
other = qkv.ScoreMod(lambda s, b, h, i, j: 3.0 * s)
torch.compile(lambda q: qkv.attention(q, q, q, other), backend="eager")(torch.ones(1, 2, 3))
query, out = torch.load({str(tmp_path / "values.pt")!r})
loaded = torch.export.load({str(tmp_path / "program.pt2")!r}).module()
torch.testing.assert_close(loaded(query).detach(), out)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


class Own:
    def lower(self, builder: Any) -> None:
        builder.mask(builder.q_pos >= builder.kv_pos)


@pytest.mark.parametrize("strict", [True, False])
def test_what_one_process_knows_is_not_exported(strict: bool) -> None:
    with pytest.raises((qkv.UnsupportedError, torch._dynamo.exc.Unsupported)):
        torch.export.export(Exported(Own()), (QUERY,), strict=strict)
