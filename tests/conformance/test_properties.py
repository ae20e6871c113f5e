"""What the suite asks of every backend beside one call.

It asks for gradients, inspection, prepared calls, decoding and tensors.

The cases are those of the suite, and those of variants that live outside `qkv.variants`.
"""

from importlib.util import find_spec

import pytest

from devices import DEVICE
from qkv.backends import (
    DeviceBackend,
    Prepared,
    ResultForm,
    array_at,
    backends,
    register,
    unregister,
)
from qkv.backends.blocked import BlockedBackend
from qkv.backends.cpu import CpuBackend
from qkv.inspection.heads.earlier_tokens import EarlierToken
from qkv.partial import Partial, finish
from qkv.testing import CHECKS, Case, cases, cases_of, check_case
from qkv.variants.masks.same_group import SameGroup

# They are said of batches.
ELSEWHERE = [case for case in cases_of(SameGroup, EarlierToken) if case.shape.batch_shape]
# A backend for devices has the name of its library, which may be absent.
NAMES = [b.name for b in backends() if not isinstance(b, DeviceBackend) or find_spec(b.name)]


def triples(made, checks):
    return [
        pytest.param(case, dtype, what, id=f"{case.name}-{dtype}-{what}")
        for case in made
        for dtype in case.dtypes
        for what in checks
    ]


BESIDE = [what for what in CHECKS if what != "forward"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.sampled(("case", "dtype", "what"), triples(cases(), BESIDE), one_in=600)
def test_properties(backend: str, case: Case, dtype: str, what: str) -> None:
    check_case(backend, case, dtype, what=what, device=DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.sampled(("case", "dtype", "what"), triples(ELSEWHERE, CHECKS), one_in=36)
def test_variants_from_elsewhere(backend: str, case: Case, dtype: str, what: str) -> None:
    is_refused = (backend, dtype) == ("triton", "float64")
    assert check_case(backend, case, dtype, what=what, device=DEVICE) != is_refused


PLAIN = next(case for case in cases() if case.name == "causal, alibi")


class WrongGradients(BlockedBackend):
    """Forgets the scale of the last head's keys."""

    name = "wrong-gradients"

    def backward(self, problem, inputs):
        found = super().backward(problem, inputs)
        found.key[..., -1, :, :] *= 1 + 1e-5
        return found


def gives_always(found: Partial) -> Prepared:
    """A prepared call that gives these results, whatever it is told."""
    results = [ResultForm(array.shape, array.dtype) for array in (found.out, found.lse)]

    def run(addresses, *_) -> bool:
        for form, address, array in zip(
            results, addresses[3:5], (found.out, found.lse), strict=True
        ):
            if address:
                array_at(address, form)[...] = array
        return True

    return Prepared(run, results)


class WrongWhenPrepared(BlockedBackend):
    """What it prepares, it prepares for one call."""

    name = "wrong-when-prepared"

    def prepare(self, problem, passes, *, any_length=False, arrays=(), inputs=None):
        if passes != "forward" or any_length:
            return None
        return gives_always(self.run(problem))

    def add_sinks(self, problem, partial):
        return finish(partial, problem.operands.sinks)


class WrongSteps(BlockedBackend):
    """A backend whose second step is the first again."""

    name = "wrong-steps"

    def prepare(self, problem, passes, *, any_length=False, arrays=(), inputs=None):
        if not any_length:
            return None
        return gives_always(self.run(problem))

    def add_sinks(self, problem, partial):
        return finish(partial, problem.operands.sinks)


class WrongInspection(BlockedBackend):
    """Does not count the first query."""

    name = "wrong-inspection"

    def run_with_statistics(self, problem):
        found, rows = CpuBackend().run_with_statistics(problem)
        rows.entropy[..., 0] += 1e-3
        return found, rows

    def top(self, problem, lse, k, progress=None):
        return None

    def received(self, problem, lse, progress=None):
        return CpuBackend().received(problem, lse, progress)

    def weight_blocks(self, problem, lse):
        return None


@pytest.mark.parametrize(
    ("backend", "what", "fact"),
    [
        (WrongGradients(), "gradients", "gradient of key is .* off"),
        (WrongWhenPrepared(), "prepared", "other values"),
        (WrongSteps(), "decoding", "is .* off"),
        (WrongInspection(), "inspection", "entropy is .* off"),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_what_is_wrong_is_seen(backend, what, fact) -> None:
    with pytest.raises(AssertionError, match=fact):
        check_case(backend, PLAIN, "float64", what=what)


def test_backends_are_registered_as_before() -> None:
    """A backend that its author had registered was unknown to later calls."""

    class Own(BlockedBackend):
        name = "own"

    own, other = Own(), Own()
    register(own)
    try:
        known = backends()
        for backend in (own, other):
            assert check_case(backend, PLAIN, "float64")
            assert [id(each) for each in backends()] == [id(each) for each in known]
    finally:
        unregister("own")
    known = backends()
    assert check_case(BlockedBackend(), PLAIN, "float64")
    assert [id(each) for each in backends()] == [id(each) for each in known]
