"""The bits of results are those that were recorded, on every instruction set, real or emulated."""

import json

import pytest
from digests import CASES, RECORDED, digests

from forced import as_it_runs
from qkv.testing import Case

KNOWN = json.loads(RECORDED.read_text())


@pytest.mark.sampled(
    ("isa", "case"), [(isa, case) for isa in KNOWN for case in CASES], one_in=9, ids=str
)
def test_bits_are_those_of_before(
    isa: str, case: Case, monkeypatch: pytest.MonkeyPatch, no_prepared_calls: None
) -> None:
    monkeypatch.setenv("QKV_ISA", as_it_runs(isa))
    found = digests(case)
    assert found == {name: KNOWN[isa][name] for name in found}
