"""Ctrl-C on a call that would take minutes: it is answered, and the next call is right."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import qkv
from qkv.backends.cpu.compiler.compile import EmitFunction, build
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.threads import jobs as threads

pytestmark = pytest.mark.usefixtures("two_threads")

ANSWER = """
import signal  # what a shell runs in the background ignores SIGINT, and so do its children
signal.signal(signal.SIGINT, signal.default_int_handler)
"""

SCRIPT = """
import numpy as np, qkv
x = np.random.default_rng(0).normal(size=(1, 64, 64)).astype(np.float32)
before = qkv.attention(x, x, x, backend="cpu")
long = np.broadcast_to(x, (64, 64, 64)).repeat(2048, axis=1)
try:
    print("running", flush=True)
    qkv.attention(long, long, long, backend="cpu")
except KeyboardInterrupt:
    print("interrupted", np.array_equal(before, qkv.attention(x, x, x, backend="cpu")))
"""


ONE_TASK = """
import os
import numpy as np, qkv
x = np.random.default_rng(0).normal(size=(1, 64, 64)).astype(np.float32)
before = qkv.attention(x, x, x, backend="cpu")
many = np.broadcast_to(x[:, :1], (1, 400_000_000, 64))
try:
    print("running", flush=True)
    qkv.attention(x, many, many, backend="cpu")
except KeyboardInterrupt:
    print("interrupted", np.array_equal(before, qkv.attention(x, x, x, backend="cpu")), flush=True)
    os._exit(0)  # else the end of the process waits for the task
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one child alone")
@pytest.mark.parametrize("script", [SCRIPT, ONE_TASK], ids=["many tasks", "one task"])
def test_a_long_call_is_interrupted_and_leaves_no_trace(script) -> None:
    """Nothing can be cut between 64 queries and 400 million keys."""
    child = subprocess.Popen(
        [sys.executable, "-c", ANSWER + script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "running\n"
        time.sleep(2)  # to be inside compiled code
        child.send_signal(signal.SIGINT)
        # Without an answer the call would run on for more than a minute.
        out, err = child.communicate(timeout=30)
    finally:
        child.kill()
        child.wait()
    assert (out, err) == ("interrupted True\n", "")


def test_ctrl_c_in_a_compilation_leaves_the_collector_of_cycles_on(monkeypatch) -> None:
    def disable_and_interrupt(disable=gc.disable) -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", disable_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(EmitFunction("builtins", "str"), ("; never compiled",), host())
    is_on = gc.isenabled()
    gc.enable()
    assert is_on


def test_an_error_in_a_long_job_is_raised(monkeypatch) -> None:
    class Broken:
        def run(self, arguments, worker):
            raise ValueError("of the job")

    with pytest.raises(ValueError, match="of the job"):
        threads.run(Broken(), None, 1, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward", "top"])
def test_what_costs_more_than_its_products_is_cut_into_more_slices(direction, monkeypatch) -> None:
    """Signals are answered between slices: 1.6 thousand million pairs take about three seconds."""
    x = np.zeros((1, 40_000, 1), np.float32)
    variants = (qkv.Softcap(5.0), qkv.Dropout(0.1, seed=1))
    calls = []
    monkeypatch.setattr(threads, "run", lambda *call: calls.append(call))
    qkv.set_num_threads(1)
    try:
        match direction:
            case "forward":
                qkv.attention(x, x, x, *variants, backend="cpu")
            case "backward":
                qkv.vjp(x, x, x, *variants, backend="cpu")[1](x)
            case "top":
                qkv.inspect(x, x, x, *variants, backend="cpu").top(2)
    finally:
        qkv.set_num_threads(None)
    assert len(calls) >= 25
