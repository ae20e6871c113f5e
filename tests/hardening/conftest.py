"""What the tests of this folder share."""

import pytest

from qkv.backends.cpu.machine.host import host


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An instruction set, forced, with `splits_operands` if "parts" follows its name."""
    name, _, parts = str(request.param).partition(" ")
    monkeypatch.setenv("QKV_ISA", name)
    assert host().isa == name
    if parts:
        request.getfixturevalue("splits_operands")
    return str(request.param)
