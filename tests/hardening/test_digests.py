"""The bits of results are those that were recorded, on every instruction set, real or emulated."""

import json
import platform

import numpy as np
import pytest
from digests import CASES, RECORDED, digests, results

from forced import as_it_runs, runs_here
from qkv.backends.cpu.machine.host import EMULATED
from qkv.testing import Case
from watched import forget_prepared_calls

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
KNOWN = json.loads(RECORDED.read_text())
ROUNDING = {"float64": 2.0**-48, "float32": 2.0**-18, "float16": 2.0**-8, "bfloat16": 2.0**-5}
"""A few units in the last place of the largest element."""


@pytest.mark.slow
@pytest.mark.sampled(
    ("isa", "case"), [(isa, case) for isa in KNOWN for case in CASES], one_in=9, ids=str
)
def test_bits_are_those_of_before(
    isa: str, case: Case, monkeypatch: pytest.MonkeyPatch, no_prepared_calls: None
) -> None:
    """Real tiles have digests of their own, since they may add in another order; see below."""
    monkeypatch.setenv("QKV_ISA", isa + EMULATED if isa == "amx" else as_it_runs(isa))
    found = digests(case)
    if not IS_X86:
        # Weights of `top` are NumPy's exp, which has other bits on other architectures.
        found.pop(f"{case.name}: top", None)
    assert found == {name: KNOWN[isa][name] for name in found}


@pytest.mark.slow
@pytest.mark.sampled("case", CASES, one_in=9, ids=str)
def test_real_and_emulated_tiles_agree(
    case: Case, monkeypatch: pytest.MonkeyPatch, no_prepared_calls: None
) -> None:
    """Results agree within the rounding of the type; without tiles, with narrower vectors."""
    found = []
    for isa in ("amx" + EMULATED, "amx" if runs_here("amx") else as_it_runs("avx2")):
        monkeypatch.setenv("QKV_ISA", isa)
        forget_prepared_calls()
        found.append(results(case))
    (dtype,) = case.dtypes
    for kind in ("out", "lse", "gradients"):
        for ours, theirs in zip(*(each.get(kind, ()) for each in found), strict=True):
            size = np.abs(theirs[np.isfinite(theirs)].astype(float)).max()
            np.testing.assert_allclose(
                ours.astype(float), theirs.astype(float), rtol=0, atol=ROUNDING[dtype] * size
            )
