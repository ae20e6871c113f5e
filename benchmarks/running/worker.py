"""One contender's process: it prepares, checks, and runs when it is told to.

Messages are lines of JSON on standard input, answers lines of JSON on what was standard output;
whatever libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import Contender, Prepared, contender
from benchmarks.problems.reference import judge, make_inputs
from benchmarks.problems.workloads import workload_of
from qkv.errors import UnsupportedError

__all__ = ["Worker", "answered", "fall_asleep", "serve"]

_MOST_CALLS = 200
"""Calls of one turn that are timed one by one."""
_LONG_CALL = 1.0
"""Seconds of a call that is a turn by itself."""
_SETTLED = 0.0005
"""Seconds of processor time in a pause by which a process counts as asleep."""
_PAUSE = 0.005
_LONGEST_WAIT = 0.5


class Worker:
    """What is prepared in this process, and the answers to messages."""

    def __init__(self, find: Callable[[str], Contender] = contender) -> None:
        self._find = find
        self._prepared: dict[str, Prepared] = {}

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one message; what goes wrong is an answer too."""
        tasks: dict[str, Callable[..., dict[str, Any]]] = {
            "prepare": self.prepare,
            "turn": self.turn,
            "memory": self.memory,
            "release": self.release,
        }
        return answered(tasks[message["do"]], message["with"])

    def prepare(self, name: str, workload: str, threads: int) -> dict[str, Any]:
        """Arrays of its own, and one run that is checked; back when all threads sleep."""
        one, what = self._find(name), workload_of(workload)
        if one.version is None:
            return {"state": "absent", "detail": f"{one.package} is not installed"}
        inputs = make_inputs(what)
        prepared = one.prepare(what, inputs, threads)
        verdict = judge(what, inputs, prepared.read(prepared.run()), prepared.dtype)
        seen = {"output": verdict.output, "error": verdict.error, "bound": verdict.bound}
        if not verdict.right:
            detail = f"{verdict.output} is off by {verdict.error:.1e}; the bound is "
            return {"state": "wrong", "detail": f"{detail}{verdict.bound:.1e}", **seen}
        self._prepared[name] = prepared
        fall_asleep()
        return {"state": "ready", "detail": "", **seen}

    def turn(self, name: str, seconds: float, least: int) -> dict[str, Any]:
        """Times of single calls, after one that nobody times; back when all threads sleep."""
        run = self._prepared[name].run
        gc.collect()
        gc.disable()
        try:
            first = _timed(run)
            times = [first] if first >= _LONG_CALL else []
            while first < _LONG_CALL and not _enough(times, seconds, least):
                times.append(_timed(run))
        finally:
            gc.enable()
        fall_asleep()
        return {"seconds": times}

    def memory(self, name: str, workload: str, threads: int) -> dict[str, Any]:
        """Bytes in use at the highest point of one call, beyond its input and output.

        A short problem comes first, so that code and pools are there.
        """
        one, what = self._find(name), workload_of(workload)
        if one.version is None:
            return {"state": "absent", "detail": f"{one.package} is not installed"}
        short = replace(what, shape=replace(what.shape, q_len=256, kv_len=256))
        one.prepare(short, make_inputs(short), threads).run()
        inputs = make_inputs(what)
        prepared = one.prepare(what, inputs, threads)
        gc.collect()
        _reset_peak()
        before = _status("VmRSS")
        result = prepared.run()
        peak = _status("VmHWM")
        found = prepared.read(result)
        verdict = judge(what, inputs, found, prepared.dtype)
        seen = {"output": verdict.output, "error": verdict.error, "bound": verdict.bound}
        if not verdict.right:
            return {"state": "wrong", "detail": f"{verdict.output} is wrong", **seen}
        out = inputs.query[..., :1].size * what.shape.v_head_dim * inputs.query.itemsize
        return {"state": "ready", "detail": "", "extra": max(0, peak - before - out), **seen}

    def release(self) -> dict[str, Any]:
        """Forget what was prepared."""
        self._prepared.clear()
        gc.collect()
        return {}


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - began
    del result
    return round(seconds, 9)


def _enough(times: list[float], seconds: float, least: int) -> bool:
    return len(times) >= least and (sum(times) >= seconds or len(times) >= _MOST_CALLS)


def fall_asleep() -> None:
    """Wait until this process uses no processor: pools of threads spin for a while."""
    until = time.monotonic() + _LONGEST_WAIT
    while time.monotonic() < until:
        before = time.process_time()
        time.sleep(_PAUSE)
        if time.process_time() - before < _SETTLED:
            return


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise UnsupportedError("the peak of memory can be read on Linux only.") from error


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UnsupportedError("the peak of memory can be read on Linux only.")


def _one_line(error: BaseException) -> str:
    if isinstance(error, UnsupportedError):
        reasons = "; ".join(f"{who}: {why}" for who, why in error.seen if who != "problem")
        return f"{error.fact} {reasons}".strip()
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""


def serve(answer: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Answer each line of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


def answered(task: Callable[..., dict[str, Any]], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a task returns; what goes wrong is an answer too."""
    try:
        return task(**arguments)
    except UnsupportedError as error:
        return {"state": "refused", "detail": _one_line(error)}
    except ImportError as error:
        return {"state": "absent", "detail": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"state": "failed", "detail": f"{type(error).__name__}: {_one_line(error)}"}


if __name__ == "__main__":
    serve(Worker().answer)
