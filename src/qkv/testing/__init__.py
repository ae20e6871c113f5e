"""Cases, oracle, tolerances and the conformance suite: public, for backends of other packages."""

from qkv.testing.case import DTYPES, Case, Inputs, lay_out
from qkv.testing.cases import cases
from qkv.testing.conformance import check_case
from qkv.testing.fuzz import random_case
from qkv.testing.oracle import Truth, truth
from qkv.testing.tolerances import Bounds, bounds, plain, ulp

__all__ = [
    "DTYPES",
    "Bounds",
    "Case",
    "Inputs",
    "Truth",
    "bounds",
    "cases",
    "check_case",
    "lay_out",
    "plain",
    "random_case",
    "truth",
    "ulp",
]
