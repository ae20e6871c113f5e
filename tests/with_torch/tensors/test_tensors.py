"""Tensors in `qkv.attention`: devices, libraries, tracing, compiling."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import qkv
import qkv.torch
from qkv.bridges.torch.operations import operators

# torch's compiler uses what torch has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = (2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 6)
    return [normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
def test_the_same_bits_as_of_numpy(dtype) -> None:
    tensors = operands(dtype)
    arrays = [qkv.arrays.views.view(t, "operand") for t in tensors]
    assert all(a.ctypes.data == t.data_ptr() for a, t in zip(arrays, tensors, strict=True))
    out, lse = qkv.attention(*tensors, qkv.Causal("end"), return_lse=True)
    expected, expected_lse = qkv.attention(*arrays, qkv.Causal("end"), return_lse=True)
    assert out.dtype is dtype
    assert qkv.arrays.views.view(out, "out").tobytes() == expected.tobytes()
    assert lse.numpy().tobytes() == expected_lse.tobytes()


def test_variants_hold_tensors_of_any_type() -> None:
    query, key, value = operands()
    bias = normal(4, 9, 11, dtype=torch.bfloat16)
    lengths, ids = torch.tensor([11, 5]), torch.arange(11, dtype=torch.int32) // 6
    call_variants = (qkv.Bias(bias), qkv.KeyLengths(lengths), qkv.Segments(ids[:9], ids), ids > 0)
    found = qkv.attention(query, key, value, *call_variants, q_offset=torch.tensor([3, -1]))
    as_numpy = (
        qkv.Bias(qkv.arrays.views.view(bias, "bias")), qkv.KeyLengths(lengths.numpy()),
        qkv.Segments(ids[:9].numpy(), ids.numpy()), ids.numpy() > 0,
    )  # fmt: skip
    expected = qkv.attention(
        *(t.numpy() for t in (query, key, value)), *as_numpy, q_offset=np.array([3, -1])
    )
    assert found.numpy().tobytes() == expected.tobytes()


def test_masks_join_with_tensors() -> None:
    query, key, value = operands()
    allowed = normal(9, 11, seed=4) < 0.4
    causal = torch.arange(9)[:, None] + 2 >= torch.arange(11)
    expected = qkv.attention(query, key, value, allowed | causal)
    for joined in (allowed | qkv.Causal("end"), qkv.Causal("end") | allowed):
        assert_close(qkv.attention(query, key, value, joined), expected, rtol=0, atol=0)
    expected = qkv.attention(query, key, value, ~allowed & causal)
    joined = qkv.Causal("end") & ~qkv.Mask(allowed)
    assert_close(qkv.attention(query, key, value, joined), expected, rtol=0, atol=0)


def test_inspection_and_plans_take_tensors() -> None:
    query, key, value = (t.requires_grad_() for t in operands())
    slopes = torch.linspace(0.1, 0.4, 4, requires_grad=True)
    record = qkv.inspect(query, key, value, qkv.ALiBi(slopes), q_offset="end")
    assert isinstance(record.entropy, torch.Tensor)
    weights = torch.as_tensor(record.weights[...])
    assert_close(weights.sum(-1), torch.ones(2, 4, 9))
    assert_close(record.output, weights @ value.detach().repeat_interleave(2, 1))
    indices, top = record.top(3)
    assert_close(top, weights.sort(-1, descending=True).values[..., :3])
    assert indices.shape == (2, 4, 9, 3)
    assert qkv.plan(query, key, value).backend == "cpu"


@pytest.mark.slow
def test_vjp_of_tensors_names_the_very_variants() -> None:
    query, key, value = operands()
    bias, slopes = qkv.Bias(normal(9, 11)), qkv.ALiBi(torch.full((4,), 0.2))
    out, pullback = qkv.vjp(query, key, value, bias, slopes, q_offset="end")
    found = pullback(torch.ones_like(out), wrt=[bias, slopes])
    assert found.of(bias).shape == (9, 11)
    assert found.of(slopes).shape == (4,)
    assert isinstance(found.query, torch.Tensor)


def test_strides_that_only_torch_has() -> None:
    query, key, value = operands()
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    assert_close(qkv.attention(*turned), qkv.attention(query, key, value), rtol=0, atol=0)
    wide = query[:, :1].expand(2, 4, 9, 8)
    assert_close(qkv.attention(wide, key, value), qkv.attention(wide.clone(), key, value))
    negated = torch._neg_view(query)
    assert_close(qkv.attention(negated, key, value), qkv.attention(-query, key, value))


SAMPLES = {
    "plain": lambda: (),
    "causal": lambda: (qkv.Causal("end"),),
    "bias": lambda: (normal(4, 9, 11),),
    "bias and mask": lambda: (normal(1, 9, 11), normal(9, 11) < 0.5, qkv.Softcap(3.0)),
    "sinks": lambda: (qkv.Sinks(normal(4)), qkv.KeyLengths(torch.tensor([3, 11]))),
}


@pytest.mark.slow
@pytest.mark.sampled(("name", "layout"), list(product(SAMPLES, ["bhld", "blhd"])), one_in=5)
def test_opcheck(name: str, layout: str) -> None:
    """torch's own tests of an operator: schema, fake tensors, dispatch under compilation."""
    query, key, value = operands(torch.float64)
    if layout == "blhd":
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    from qkv.call.binding.bound import bind
    from qkv.call.binding.options import OptionValues

    bound = bind(query, key, value, SAMPLES[name](), OptionValues(layout=layout))
    arrays = [a.double() if a.is_floating_point() else a for a in bound.leaves[3:]]
    text = bound.structure.text
    numbers = [n for n, a in enumerate(arrays) if a.is_floating_point()]
    inputs = (query, key, value, arrays)
    out, lse, rest, _ = operators.attention(*inputs, text, True)
    along = [torch.ones_like(t) for t in (query, key, value, *(arrays[n] for n in numbers))]
    torch.library.opcheck(operators.attention, (*inputs, text, True))
    torch.library.opcheck(
        operators.attention_backward,
        (*inputs, out, lse, rest, torch.ones_like(out), torch.ones_like(lse), text, numbers),
    )
    torch.library.opcheck(operators.attention_tangent, (*inputs, along, text, numbers))
    torch.library.opcheck(
        operators.attention_second,
        (*inputs, torch.ones_like(out), torch.ones_like(lse), along, text, numbers, numbers),
    )


CAP = qkv.ScoreMod(lambda score, batch, head, q_pos, kv_pos: score / (1 + 0.1 * abs(score)))


def user(query, key, value, bias):
    out, lse = qkv.attention(
        query, key, value, qkv.Causal("end"), bias, CAP, qkv.Dropout(0.2, 7), return_lse=True
    )
    return out.relu() + lse[..., None]


def gradients(function, *tensors):
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*tensors)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    torch.compiler.reset()
    inputs = [*operands(), normal(4, 9, 11)]
    compiled = torch.compile(user, fullgraph=True, backend=backend)
    for a, b in zip(gradients(compiled, *inputs), gradients(user, *inputs), strict=True):
        assert_close(a, b)


@pytest.mark.slow
def test_the_first_call_of_a_process_may_be_a_compiled_one() -> None:
    """What is found out later must not be found out while torch traces."""
    code = """
import torch, qkv
x = torch.ones(1, 2, 3, 4)
compiled = torch.compile(lambda x: qkv.attention(x, x, x), backend="aot_eager", fullgraph=True)
print(float((compiled(x) - 1).abs().max()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "0.0\n", done.stderr[-2000:]


@pytest.mark.slow
def test_compile_for_lengths_that_change() -> None:
    torch.compiler.reset()
    query, key, value = operands()
    compiled = torch.compile(
        lambda q, k, v: qkv.attention(q, k, v, qkv.Causal("end")) * 2,
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    with torch.compiler.set_stance("default"):
        for length in (9, 4, 7):
            expected = 2 * qkv.attention(query[:, :, :length], key, value, qkv.Causal("end"))
            assert_close(compiled(query[:, :, :length], key, value), expected)


@pytest.mark.parametrize("functional", [False, True])
def test_make_fx(functional: bool) -> None:
    inputs = [*operands(), normal(4, 9, 11)]
    function = torch.func.functionalize(user) if functional else user
    traced = make_fx(function, tracing_mode="symbolic")(*inputs)
    assert "qkv.attention" in traced.code
    assert_close(traced(*inputs), user(*inputs))


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_make_fx_of_real_tensors(pre_dispatch: bool) -> None:
    """What was computed in place was a constant of a graph that is made before dispatch."""
    inputs = operands()
    traced = make_fx(lambda *t: qkv.attention(*t), pre_dispatch=pre_dispatch)(*inputs)
    others = [t.cos() for t in inputs]
    right = torch.nn.functional.scaled_dot_product_attention(*others, enable_gqa=True)
    assert_close(traced(*others), right)


def test_export_and_fake_tensors() -> None:
    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            return qkv.attention(query, key, value, qkv.SlidingWindow(3, 0), q_offset="end")

    inputs = tuple(operands())
    exported = torch.export.export(Model(), inputs)
    assert_close(exported.module()(*inputs), Model()(*inputs))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = qkv.attention(*(torch.empty(t.shape) for t in inputs), layout="bhld")
    assert fake.shape == (2, 4, 9, 6)


LAYOUTS = {"bhld": lambda *shape: shape, "blhd": lambda b, h, n, d: (b, n, h, d)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes",
    [(2, 4, 0, 6, 3), (2, 4, 5, 0, 3), (0, 4, 5, 6, 3), (2, 4, 5, 6, 0), (2, 4, 5, 6, 3)],
    ids=str,
)
def test_fake_results_are_laid_out_as_real_ones(layout: str, sizes) -> None:
    batch, heads, q_len, kv_len, v_dim = sizes
    shapes = (heads, q_len, 8), (heads // 2, kv_len, 8), (heads // 2, kv_len, v_dim)
    real = [normal(*LAYOUTS[layout](batch, *shape)) for shape in shapes]
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        fake = qkv.attention(*map(mode.from_tensor, real), layout=layout, return_lse=True)
    for grad in (False, True):
        tensors = [t.clone().requires_grad_(grad) for t in real]
        for a, b in zip(qkv.attention(*tensors, layout=layout, return_lse=True), fake, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


UNFIT = {
    "head_dim": ((2, 4, 5, 8), (2, 4, 6, 7), (2, 4, 6, 8)),
    "kv_len": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 9, 8)),
    "num_heads": ((2, 4, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    "heads": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 2, 6, 8)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", UNFIT)
def test_fake_tensors_that_do_not_fit(what: str, layout: str) -> None:
    shapes = [LAYOUTS[layout](*shape) for shape in UNFIT[what]]
    tensors = [normal(*shape) for shape in shapes]
    with pytest.raises(qkv.ShapeError, match=what) as real:
        qkv.attention(*tensors, layout=layout)
    mode = torch._subclasses.FakeTensorMode()
    with mode, pytest.raises(qkv.ShapeError) as fake:
        qkv.attention(*map(mode.from_tensor, tensors), layout=layout)
    assert str(fake.value) == str(real.value)
    with pytest.raises((qkv.ShapeError, torch._dynamo.exc.TorchRuntimeError), match=what):
        make_fx(lambda *t: qkv.attention(*t, layout=layout), tracing_mode="symbolic")(*tensors)


@pytest.mark.slow
def test_autocast() -> None:
    inputs = [*operands(), normal(4, 9, 11)]
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(lambda *t: qkv.attention(*t), *inputs)
    assert found[0].dtype is torch.bfloat16
    assert all(g.dtype is torch.float32 for g in found[1:])
    rounded = [t.bfloat16() for t in inputs[:3]]
    assert_close(found[0], qkv.attention(*rounded, inputs[3]), rtol=0, atol=0)


def test_autocast_of_what_looks_into_attention() -> None:
    """Query and key are float32 there after a rotation, and values are not."""
    query, key, value = operands()
    with torch.autocast("cpu", torch.bfloat16):
        record = qkv.inspect(query, key, value.bfloat16(), qkv.Causal(), q_offset="end")
        plan = qkv.plan(query, key, value.bfloat16(), qkv.Causal(), q_offset="end")
        out = qkv.attention(query, key, value.bfloat16(), qkv.Causal(), q_offset="end")
    assert_close(record.output, out, rtol=0, atol=0)
    assert "bfloat16" in str(plan)
    rounded = [t.bfloat16().double() for t in (query, key)]
    scores = rounded[0] @ rounded[1].repeat_interleave(2, 1).mT * 8**-0.5
    q_len, kv_len = scores.shape[-2:]
    later = torch.ones(q_len, kv_len, dtype=torch.bool).triu(kv_len - q_len + 1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    assert_close(record.max_weight.double(), weights.amax(-1), rtol=1e-5, atol=1e-6)


def test_lse_is_differentiable() -> None:
    query, key, value = operands(torch.float64)
    found = gradients(lambda *t: qkv.attention(*t, return_lse=True)[1], query, key, value)

    def naive(query, key, value):
        scores = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
        return scores.logsumexp(-1) + 0 * value.sum()

    for a, b in zip(found, gradients(naive, query, key, value), strict=True):
        assert_close(a, b)


def test_memory_of_training_does_not_hold_the_weights() -> None:
    """Saved for the backward pass: inputs, output and lse."""
    query = normal(1, 1, 4096, 4).requires_grad_()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, id):
        qkv.attention(query, query, query, qkv.Causal())
    assert max(sizes) == query.numel()


def test_stored_rows_of_tensors() -> None:
    query = normal(1, 4, 1, 8)
    pages = normal(5, 2, 16, 8)
    table = torch.tensor([[3, 0, 4]])
    paged = qkv.Paged(pages, table)
    whole = pages[table[0]].transpose(0, 1).reshape(1, 2, 48, 8)
    found = qkv.attention(query, paged, paged, qkv.KeyLengths(torch.tensor([40])))
    expected = qkv.attention(query, whole[:, :, :40], whole[:, :, :40])
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["rotate", "sinusoidal", "learned", "dropout"])
def test_torchs_default_device_is_not_that_of_the_arguments(name: str) -> None:
    """Tables that the library makes are where the tensors of the call are."""
    table = np.ones((9, 8), np.float32)
    call: Any = {
        "rotate": lambda x: qkv.RoPE().rotate(x, np.arange(9)),
        "sinusoidal": qkv.SinusoidalPositions(8),
        "learned": qkv.LearnedPositions(table),
        "dropout": lambda x: qkv.torch.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    }[name]
    x = torch.randn(2, 9, 8)
    torch.manual_seed(0)
    right = call(x)
    torch.manual_seed(0)
    with torch.device("meta"):
        found = call(x)
    assert torch.equal(found, right)


@pytest.mark.parametrize("scale", [True, torch.tensor(True), torch.tensor([True, False])])
def test_truth_values_are_no_scales(scale: Any) -> None:
    x = torch.randn(2, 9, 8, requires_grad=True)
    with pytest.raises(qkv.QkvError, match="scale"):
        qkv.attention(x, x, x, scale=scale)
