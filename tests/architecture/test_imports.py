"""Who may import whom: contracts in pyproject.toml, and what `import qkv` brings with it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_import_contracts() -> None:
    ran = run(
        "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"
    )
    assert ran.returncode == 0, ran.stdout
    assert "0 broken" in ran.stdout


LAZY = ("llvmlite", "rich", "safetensors", "torch", "jax", "tensorflow", "transformers", "numba",
        "scipy", "matplotlib", "hypothesis", "pytest", "importlib.metadata", "asyncio")  # fmt: skip


def imported(program: str) -> set[str]:
    ran = run("-W", "error", "-c", f"{program}\nimport sys\nprint(*sorted(sys.modules))")
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def test_import_qkv_imports_no_framework() -> None:
    assert not imported("import qkv") & set(LAZY)


@pytest.mark.parametrize(
    ("program", "others"),
    [
        (
            "",
            ("inspection.records.record", "inspection.traces.trace", "teaching.classical",
             "backends.cpu.backend"),
        ),
        (
            "qkv.attention(x, x, x, qkv.Causal(), backend='cpu')",
            ("inspection.records.record", "backends.cpu.decode.kernel",
             "backends.cpu.backward.kernel", "backends.cpu.bf16_tiles.kernel",
             "backends.cpu.split_bf16.layout"),
        ),
        (
            "qkv.attention(x[:1], x, x, backend='cpu')",
            ("backends.cpu.forward.kernel", "backends.cpu.backward.frame"),
        ),
    ],
    ids=["import", "attention", "decoding step"],
)  # fmt: skip
def test_a_first_call_imports_only_what_it_needs(program: str, others: tuple[str, ...]) -> None:
    program = f"import numpy as np, qkv\nx = np.ones((40, 8), np.float32)\n{program}"
    assert not imported(program) & {f"qkv.{name}" for name in others}


def test_layouts_of_kernels_import_no_emitters() -> None:
    """A process whose kernels are kept asks them how much memory a kernel needs."""
    folder = ROOT / "src" / "qkv" / "backends" / "cpu"
    layouts = [f"qkv.backends.cpu.{file.parent.name}.layout" for file in folder.glob("*/layout.py")]
    assert "qkv.backends.cpu.split_bf16.layout" in layouts
    found = imported(f"import {', '.join(layouts)}")
    assert not found & {"llvmlite", "qkv.backends.cpu.emit.emitter"}


def test_import_qkv_testing_imports_no_test_framework() -> None:
    """A backend of another package may use any test framework beside `qkv.testing`."""
    assert not imported("import qkv.testing") & {"pytest", "hypothesis", "torch"}


@pytest.mark.parametrize("backend", ["blocked", "reference"])
def test_readable_backends_run_without_llvmlite(backend: str) -> None:
    """A platform that llvmlite has no wheel for still has attention."""
    program = f"""
import sys
sys.modules["llvmlite"] = None
import numpy as np, qkv
x = np.eye(4, dtype=np.float32)
qkv.attention(x, x, x, qkv.Causal(), backend={backend!r})
qkv.attention(x, x, x, qkv.Causal())
"""
    assert "llvmlite.binding" not in imported(program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [("hf", "transformers", "hf"), ("hf", "torch", "hf"), ("torch", "torch", "torch"),
     ("jax", "jax", "jax")],
)  # fmt: skip
def test_modules_are_attributes_that_name_the_extra_they_need(module, missing, extra) -> None:
    program = f"""
import sys
import qkv
assert not {{"torch", "jax", "transformers"}} & set(sys.modules)
sys.modules[{missing!r}] = None
try:
    qkv.{module}
except ModuleNotFoundError as error:
    assert "[{extra}]" in str(error) and {missing!r} in str(error), error
    assert error.name == {missing!r}
else:
    raise SystemExit("nothing was raised")
"""
    assert "qkv" in imported(program)


@pytest.mark.slow
def test_modules_are_attributes() -> None:
    """`import qkv` is enough; each is imported when it is first named."""
    assert "qkv.torch" in imported("import qkv\nqkv.torch.scaled_dot_product_attention")
    assert "qkv.files" in imported("import qkv\nqkv.files.write_arrays")


@pytest.mark.slow
def test_torch_s_compiler_is_imported_only_to_compile() -> None:
    """torch's compiler takes longer to import than torch itself."""
    program = """
import torch, qkv
x = torch.ones(1, 2, 8, 4, requires_grad=True)
qkv.attention(x, x, x, qkv.Causal()).sum().backward()
with torch.no_grad():
    for _ in range(3):
        qkv.attention(x, x, x, qkv.Causal())
qkv.inspect(x.detach(), x.detach(), x.detach()).received
mask = torch.ones(8, 8, dtype=torch.bool)
qkv.torch.scaled_dot_product_attention(x, x, x, attn_mask=mask)
qkv.torch.MultiHeadAttention(4, num_heads=2, causal=True)(x[0, :1])
"""
    assert not imported(program) & {"torch._dynamo", "torch._inductor", "sympy"}


def test_everything_runs_without_llvmlite() -> None:
    """Attention, its gradients and inspection, and what `qkv info` says of it."""
    program = """
import sys
sys.modules["llvmlite"] = None
import numpy as np, qkv
from qkv.cli import main
q, k, v = np.random.default_rng(0).normal(size=(3, 2, 6, 4)).astype(np.float32)
scores = np.einsum("hid,hjd->hij", q, k) / 2
scores[:, ~np.tri(6, dtype=bool)] = -np.inf
weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
assert qkv.plan(q, k, v, qkv.Causal()).backend == "blocked"
assert np.allclose(qkv.attention(q, k, v, qkv.Causal()), weights @ v, atol=1e-6)
out, pullback = qkv.vjp(q, k, v, qkv.Causal())
assert np.allclose(pullback(np.ones_like(out)).value[..., 0], weights.sum(1), atol=1e-6)
qkv.jvp(q, k, v, qkv.Causal(), tangents=qkv.Tangents(q, k, v))
record = qkv.inspect(q, k, v, qkv.Causal())
assert np.allclose(record.weights[...], weights, atol=1e-6)
assert np.allclose(record.received, weights.sum(1), atol=1e-6)
assert "head  entropy" in str(record)
record.top(2), qkv.explain(q, k, v, qkv.Causal(), head=0)
assert main(["info"]) == 0
assert main(["inspect"]) == 0
print(end=" ")
"""
    ran = run("-W", "error", "-c", program)
    assert ran.returncode == 0, ran.stderr
    assert "llvmlite cannot be loaded" in ran.stdout or "compiled code" in ran.stdout


@pytest.mark.slow
def test_calls_over_ranks_are_planned_without_torch() -> None:
    """Orders and plans are arithmetic on sizes; only what sends messages needs torch."""
    program = """
import sys
import qkv, qkv.cost
sys.modules["torch"] = None
spread = qkv.cost.ranks_cost("gpt-2", 1024, 4).strategies
assert spread["ring"].received > 0 and spread["ulysses"].received > 0
assert qkv.distributed.Order.zigzag(8, 2).rows(0) == 4
for name in ("attention", "decode", "inspect", "DistributedRecord"):
    try:
        getattr(qkv.distributed, name)
    except ModuleNotFoundError as error:
        assert f"qkv.distributed.{name} needs torch" in str(error), error
        assert "[torch]" in str(error) and error.name == "torch", error
    else:
        raise SystemExit("nothing was raised")
"""
    assert "qkv.distributed.plan" in imported(program)
