"""Lengths, segments, slopes, caps and seeds as tensors of a graph, with torch's backend.

The expected values are formulas in float64, and for seeds those of a call that nothing traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import qkv
from qkv.bridges.torch.operations.device_operators import device_attention

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

BATCH, HEADS, LENGTH, DIM = 2, 4, 6, 8
SEGMENTS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
KINDS: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "lengths": (qkv.KeyLengths, torch.tensor([3, 6])),
    "segments": (qkv.Segments, SEGMENTS),
    "slopes": (qkv.ALiBi, torch.tensor([1.0, 0.5, 0.25, 0.125])),
    "cap": (qkv.Softcap, torch.tensor(0.75)),
    "seed": (lambda seed: qkv.Dropout(0.3, seed), torch.tensor(11)),
}


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_function_and_its_gradients(kind: str, layout: str) -> None:
    made, array = KINDS[kind]

    def attend(query, key, value, array):
        rows = (query, key, value)
        if layout == "blhd":
            rows = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        options = {"backend": "torch", "layout": layout, "return_lse": True}
        return qkv.attention(*rows, made(array), **options)

    torch._dynamo.reset()  # Else all kinds would count as one function that changes.
    given, other = _operands(), _operands()
    array = array.clone().requires_grad_(kind == "slopes")
    out, lse = torch.compile(attend, fullgraph=True, backend="aot_eager")(*given, array)
    out = out.transpose(1, 2) if layout == "blhd" else out
    right_array = array.detach().clone().requires_grad_(array.requires_grad)
    right, right_lse = _expected(kind, *other, right_array)
    assert_close(out, right, check_dtype=False)
    assert_close(lse, right_lse, check_dtype=False)
    (out.sin().sum() + lse.cos().sum()).backward()
    (right.sin().sum() + right_lse.cos().sum()).backward()
    for found, expected in zip((*given, array), (*other, right_array), strict=True):
        if found.requires_grad:
            assert_close(found.grad, expected.grad, check_dtype=False, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_function_of_inductor_takes_lengths_and_seeds_of_each_step() -> None:
    compiled = 0

    def attend(query, key, value, lengths, seed):
        nonlocal compiled
        variants = qkv.KeyLengths(lengths), qkv.Dropout(0.25, seed)
        return qkv.attention(query, key, value, *variants, backend="torch")

    def counted(graph, inputs):
        nonlocal compiled
        compiled += 1
        return torch._inductor.compile(graph, inputs)

    run = torch.compile(attend, fullgraph=True, backend=counted)
    for step in range(3):
        tensors = [t.detach() for t in _operands()]
        lengths, seed = torch.tensor([step + 1, 6 - step]), torch.tensor(step)
        found = run(*tensors, lengths, seed)
        variants = qkv.KeyLengths(lengths.tolist()), qkv.Dropout(0.25, step)
        assert_close(found, qkv.attention(*tensors, *variants))
    assert compiled == 1


@pytest.mark.parametrize("kind", KINDS)
def test_exported_and_traced_graphs(kind: str) -> None:
    made, array = KINDS[kind]

    class Attention(torch.nn.Module):
        def forward(self, query, key, value, array):
            return qkv.attention(query, key, value, made(array), backend="torch")

    tensors = [t.detach() for t in _operands()]
    exported = torch.export.export(Attention(), (*tensors, array)).module()
    traced = make_fx(Attention(), tracing_mode="fake")(*tensors, array)
    right, _ = _expected(kind, *tensors, array)
    for graph in (exported, traced):
        assert_close(graph(*tensors, array), right, check_dtype=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", ["lengths", "segments", "slopes", "cap"])
def test_a_trace_of_jit_reads_the_arrays_of_each_call(kind: str) -> None:
    made, array = KINDS[kind]

    def attend(query, key, value, array):
        return qkv.attention(query, key, value, made(array), backend="torch")

    tensors = [t.detach() for t in _operands()]
    trace = torch.jit.trace(attend, (*tensors, array))
    other = array.flip(0) if array.ndim else array + 1
    assert_close(trace(*tensors, other), _expected(kind, *tensors, other)[0], check_dtype=False)


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("kind", ["lengths", "segments", "slopes", "cap"])
def test_a_graph_made_of_real_tensors_reads_the_arrays_of_each_call(
    kind: str, pre_dispatch: bool
) -> None:
    """`make_fx` runs what it traces unless told otherwise; those values were constants of it."""
    made, array = KINDS[kind]

    def attend(query, key, value, array):
        return qkv.attention(query, key, value, made(array), backend="torch")

    tensors, others = ([t.detach() + n for t in _operands()] for n in range(2))
    graph = make_fx(attend, pre_dispatch=pre_dispatch)(*tensors, array)
    other = array.flip(0) if array.ndim else array + 1
    assert_close(graph(*others, other), _expected(kind, *others, other)[0], check_dtype=False)


@pytest.mark.parametrize("kind", KINDS)
def test_meta(kind: str) -> None:
    made, array = KINDS[kind]
    tensors = [t.to("meta") for t in _operands()]
    options = {"backend": "torch", "return_lse": True}
    out, lse = qkv.attention(*tensors, made(array.to("meta")), **options)
    assert out.shape == tensors[0].shape
    assert lse.shape == tensors[0].shape[:-1]


@pytest.mark.parametrize("lse", [False, True])
def test_torch_approves_of_the_operator(lse: bool) -> None:
    from qkv.call.binding.bound import bind
    from qkv.call.binding.options import OptionValues

    tensors, array = _operands(), torch.tensor([1.0, 0.5, 0.25, 0.125], requires_grad=True)
    options = OptionValues(backend="torch")
    bound = bind(*tensors, (qkv.ALiBi(array), qkv.KeyLengths(torch.tensor([3, 6]))), options)
    query, key, value, *arrays = bound.leaves
    given = query, key, value, arrays, bound.structure.text, lse
    torch.library.opcheck(device_attention, given, atol=1e-5, rtol=1e-4)


def test_values_that_do_not_fit_are_said_where_the_graph_runs() -> None:
    def attend(query, lengths):
        return qkv.attention(query, query, query, qkv.KeyLengths(lengths), backend="torch")

    query = _operands()[0].detach()
    run = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert run(query, torch.tensor([3, 6])).shape == query.shape
    with pytest.raises(qkv.ShapeError, match="runs from 3 to 7; kv_len=6"):
        run(query, torch.tensor([3, 7]))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_cap_that_is_not_positive_is_said_where_the_graph_runs(backend: str) -> None:
    def attend(query, cap):
        return qkv.attention(query, query, query, qkv.Softcap(cap), backend=backend)

    class Attention(torch.nn.Module):
        def forward(self, query, cap):
            return attend(query, cap)

    query, cap = _operands()[0].detach(), torch.tensor(2.0)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(Attention(), (query, cap)).module()
    for run in (compiled, exported):
        assert_close(run(query, cap), qkv.attention(query, query, query, qkv.Softcap(2.0)))
        with pytest.raises(qkv.ArgumentError, match=r"Softcap cap=-2\.0 is not a positive number"):
            run(query, -cap)


@pytest.mark.parametrize("how", ["compile", "vmap", "grad"])
def test_a_sink_of_all_heads_is_a_tensor_without_dimensions(how: str) -> None:
    query, key, value = (tensor.detach() for tensor in _operands())
    sink = torch.tensor(0.7)

    def attend(sink: torch.Tensor) -> torch.Tensor:
        return qkv.attention(query, key, value, qkv.Sinks(sink), backend="torch")

    def right(sink: torch.Tensor) -> torch.Tensor:
        powers = (query.double() @ key.double().mT / DIM**0.5).exp()
        return powers @ value.double() / (powers.sum(-1, keepdim=True) + sink.double().exp())

    if how == "grad":
        found, expected = (
            torch.func.grad(lambda sink, of=of: of(sink).sin().sum())(sink)
            for of in (attend, right)
        )
    elif how == "vmap":
        sinks = torch.stack([sink, -sink])
        found, expected = torch.vmap(attend)(sinks), torch.stack([right(sink), right(-sink)])
    else:
        run = torch.compile(attend, fullgraph=True, backend="aot_eager")
        found, expected = run(sink), right(sink)
    assert_close(found, expected, check_dtype=False)


def _operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = BATCH, HEADS, LENGTH, DIM
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def _expected(kind: str, query, key, value, array) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "seed":
        variant = KINDS[kind][0](array.numpy())
        tensors = (t.double() for t in (query, key, value))
        out, lse = qkv.attention(*tensors, variant, return_lse=True)
        return out, lse
    scores = query.double() @ key.double().mT / DIM**0.5
    index = torch.arange(LENGTH)
    if kind == "lengths":
        allowed = (index < array[:, None])[:, None, None]
        scores = torch.where(allowed, scores, -torch.inf)
    elif kind == "segments":
        allowed = (array[:, :, None] == array[:, None])[:, None]
        scores = torch.where(allowed, scores, -torch.inf)
    elif kind == "cap":
        scores = array * (scores / array).tanh()
    else:
        distance = (index[:, None] - index).abs()
        scores = scores - array.double()[:, None, None] * distance
    return scores.softmax(-1) @ value.double(), scores.logsumexp(-1)
