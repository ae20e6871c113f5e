"""The backend "cpu" that counts what it is asked, as a backend of one's own would see it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import qkv
from qkv.backends import Passes, Prepared, Refusal, register, unregister
from qkv.backends.cpu import CpuBackend


class Watched(CpuBackend):
    """`computed` counts passes over checked problems."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0
        self._made: list[tuple[Passes, bool]] = []

    def prepared(self, *passes: Passes, any_length: bool | None = None) -> int:
        """How many problems were made ready for these passes, for any number of keys or for one."""
        return sum(p in passes and any_length in (None, free) for p, free in self._made)

    def run(self, problem: Any) -> Any:
        self.computed += 1
        return super().run(problem)

    def run_for_backward(self, problem: Any) -> Any:
        self.computed += 1
        return super().run_for_backward(problem)

    def run_with_statistics(self, problem: Any) -> Any:
        self.computed += 1
        return super().run_with_statistics(problem)

    def backward(self, problem: Any, inputs: Any) -> Any:
        self.computed += 1
        return super().backward(problem, inputs)

    def prepare(self, problem: Any, passes: Passes, **given: Any) -> Prepared | None:
        made = super().prepare(problem, passes, **given)
        if made is not None:
            self._made.append((passes, given.get("any_length", False)))
        return made


class _NeverChosen:
    """A backend that refuses everything."""

    name = "never chosen"
    priority = -1

    def refusals(self, spec: Any) -> tuple[Refusal, ...]:
        return (Refusal("is a problem", "none at all"),)

    def blocks(self, spec: Any) -> tuple[int, int]:
        return 1, 1

    def scratch_bytes(self, spec: Any) -> int:
        return 0

    def run(self, problem: Any) -> Any:
        raise NotImplementedError


def forget_prepared_calls() -> None:
    """The next call of each form is a first one: what was prepared is forgotten.

    What was prepared holds as long as no backend comes or goes, because the one that comes may be
    chosen instead of the one that prepared.
    """
    register(_NeverChosen())
    unregister(_NeverChosen.name)


def python_calls(function: Callable[[], Any]) -> int:
    """How many functions of qkv that are written in Python run on this thread."""
    count = 0

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(_SOURCE)

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


_SOURCE = str(Path(qkv.__file__).parent)
