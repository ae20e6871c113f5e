"""Cases, oracle, tolerances and the conformance suite: public, for backends of other packages."""

from qkv.testing.case import DTYPES, Case, Inputs, lay_out
from qkv.testing.cases import cases, cases_of
from qkv.testing.conformance import CHECKS, check_case
from qkv.testing.derivatives import GradientOracle
from qkv.testing.oracle import Truth, truth
from qkv.testing.tolerances import Bounds, bounds, plain, ulp

__all__ = [
    "CHECKS",
    "DTYPES",
    "Bounds",
    "Case",
    "GradientOracle",
    "Inputs",
    "Truth",
    "bounds",
    "cases",
    "cases_of",
    "check_case",
    "lay_out",
    "plain",
    "truth",
    "ulp",
]
