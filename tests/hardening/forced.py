"""Instruction sets that can be forced on this machine."""

import pytest

from qkv.backends.cpu.host import host
from qkv.errors import ArgumentError


def instruction_sets() -> list[str]:
    """Those that run here, the most able first."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for isa in ("amx", "avx512-bf16", "avx512", "avx2", "sse", "neon"):
            patch.setenv("QKV_ISA", isa)
            try:
                found.append(host().isa)
            except ArgumentError:
                continue
    return found
