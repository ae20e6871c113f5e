"""Systems that refuse executable memory: everything runs in NumPy, and says why."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from refuse_execution import WAYS

from processes import in_a_process

FOLDER = str(Path(__file__).parent)
PRELUDE = """
import sys
sys.path.insert(0, {folder!r})
from refuse_execution import refuse
import numpy as np
rng = np.random.default_rng(0)

def truth(q, k, v, causal=True):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    s = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if causal:
        s = np.where(np.tri(*s.shape[-2:], s.shape[-1] - s.shape[-2], dtype=bool), s, -np.inf)
    w = np.exp(s - s.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True) @ v

def near(found, expected):
    assert np.allclose(np.asarray(found, np.float64), expected, atol=1e-5), found
"""


def refused(script: str, way: str = "mdwe") -> str:
    """What a script prints in a process that has given up the right before it imports qkv."""
    start = PRELUDE.format(folder=FOLDER) + f"refuse({way!r})\nimport qkv\n"
    return in_a_process(start + textwrap.dedent(script))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_arrays(way: str) -> None:
    refused(
        """
        q, k, v = rng.normal(size=(3, 2, 4, 70, 16)).astype(np.float32)
        plan = qkv.plan(q, k, v, qkv.Causal())
        assert plan.backend == "blocked"
        assert "refuses this process executable memory" in str(plan)
        expected = truth(q, k, v)
        for _ in range(3):
            near(qkv.attention(q, k, v, qkv.Causal()), expected)
            near(qkv.attention(q[..., -1:, :], k, v, qkv.Causal(), q_offset="end"),
                 expected[..., -1:, :])
            qkv.attention(q, k, v, qkv.RoPE(), qkv.Sinks(np.zeros(4)), qkv.Softcap(9.0))
            out, pull_back = qkv.vjp(q, k, v, qkv.Causal())
            near(pull_back(np.ones_like(out)).value.sum(), q.size)
            assert qkv.inspect(q, k, v, qkv.Causal()).entropy.shape == (2, 4, 70)
        mod = qkv.ScoreMod(lambda score, batch, head, q_pos, kv_pos: score * 1.0)
        near(qkv.attention(q, k, v, mod, qkv.Causal()), expected)
        try:
            qkv.attention(q, k, v, backend="cpu")
        except qkv.UnsupportedError as error:
            assert "refuses this process executable memory" in str(error)
        else:
            raise AssertionError("it ran")
        """,
        way,
    )


@pytest.mark.slow
def test_tensors() -> None:
    refused(
        """
        import torch
        import qkv.torch
        x = [torch.from_numpy(rng.normal(size=(2, 4, 40, 16)).astype(np.float32)) for _ in "qkv"]
        x = [each.requires_grad_() for each in x]
        expected = truth(*[each.detach().numpy() for each in x])
        for _ in range(3):
            out = qkv.attention(*x, qkv.Causal())
            near(out.detach(), expected)
            out.sum().backward()
            near(qkv.torch.scaled_dot_product_attention(*x, is_causal=True).detach(), expected)
        near(x[2].grad.sum(), 3 * out.numel())
        compiled = torch.compile(
            lambda *x: qkv.attention(*x, qkv.Causal()), backend="eager", fullgraph=True
        )
        near(compiled(*x).detach(), expected)
        """
    )


@pytest.mark.slow
def test_jax_arrays() -> None:
    """XLA needs executable memory itself; where it has it, qkv's question alone is answered."""
    refused(
        """
        import jax
        import qkv.jax
        q, k, v = jax.numpy.asarray(rng.normal(size=(3, 2, 30, 8)).astype(np.float32))
        expected = truth(q, k, v)
        near(qkv.attention(q, k, v, qkv.Causal()), expected)
        near(jax.jit(lambda *x: qkv.attention(*x, qkv.Causal()))(q, k, v), expected)
        grad = jax.grad(lambda *x: qkv.attention(*x, qkv.Causal()).sum(), argnums=2)(q, k, v)
        near(grad.sum(), q.size)
        """,
        "patched",
    )


def test_commands() -> None:
    printed = refused(
        """
        from qkv.cli import main
        assert main(["info"]) == 0
        assert main(["plan", "--q-len", "64", "--causal"]) == 0
        assert main(["inspect"]) == 0
        assert main(["cost", "--model", "llama-3-8b", "--machine", "here"]) != 0
        print("==")
        assert main(["info", "--json"]) == 0
        """
    )
    text, _, data = printed.partition("==")
    told = json.loads(data)
    why = "the system refuses this process executable memory"
    assert told["machine"]["compiled code"].startswith(f"none: {why}")
    assert told["backends"]["blocked"].startswith("ready, the first choice")
    assert why in told["backends"]["cpu"]
    assert why in " ".join(text.split())
    assert "head  entropy" in text


def test_the_lab() -> None:
    refused(
        """
        from qkv.inspection.models.model_record import ModelRecord
        from qkv.lab.session import Session
        from qkv.lab.sources.source import source_of
        record = ModelRecord("one layer", keep="weights")
        record.texts = ["t"] * 40
        q, k = rng.normal(size=(2, 1, 2, 40, 8)).astype(np.float32)
        record.add(q, k, qkv.Causal(), name="layer 0")
        session = Session(source_of(record))
        weight = session.answer("weight", dict(layer=0, head=1, query=20, key=3)).result["weight"]
        near(weight, truth(q, k, np.eye(40)[None, None])[0, 1, 20, 3])
        session.answer("head", dict(layer=0, head=1, first=0, count=10))
        session.answer("mechanisms", {})
        """
    )


@pytest.mark.slow
@pytest.mark.parametrize(("library", "calls"), [("numpy", 1), ("numpy", 2), ("torch", 2)])
def test_a_process_that_gives_up_the_right_later(library: str, calls: int) -> None:
    """What is compiled may go on running, without code that later calls would add to it."""
    script = f"""
    import qkv
    from qkv.backends.cpu.threads import jobs
    from qkv.backends.cpu.threads.python_threads import PythonThreads
    many = rng.normal(size=(3, 2, 4, 600, 32)).astype(np.float32)
    few = many[..., :70, :]
    one = few[0][..., -1:, :], few[1], few[2]
    if {library!r} == "torch":
        import torch
        torch.set_num_threads(2)
        many, few, one = ([torch.from_numpy(each) for each in x] for x in (many, few, one))

    def call() -> None:
        near(qkv.attention(*many, qkv.Causal()), truth(*many))
        near(qkv.attention(*few, qkv.Causal(), still), truth(*few))
        near(qkv.attention(*few, no_sinks), truth(*few, causal=False))
        near(qkv.attention(*one, qkv.Causal(), q_offset="end"), truth(*one))
        near(qkv.attention(*one, no_sinks, q_offset="end"), truth(*one))

    still = qkv.RoPE(inv_freq=np.full(16, 1e-30))  # which turns nothing
    no_sinks = qkv.Sinks(np.full(4, -1e9, np.float32))
    qkv.set_num_threads(1)
    for _ in range({calls}):
        call()
    refuse("mdwe")
    qkv.set_num_threads(2)
    for _ in range(3):
        call()
    near(qkv.attention(*few, qkv.SlidingWindow(90, 0)), truth(*few))
    assert qkv.plan(*few).backend == "blocked"
    if {library!r} == "numpy" and {calls} > 1:
        assert isinstance(jobs._workers, PythonThreads)
    """
    in_a_process(PRELUDE.format(folder=FOLDER) + textwrap.dedent(script))


def test_code_that_may_not_run_is_not_built() -> None:
    refused(
        """
        from qkv.backends.cpu.compiler.compile import EmitFunction, build
        from qkv.backends.cpu.machine.host import host
        try:
            build(EmitFunction("builtins", "str"), ("define void @job() { ret void }",), host())
        except qkv.KernelBuildError as error:
            assert "refuses this process executable memory" in str(error)
        else:
            raise AssertionError("it was built")
        """
    )
