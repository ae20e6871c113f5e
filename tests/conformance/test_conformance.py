"""Every backend, every case, every dtype: refused with reasons, or right."""

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import qkv
from devices import DEVICE
from qkv.backends import DeviceBackend, Refusal, backends
from qkv.backends.blocked import BlockedBackend
from qkv.testing import DTYPES, Case, cases, check_case
from qkv.testing.cases import SMALL

PAIRS = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for case in cases()
    for dtype in case.dtypes
]
# A backend for devices has the name of its library, which may be absent.
NAMES = [b.name for b in backends() if not isinstance(b, DeviceBackend) or find_spec(b.name)]


# The backend varies fastest, so that the dense answer of a case is computed once.
@pytest.mark.slow
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.sampled(("case", "dtype"), PAIRS, one_in=48)
def test_conformance(backend: str, case: Case, dtype: str, request: pytest.FixtureRequest) -> None:
    check_case(backend, case, dtype, device=DEVICE)
    if backend == "cpu":
        request.getfixturevalue("masks_of_few_pairs_are_read")
        check_case(backend, case, dtype)


@pytest.mark.parametrize(
    ("role", "given"),
    [
        ("backend", ("block", cases()[0])),
        ("dtype", ("blocked", cases()[0], "float3")),
        ("what", ("blocked", cases()[0])),
        ("memory", ("blocked", Case("a", SMALL, memory="unalligned"))),
    ],
)
def test_names_that_there_are_not_are_told(role: str, given: tuple[Any, ...]) -> None:
    options = {"what": "gradient"} if role == "what" else {}
    with pytest.raises(qkv.ArgumentError, match=f"{role}='\\w+' is not known") as found:
        check_case(*given, **options)
    meant = {"backend": "blocked", "dtype": "float32", "what": "gradients", "memory": "unaligned"}[
        role
    ]
    assert meant in str(found.value)


def test_a_backend_is_refused_where_its_library_is_not_installed() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, qkv\n"
        "x = np.ones((3, 4))\n"
        "try: qkv.attention(x, x, x, backend='torch')\n"
        "except qkv.UnsupportedError as error: print(error.fact)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "torch cannot run this problem.\n", ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blocked", "reference"])
def test_readable_backends_refuse_none_of_the_cases(name: str) -> None:
    backend = next(b for b in backends() if b.name == name)
    for case in cases():
        call = case.build("float32")
        plan = qkv.plan(*call.arrays, *call.variants, backend=name, **call.keywords)
        assert plan.backend == backend.name


def test_cases_cover_what_they_should() -> None:
    shapes = [case.shape for case in cases()]
    assert {1, 3, 64, 80, 128, 257} <= {s.head_dim for s in shapes}
    assert {0, 1} <= {s.q_len for s in shapes}
    assert {0, 1} <= {s.kv_len for s in shapes}
    assert {0, 1, 2, 3} == {len(s.batch_shape) for s in shapes}
    assert any(s.v_head_dim != s.head_dim for s in shapes)
    assert any(s.num_heads > s.num_kv_heads > 1 for s in shapes)
    assert any(s.q_len > 256 and s.kv_len > 512 for s in shapes)
    assert {d for case in cases() for d in case.dtypes} == set(DTYPES)
    assert {case.memory for case in cases()} == {
        "contiguous", "strided", "reversed", "transposed", "broadcast", "repeated", "read-only",
        "unaligned",
    }  # fmt: skip


def test_a_case_has_the_same_values_every_time() -> None:
    for case in cases()[::7]:
        for first, second in zip(
            case.build("float32").arrays, case.build("float32").arrays, strict=True
        ):
            np.testing.assert_array_equal(first, second)


class SmallTiles(BlockedBackend):
    """Every case crosses many tile edges."""

    name = "small-tiles"

    def blocks(self, spec):
        return 5, 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [c for c in cases() if c.shape.q_len * c.shape.kv_len < 2000], ids=lambda c: c.name
)
@pytest.mark.one_in(4)
def test_results_do_not_depend_on_the_tiles(case: Case) -> None:
    check_case(SmallTiles(), case, "float32")


class Refuses(BlockedBackend):
    """Takes float64 alone."""

    name = "refuses"

    def refusals(self, spec):
        if spec.dtype == "float64":
            return ()
        return (Refusal(f"dtype is {spec.dtype}", "float64"),)


def test_a_refusal_is_not_a_pass() -> None:
    case = Case("refused", SMALL)
    assert check_case(Refuses(), case, "float64") is True
    assert check_case(Refuses(), case, "float32") is False
    assert check_case(Refuses(), case) is True
    assert "refuses" not in [b.name for b in backends()], "the suite leaves nothing registered"


class RefusesAnything(BlockedBackend):
    name = "vague"

    def refusals(self, spec):
        return ["no"]


def test_refusals_must_be_data() -> None:
    with pytest.raises(AssertionError, match="not a tuple of Refusal"):
        check_case(RefusesAnything(), Case("refused", SMALL), "float64")
