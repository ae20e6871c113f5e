"""A processor with matrix tiles that this process may not use: plans and `qkv info` say so.

The processor's features and the system's answer are stood in for; nothing is computed.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
from dataclasses import replace

import numpy as np
import pytest

import qkv
from processes import in_a_process
from qkv.backends.cpu.machine import host as cpu_host
from qkv.backends.cpu.machine import tile_permission
from qkv.backends.cpu.machine.processor import processor
from qkv.cli import main

ANSWERS = {
    errno.ENOSPC: "signal stack",
    errno.EINVAL: "Linux 5.16",
    errno.EOPNOTSUPP: "switched off",
    errno.EPERM: os.strerror(errno.EPERM),
}
"""What the system may say, and words of what is told of it."""


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch):
    """Let a processor with tiles be found, on which the system gives this answer."""
    features = dict.fromkeys(frozenset().union(*cpu_host._REQUIRED.values()), True)
    described = replace(processor(), features=features)
    monkeypatch.setattr(cpu_host, "processor", lambda: described)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("QKV_ISA", raising=False)

    def give(number: int) -> None:
        monkeypatch.setattr(tile_permission, "_request", lambda: number)
        forget()

    def forget() -> None:
        tile_permission.tile_refusal.cache_clear()
        cpu_host._host.cache_clear()

    yield give
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize("number", list(ANSWERS))
def test_a_refusal_is_told_with_its_reason(answer, number: int, capsys) -> None:
    answer(number)
    x = np.ones((2, 4), np.float32)
    plan = qkv.plan(x, x, x)
    assert plan.backend == "cpu"
    (note,) = plan.notes
    assert "matrix tiles (amx) are not used" in note
    assert ANSWERS[number] in note
    assert f"note        {note}" in str(plan)
    assert main(["info", "--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert machine["instruction set"] == "avx512"
    assert ANSWERS[number] in machine["matrix tiles (amx)"]
    assert main(["plan", "--q-len", "8"]) == 0
    assert ANSWERS[number] in capsys.readouterr().out
    assert main(["plan", "--q-len", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == [note]


def test_nothing_is_said_where_nothing_is_withheld(answer, monkeypatch, capsys) -> None:
    x = np.ones((2, 4), np.float32)
    answer(0)
    assert cpu_host.host().isa == "amx"
    assert qkv.plan(x, x, x).notes == ()
    answer(errno.ENOSPC)
    monkeypatch.setenv("QKV_ISA", "avx2")  # chosen, and not withheld
    assert qkv.plan(x, x, x).notes == ()
    assert main(["info"]) == 0
    assert "matrix tiles" not in capsys.readouterr().out


def test_other_backends_say_nothing_of_tiles(answer) -> None:
    answer(errno.ENOSPC)
    x = np.ones((2, 4), np.float32)
    assert qkv.plan(x, x, x, backend="blocked").notes == ()


def test_asking_for_tiles_that_are_refused_says_why(answer, monkeypatch) -> None:
    answer(errno.ENOSPC)
    monkeypatch.setenv("QKV_ISA", "amx")
    with pytest.raises(qkv.ArgumentError, match=r"signal stack \(sigaltstack\) too small"):
        cpu_host.host()


def test_the_system_of_this_machine_gives_an_answer() -> None:
    """The real request; where there are tiles, a small signal stack makes the system refuse."""
    script = """
    from qkv.backends.cpu.machine import tile_permission
    if {small}:
        import ctypes
        size = 8192
        stack = ctypes.create_string_buffer(size)
        class Stack(ctypes.Structure):
            _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
        own = Stack(ctypes.addressof(stack), 0, size)
        assert ctypes.CDLL(None).sigaltstack(ctypes.byref(own), None) == 0
    print(tile_permission.tile_refusal())
    """
    refusal = in_a_process(script.format(small=False)).strip()
    refused_later = in_a_process(script.format(small=True)).strip()
    if refusal:
        assert refused_later == refusal
    else:
        assert "signal stack" in refused_later
