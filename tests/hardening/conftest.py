"""What the tests of this folder share."""

import pytest

from qkv.backends.cpu.host import host


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set, forced."""
    monkeypatch.setenv("QKV_ISA", request.param)
    assert host().isa == request.param
    return str(request.param)
