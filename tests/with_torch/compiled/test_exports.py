"""Programs for other runtimes: ONNX, and AOTInductor's compiled packages."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import qkv
import qkv.torch

pytestmark = pytest.mark.filterwarnings("ignore")

GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(2, 4, 7, 8, generator=GENERATOR)
KEY, VALUE = (torch.randn(2, 2, 9, 8, generator=GENERATOR) for _ in range(2))
ALLOWED = torch.rand(7, 9, generator=GENERATOR) > 0.4
ALLOWED[2] = False
ALLOWED[:, 0], ALLOWED[2, 0], ALLOWED[:, 8] = True, False, False
VALUE[:, :, 8] = torch.nan


class Model(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call
        self.sinks = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.0]))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> Any:
        return self.call(q, k, v, m, self.sinks)


CALLS: dict[str, Callable[..., Any]] = {
    "mask": lambda q, k, v, m, sinks: qkv.attention(q, k, v, m),
    "drop-in": lambda q, k, v, m, sinks: qkv.torch.scaled_dot_product_attention(
        q, k, v, attn_mask=m, enable_gqa=True
    ),
    "variants": lambda q, k, v, m, sinks: qkv.attention(
        q, k, v, qkv.RoPE(), qkv.Causal(), qkv.ALiBi(), qkv.Softcap(2.0), qkv.Mask(m), q_offset=2
    ),
    "sinks": lambda q, k, v, m, sinks: qkv.attention(q, k, v, qkv.Sinks(sinks), m),
    "score mod": lambda q, k, v, m, sinks: qkv.attention(
        q, k, v, qkv.ScoreMod(lambda s, b, h, i, j: s * sinks[h] - 0.1 * abs(i - j)), m, q_offset=0
    ),
}


def exported(model: torch.nn.Module, **options: Any) -> Any:
    pytest.importorskip(
        "onnxscript", reason="torch exports to ONNX with it: pip install onnxscript"
    )
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    inputs = QUERY, KEY, VALUE, ALLOWED
    return torch.onnx.export(model, inputs, dynamo=True, verbose=False, **options)


@pytest.mark.slow
@pytest.mark.sampled("name", list(CALLS), one_in=2)
def test_onnx_programs_give_the_same_in_onnx_runtime(name: str) -> None:
    """No value behind a mask, and zeros of rows without keys; the right values are NumPy's way."""
    runtime = pytest.importorskip("onnxruntime", reason="it runs them: pip install onnxruntime")
    model = Model(CALLS[name])
    program = exported(model).model_proto.SerializeToString()
    session = runtime.InferenceSession(program, providers=["CPUExecutionProvider"])
    given = dict(zip("qkvm", (QUERY, KEY, VALUE, ALLOWED), strict=True))
    taken = {i.name: given[i.name].numpy() for i in session.get_inputs()}
    (found,) = session.run(None, taken)
    expected = model(QUERY, KEY, VALUE, ALLOWED).detach().numpy()
    assert not found[:, :, 2].any()
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.slow
def test_onnx_programs_of_any_length_are_refused() -> None:
    lengths = {2: "q_len"}, None, None, {0: "q_len"}
    with pytest.raises(Exception, match="Export without dynamic_shapes"):
        exported(Model(CALLS["mask"]), dynamic_shapes=lengths)


class Plain(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return qkv.attention(q, k, v)


LOADED = """
import sys, torch, qkv.torch
program = torch._inductor.aoti_load_package(sys.argv[1])
query, key, value, out = torch.load(sys.argv[2])
torch.testing.assert_close(program(query, key, value), out)
"""


@pytest.mark.slow
@pytest.mark.sampled("way", ["operator", "package"], one_in=2)
def test_compiled_packages_run_in_another_process(way: str, tmp_path: Path) -> None:
    """Such packages give the operator None for an empty list of masks."""
    inputs = QUERY, KEY, KEY.cos()
    right = torch.nn.functional.scaled_dot_product_attention(*inputs, enable_gqa=True)
    program = torch.export.export(Plain(), inputs)
    if way == "operator":
        (node,) = [n for n in program.graph.nodes if n.target is torch.ops.qkv.attention.default]
        assert node.args[3] == []
        out, *_ = torch.ops.qkv.attention(*inputs, None, *node.args[4:])
        torch.testing.assert_close(out, right)
        return
    package, values = str(tmp_path / "model.pt2"), tmp_path / "values.pt"
    torch.save((*inputs, right), values)
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=package,
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
    command = [sys.executable, "-c", LOADED, package, str(values)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def with_sinks_by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Masked attention by torch's softmax, where sinks are one more column."""
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~ALLOWED, -torch.inf)
    column = sinks[:, None, None].expand(2, 4, 7, 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize(("strict", "gradients"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_exported_programs_are_differentiable(
    dtype: torch.dtype, strict: bool, gradients: bool, tmp_path: Path
) -> None:
    """Programs made with or without gradients, saved and loaded, train as the model does."""
    model = Model(lambda q, k, v, m, sinks: qkv.attention(q, k, v, qkv.Sinks(sinks), m)).to(dtype)
    operands = [t.nan_to_num().to(dtype) for t in (QUERY, KEY, VALUE)]
    with torch.set_grad_enabled(gradients):
        made = torch.export.export(model, (*operands, ALLOWED), strict=strict)
    torch.export.save(made, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    leaves = [t.requires_grad_() for t in operands]
    got = torch.autograd.grad(
        program(*leaves, ALLOWED).square().sum(), [*leaves, *program.parameters()]
    )
    right = [t.detach().double().requires_grad_() for t in (*leaves, model.sinks)]
    wanted = torch.autograd.grad(with_sinks_by_hand(*right).square().sum(), right)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype is dtype
        close = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(ours.double(), theirs, **close)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_that_read_arrays_of_numpy(strict: bool) -> None:
    """Strict ones were made without an error, and held tensors without values."""
    bias = np.arange(9, dtype=np.float32)
    inputs = QUERY, KEY, VALUE.nan_to_num(), ALLOWED
    query, key, value = inputs[:3]
    right = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=torch.arange(9.0)[None], enable_gqa=True
    )
    outside = Model(lambda q, k, v, m, sinks: qkv.attention(q, k, v, qkv.Bias(bias)))
    inside = Model(lambda q, k, v, m, sinks: qkv.attention(q, k, v, qkv.Bias(np.arange(9.0))))
    for model in (outside, inside):
        if strict and model is outside:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="reads an array of NumPy"):
                torch.export.export(model, inputs, strict=True)
            continue
        program = torch.export.export(model, inputs, strict=strict)
        torch.testing.assert_close(program.module()(*inputs), right)


SIZES: dict[str, Callable[..., Any]] = {
    "position": lambda q, k, v, m, sinks: qkv.attention(
        q, k, v, qkv.Causal(), q_offset=k.shape[2] - q.shape[2]
    ),
    "scale": lambda q, k, v, m, sinks: qkv.attention(q, k, v, scale=1 / (k.shape[2] - q.shape[2])),
    "prefix": lambda q, k, v, m, sinks: qkv.attention(q, k, v, qkv.Prefix(k.shape[2] - q.shape[2])),
}


@pytest.mark.parametrize("name", SIZES)
def test_numbers_made_of_sizes_that_change(name: str) -> None:
    """A program holds for one number, and says so; it was taken for an object of this process."""
    query, key, value = QUERY, KEY, VALUE.nan_to_num()
    model = Model(SIZES[name])
    auto = torch.export.Dim.AUTO
    sizes = {2: auto}, {2: auto}, {2: auto}, None
    given = query, key, value, ALLOWED
    program = torch.export.export(model, given, dynamic_shapes=sizes, strict=False)
    run = program.module()
    inputs = query[:, :, 1:], key[:, :, 1:], value[:, :, 1:], ALLOWED
    torch.testing.assert_close(run(*inputs), model(*inputs))
    with pytest.raises(AssertionError, match="Guard failed"):
        run(query[:, :, 1:], key, value, ALLOWED)


@pytest.mark.parametrize("name", SIZES)
def test_tracers_that_note_no_number_are_refused(name: str) -> None:
    """The graphs would compute with the first number for every size, and say nothing."""
    model = Model(SIZES[name])
    with pytest.raises(qkv.UnsupportedError, match="a number made of traced sizes"):
        make_fx(model, tracing_mode="symbolic")(QUERY, KEY, VALUE.nan_to_num(), ALLOWED)


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (lambda: qkv.ScoreMod(lambda s, b, h, i, j: s - abs(i - j)), r"ScoreMod\(\(score - "),
        (lambda: qkv.Mask(lambda b, h, i, j: i >= j), r"Mask\(\(kv_pos <= q_pos\)\)"),
    ],
)
def test_functions_in_errors_of_compiled_calls(made: Callable[[], Any], shown: str) -> None:
    """Functions were once shown as the text by which graphs hold them."""
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k, v: qkv.attention(q, k, v, made()), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match=f"{shown}.* compares positions"):
        compiled(QUERY, KEY, VALUE)
