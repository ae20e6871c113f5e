"""The compiled backend."""

from __future__ import annotations

from qkv.backends import Refusal
from qkv.partial import Partial
from qkv.problem.spec import Problem, Spec


class CpuBackend:
    """placeholder"""

    name = "cpu"
    priority = 100

    def refusals(self, spec: Spec) -> tuple[Refusal, ...]:
        return (Refusal("not built", "nothing"),)

    def blocks(self, spec: Spec) -> tuple[int, int]:
        return 64, 128

    def scratch_bytes(self, spec: Spec) -> int:
        return 0

    def run(self, problem: Problem) -> Partial:
        raise AssertionError
