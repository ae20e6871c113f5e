"""Jobs on the threads of torch's OpenMP library: who joins, and when nobody does."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch
from counted_job import KERNEL, VISITS, Launch

import qkv
from processes import in_a_process
from qkv.backends.cpu.threads import jobs
from qkv.backends.cpu.threads.openmp import Team
from qkv.backends.cpu.threads.openmp_code import emit_team
from qkv.bridges.torch.openmp import on_torch_threads, torch_openmp
from qkv.process.openmp import caller

if sys.platform != "linux" or not torch.backends.openmp.is_available():
    pytest.skip(
        "torch has no OpenMP library here that is called as GNU's is", allow_module_level=True
    )


@pytest.fixture
def team():
    """Four threads of torch, and leave to use as many."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    qkv.set_num_threads(4)
    yield Team(torch_openmp())
    qkv.set_num_threads(None)
    torch.set_num_threads(before)


def test_as_many_as_are_wanted_join_under_numbers_of_their_own(team) -> None:
    for wanted in (4, 2, 3, 4):
        launch = Launch(expected=wanted)
        assert team.run(KERNEL, launch, wanted)
        assert launch.check() <= set(range(wanted))
        assert launch.words[VISITS:].tolist() == [1] * wanted + [0] * (16 - wanted)


def test_a_team_of_more_threads_than_may_be_used_is_not_waited_for(team) -> None:
    qkv.set_num_threads(3)
    launch = Launch()
    assert not team.run(KERNEL, launch, 2)
    assert not launch.words[VISITS:].any()


def test_a_team_of_fewer_threads_than_a_job_wants_is_not_used(team) -> None:
    torch.set_num_threads(2)
    assert not team.run(KERNEL, Launch(), 3)
    assert team.run(KERNEL, Launch(expected=2), 2)


def test_who_finds_another_caller_inside_goes_elsewhere(team) -> None:
    slow = Launch(expected=3)  # Two of the team, and the word of this thread.

    def call() -> None:
        torch.set_num_threads(4)  # Each thread of Python has its own number.
        assert team.run(KERNEL, slow, 2)

    first = threading.Thread(target=call)
    first.start()
    while slow.words[0] < 2:
        pass
    assert not team.run(KERNEL, Launch(), 2)
    slow.words[0] += 1
    first.join()
    slow.check()
    assert team.run(KERNEL, Launch(expected=2), 2)


def test_threads_flush_subnormals_when_their_caller_does_and_only_then(team) -> None:
    # Threads that are started meanwhile would flush for ever, as their starter does.
    assert team.run(KERNEL, Launch(expected=4), 4)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flushed = Launch(expected=4)
        assert team.run(KERNEL, flushed, 4)
    finally:
        torch.set_flush_denormal(False)
    assert (flushed.results == 0).all()
    # What torch computes on the same threads afterwards is as it was.
    tiny = torch.full((2**22,), 1e-40)
    assert ((tiny * 2) != 0).all()


def test_tensors_have_the_bits_of_arrays(team, every_task_a_thread, monkeypatch) -> None:
    ran = []
    monkeypatch.setattr(Team, "run", lambda *a, real=Team.run: ran.append(real(*a)) or ran[-1])
    arrays = np.random.default_rng(0).normal(size=(4, 2, 3, 70, 16)).astype(np.float32)
    query, key, value, grad_out = arrays
    for _ in range(3):
        expected, pullback = qkv.vjp(query, key, value, qkv.Causal())
        wanted = pullback(grad_out)
        assert not ran
        tensors = [torch.from_numpy(a).requires_grad_() for a in arrays[:3]]
        out = qkv.attention(*tensors, qkv.Causal())
        assert set(ran) == {True}
        ran.clear()
        out.backward(torch.from_numpy(grad_out))
        assert set(ran) == {True}
        ran.clear()
        assert out.detach().numpy().tobytes() == np.asarray(expected).tobytes()
        for tensor, gradient in zip(tensors, (wanted.query, wanted.key, wanted.value), strict=True):
            assert tensor.grad.numpy().tobytes() == np.asarray(gradient).tobytes()
        with torch.no_grad():
            qkv.attention(*tensors, qkv.Causal())
        assert set(ran) == {True}
        ran.clear()
    assert caller.openmp is None


def test_a_call_that_fails_leaves_no_trace() -> None:
    with pytest.raises(qkv.ShapeError):
        qkv.attention(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 4))
    assert caller.openmp is None
    with pytest.raises(ValueError, match="inside"), on_torch_threads():
        raise ValueError("inside")
    assert caller.openmp is None


def test_long_jobs_run_on_threads_of_our_own(team, monkeypatch) -> None:
    """The thread that waits for Ctrl-C would begin a team of its own for one job."""
    monkeypatch.setattr(Team, "run", lambda *_: pytest.fail("ran on the team"))
    with on_torch_threads():
        jobs.run(KERNEL, launch := Launch(), 2, seconds=1.0)
    launch.check()


FORKED = """
    import os, torch
    torch.set_num_threads(2)
    if {early}:
        import qkv
    matrix = torch.randn(800, 800)
    matrix @ matrix  # Threads begin, if they are not yet there.

    def call():
        import qkv
        from qkv.backends.cpu.passes import workers
        workers._WORTH_A_THREAD = 1.0
        qkv.set_num_threads(2)
        x = torch.randn(2, 4, 100, 16)
        assert qkv.attention(x, x, x).isfinite().all()
"""


@pytest.mark.slow
@pytest.mark.parametrize("calls", [False, True], ids=["first call", "called before"])
def test_a_forked_child_has_no_team(calls) -> None:
    """The library believes in threads there that do not exist, and would wait for ever."""
    in_a_process(
        FORKED.format(early=True)
        + f"""
    if {calls}:
        call()
    child = os.fork()
    if not child:
        call()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    )


@pytest.mark.slow
def test_a_child_of_multiprocessing_that_imports_qkv_has_no_team() -> None:
    in_a_process(
        FORKED.format(early=False)
        + """
    import multiprocessing
    child = multiprocessing.get_context("fork").Process(target=call)
    child.start()
    child.join(120)
    assert child.exitcode == 0
    """
    )


@pytest.mark.parametrize(("processor", "words"), [("x86", "ldmxcsr"), ("arm", "set.fpcr")])
def test_the_code_restores_the_floating_mode_of_its_threads(processor, words) -> None:
    member = emit_team(processor).split("define internal void @")[1].split("define")[0]
    calls = [line for line in member.splitlines() if "call void @" in line and words in line]
    assert len(calls) == 2, "the caller's, and its own again"
