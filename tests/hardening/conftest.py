"""What the tests of this folder share."""

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" in metafunc.fixturenames:
        metafunc.parametrize("isa", instruction_sets(), indirect=True)


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set, forced."""
    monkeypatch.setenv("QKV_ISA", request.param)
    assert host().isa == request.param
    return str(request.param)
