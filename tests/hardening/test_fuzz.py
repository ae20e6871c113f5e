"""Random problems against float64: `--fuzz 50000 --fuzz-seed 1` for a long run.

A failure names its problem, `random_case(seed, structure, number)`, from which

    qkv.testing.check_case("cpu", random_case(seed, structure, number))

makes it again in this folder (`from fuzz import random_case`): of an odd number, once
`CHEAP_OPERATIONS` of `schedule` and of `streaming` is 0; in parts, once
`qkv.backends.cpu.split_bf16.choice.LEAST_SIZES` says (1, 1) of its type.
"""

import numpy as np
import pytest
from fuzz import random_case
from fuzz.memory import scattered
from fuzz.mods import random_mod

from forced import IN_PARTS, kernels
from qkv.backends.cpu import CpuBackend
from qkv.problem.check import check
from qkv.testing import DTYPES, check_case, truth
from qkv.testing.tolerances import plain

EACH = 25
"""Problems of one structure, at least; a kernel takes longer to compile than they do."""
MOST_STRUCTURES = 1200


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "structure" in metafunc.fixturenames:
        number = metafunc.config.getoption("fuzz")
        structures = max(1, min(number // EACH, MOST_STRUCTURES))
        count = -(-number // structures)
        chosen = [("", structure, count) for structure in range(structures)]
        if any(kernel.endswith("parts") for kernel in kernels()):
            seed = metafunc.config.getoption("fuzz_seed")
            many = [s for s in range(structures) if may_be_in_parts(seed, s)]
            chosen += [("in parts", structure, -(-count // 2)) for structure in many]
        metafunc.parametrize(("kernel", "structure", "count"), chosen)


def may_be_in_parts(seed: int, structure: int) -> bool:
    """Whether problems of a structure have such a type, and not all few queries."""
    drawn = [random_case(seed, structure, number) for number in range(8)]
    return drawn[0].dtypes[0] in IN_PARTS and any(case.shape.q_len > 12 for case in drawn)


def test_random_problems(
    kernel: str, structure: int, count: int, request: pytest.FixtureRequest
) -> None:
    if kernel:
        request.getfixturevalue("splits_operands")
    seed = request.config.getoption("fuzz_seed")
    for number in range(0, count, 2):
        check_case("cpu", random_case(seed, structure, number))
    request.getfixturevalue("masks_of_few_pairs_are_read")
    for number in range(1, count, 2):
        check_case("cpu", random_case(seed, structure, number))


# The problems


def drawn(structures=120, numbers=3):
    return [random_case(0, s, n) for s in range(structures) for n in range(numbers)]


def test_a_random_case_is_the_same_in_every_process() -> None:
    for case in drawn(20, 2):
        again = eval(case.name)  # the name is the call
        (dtype,) = case.dtypes
        for first, second in zip(case.build(dtype).arrays, again.build(dtype).arrays, strict=True):
            assert first.strides == second.strides
            np.testing.assert_array_equal(first.astype(float), second.astype(float))


def test_random_cases_are_of_every_kind() -> None:
    cases = drawn()
    shapes = [case.shape for case in cases]
    assert {case.dtypes[0] for case in cases} == set(DTYPES)
    assert {case.layout for case in cases} == {"bhld", "blhd"}
    assert {0, 1} <= {s.q_len for s in shapes} & {s.kv_len for s in shapes}
    assert {0, 1, 2, 3} == {len(s.batch_shape) for s in shapes}
    assert len({s.head_dim for s in shapes}) > 50
    assert max(s.head_dim for s in shapes) > 256
    assert max(s.v_head_dim for s in shapes) > 256
    assert any(s.num_heads > s.num_kv_heads > 1 for s in shapes)
    assert any(s.kv_len > 1000 for s in shapes)
    kinds, strides = set(), set()
    for case in cases:
        call = case.build(case.dtypes[0])
        kinds |= {type(variant).__name__ for variant in call.variants}
        for array in call.arrays:
            if array.size > 1:
                signs = tuple(np.sign(array.strides[-2:]).tolist())
                strides.add((signs, array.strides[-1] == array.itemsize))
    assert {
        "ALiBi", "AllOf", "AnyOf", "Bias", "BlockSparse", "Causal", "Dropout", "GlobalTokens",
        "KeyLengths", "Mask", "Not", "Prefix", "RelativeBias", "RoPE", "ScoreMod", "Segments",
        "Sinks", "SlidingWindow", "Softcap", "Strided", "ndarray",
    } <= kinds  # fmt: skip
    assert {(s, False) for s in [(1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1), (1, 0)]} <= strides


def test_scattered_arrays_keep_their_values() -> None:
    rng = np.random.default_rng(0)
    array = rng.normal(size=(3, 4, 5)).astype(np.float32)
    changed = 0
    for _ in range(200):
        there = scattered(array, rng)
        assert there.shape == array.shape
        repeats = tuple(slice(None) if s else slice(1) for s in there.strides)
        np.testing.assert_array_equal(there[repeats], array[repeats])
        changed += there.strides != array.strides
    assert changed > 80


def test_mods_of_float32_are_rounded_at_every_step() -> None:
    """The plain computation of these problems would else be nearer than any can be."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=200).astype(np.float32)
    other = 0
    for _ in range(40):
        mod = random_mod(rng)(rng).fn
        exact, found = (mod(s, 1, 0, 7, np.arange(200)) for s in (scores.astype(float), scores))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
        other += (found != exact.astype(np.float32)).any()
    assert other > 20


def test_one_score_is_added_in_its_own_type() -> None:
    """BLAS adds a single dot product in double, in which one order is as good as another."""
    rng = np.random.default_rng(3)
    query, key = rng.normal(size=(2, 1, 1, 20)).astype(np.float32)
    exact = truth(query, key, key)
    found = {float(plain(exact.heads[0], (), "float32", order)[1][0]) for order in range(40)}
    assert len(found) > 1


# That it finds what is wrong


def test_a_key_too_few_is_found() -> None:
    """The last key of some plain problems, forgotten."""

    class Forgetful(CpuBackend):
        name = "forgetful"

        def run(self, problem):
            spec, o = problem.spec, problem.operands
            if spec.kv_len % 4 == 3 and not (spec.scores or spec.masks or spec.rotation):
                key, value = o.key[..., :-1, :], o.value[..., :-1, :]
                problem = check(o.query, key, value, (), scale=o.scale)
            return super().run(problem)

    plain = [case for case in drawn(60, 8) if not case.build(case.dtypes[0]).variants]
    assert any(case.shape.kv_len % 4 == 3 for case in plain)

    def check_all() -> None:
        for case in plain:
            check_case(Forgetful(), case)

    with pytest.raises(AssertionError, match=r"on 'random_case\(0, \d+, \d+\)'.* is .* off"):
        check_all()
