"""Random problems against the oracle of `fuzz`; many, with `python -m tests.hardening.fuzz`.

A failure names its problem; `check(random_problem(seed, structure, layout))` runs it again.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from fuzz.bounds import neighbour
from fuzz.calls import calls, keywords
from fuzz.checks import check
from fuzz.draw.memory import scattered
from fuzz.draw.mods import as_function, derivative, evaluate, random_tree
from fuzz.draw.structure import DRAWS, random_problem
from fuzz.oracle import Oracle
from fuzz.oracle.derivatives import multiplied
from fuzz.problem import DTYPES, Problem, Variant, from_json
from fuzz.runner import State, run
from fuzz.shrink import keep, kept, read, shrunk

from qkv.testing import truth
from qkv.variants import ALL
from qkv.variants.masks.causal import Causal

EACH = 25
"""Layouts of one structure; its kernels take longer to compile than many of them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "structure" in metafunc.fixturenames:
        structures = -(-metafunc.config.getoption("fuzz") // EACH)
        metafunc.parametrize("structure", range(structures))


def test_plain_products_are_chains_of_multiply_adds() -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 8, 32), (2, 32, 8)))
    expected = np.zeros((2, 8, 8), np.float32)
    for place in np.ndindex(expected.shape):
        for n in range(32):  # float64 holds the product of two float32 as it is.
            term = float(a[place[0], place[1], n]) * float(b[place[0], n, place[2]])
            expected[place] = np.float32(float(expected[place]) + term)
    np.testing.assert_array_equal(multiplied(a, b), expected)


def test_random_problems(structure: int, request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("fuzz_seed")
    for layout in range(EACH):
        try:
            check(random_problem(seed, structure, layout))
        except Exception as error:
            error.add_note(f"of random_problem({seed}, {structure}, {layout})")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("path", kept(), ids=lambda path: path.stem)
def test_problems_that_once_failed(path) -> None:
    check(read(path))


# The problems


def drawn(structures=300, layouts=4):
    return [random_problem(0, s, n, draws=2) for s in range(structures) for n in range(layouts)]


def same(one, other) -> bool:
    """Whether two problems are the same, strides included."""
    first, second = (json.dumps(p.to_json(), default=str) for p in (one, other))
    return first == second


@pytest.mark.slow
def test_a_random_problem_is_the_same_in_json() -> None:
    for problem in drawn(40, 1):
        stored = json.loads(json.dumps(problem.to_json()))
        assert same(problem, from_json(stored))
        again = problem.only(range(problem.draws))
        assert again.query.strides[1:] == problem.query.strides[1:]
        np.testing.assert_array_equal(again.query, problem.query)


@pytest.mark.slow
def test_random_problems_are_of_every_kind() -> None:
    problems = drawn()
    assert {p.purpose for p in problems} == set(DRAWS)
    assert {p.dtype for p in problems} == set(DTYPES)
    assert {p.layout for p in problems} == {"bhld", "blhd"}
    oracles = [Oracle(p) for p in problems]
    assert {0, 1} <= {o.q_len for o in oracles} & {o.kv_len for o in oracles}
    assert {0, 1, 2, 3} == {len(o.batch_shape) for o in oracles}
    assert len({o.head_dim for o in oracles}) > 30
    assert any(o.num_heads > o.num_heads // o.group_size > 1 for o in oracles)
    assert any(o.kv_len > 300 for o in oracles)
    names = {"Mask"} | {v.name for p in problems for v in p.variants}
    assert names >= {"array"} | {variant.__name__ for variant in ALL}
    strides = set()
    for p in problems:
        for array in (p.query[0], p.key[0], p.value[0]):
            if array.size > 1:
                signs = tuple(np.sign(array.strides[-2:]).tolist())
                strides.add((signs, array.strides[-1] == array.itemsize))
    assert {(s, False) for s in [(1, 1), (-1, 1), (1, -1), (-1, -1), (0, 1)]} <= strides


def test_scattered_arrays_keep_their_values() -> None:
    rng = np.random.default_rng(0)
    array = rng.normal(size=(3, 4, 5)).astype(np.float32)
    changed = 0
    for n in range(200):
        there = scattered(array, rng, draws=bool(n % 2))
        assert there.shape == array.shape
        repeats = tuple(slice(None) if s else slice(1) for s in there.strides)
        np.testing.assert_array_equal(there[repeats], array[repeats])
        changed += there.strides != array.strides
    assert changed > 80


def test_score_mods_as_a_user_writes_them() -> None:
    """Every step in float32 is rounded; derivatives are those of differences."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=200)
    for n in range(60):
        tree, constants = random_tree(rng, forbids=n % 5 == 0), rng.uniform(0.25, 1.0, 8)
        places = 1, 0, 7, np.arange(200)
        exact = evaluate(tree, constants, scores, *places)
        np.testing.assert_allclose(as_function(tree, constants)(scores, *places), exact)
        small = evaluate(tree, constants, scores.astype(np.float32), *places)
        assert small.dtype == np.float32
        np.testing.assert_allclose(small, exact, rtol=1e-5, atol=1e-6)
        value, slope = derivative(tree, constants, scores, *places)
        np.testing.assert_array_equal(value, exact)
        with np.errstate(invalid="ignore"):
            above, below = (evaluate(tree, constants, scores + h, *places) for h in (1e-6, -1e-6))
            found = np.where(np.isneginf(exact), 0, (above - below) / 2e-6)
        bends = np.abs(found - slope) > 1e-6 + 1e-6 * np.abs(found)
        assert bends.mean() < 0.03  # where pieces meet


def test_the_oracle_is_like_the_one_of_every_variant() -> None:
    """`qkv.testing` has a slow one, which shares the variants; both were written by themselves."""
    compared = 0
    for p in drawn(80, 1):
        if p.kv_lens or any(v.name == "ScoreMod" for v in p.variants):
            continue
        call = next(calls(p))
        arrays = [a.swapaxes(-3, -2) if p.layout == "blhd" else a for a in call.arguments[:3]]
        options = {k: v for k, v in keywords(p).items() if k not in ("layout", "backend")}
        known, oracle = truth(*arrays, call.variants, **options), Oracle(p)
        np.testing.assert_allclose(oracle.out[0], known.out, atol=1e-12)
        np.testing.assert_allclose(oracle.lse[0], known.lse, atol=1e-11)
        compared += 1
    assert compared > 40


# That it finds what is wrong, and goes on where it was


PLAIN = Problem(
    "forward", "float32",
    *np.random.default_rng(0).normal(size=(3, 4, 1, 2, 20, 8)).astype(np.float32),
    variants=(Variant("Causal"), Variant("Softcap", {"cap": 3.0})), q_offset="start",
)  # fmt: skip


@pytest.fixture
def later_keys(monkeypatch: pytest.MonkeyPatch, no_prepared_calls: None) -> None:
    """A causal mask that allows one key too many."""

    def lower(self, builder) -> None:
        builder.mask(builder.kv_pos <= builder.q_pos + 1)

    monkeypatch.setattr(Causal, "lower", lower)


@pytest.mark.slow
def test_a_key_too_many_is_found_and_made_small(later_keys, tmp_path) -> None:
    with pytest.raises(AssertionError, match="off, allowed") as found:
        check(PLAIN)
    problem, error = shrunk(PLAIN, found.value, seconds=20)
    assert [v.name for v in problem.variants] == ["Causal"]
    assert problem.draws == 1
    assert problem.query.shape[-2] * problem.key.shape[-2] <= 4
    assert same(problem, read(keep("causal", problem, error, tmp_path)))


@pytest.mark.slow
def test_a_problem_that_is_right_is_right() -> None:
    check(PLAIN)
    for purpose in DRAWS:
        if purpose != "decoding":
            check(replace(PLAIN, purpose=purpose))


def test_neighbours_are_near() -> None:
    found = neighbour(PLAIN, 1)
    assert not same(found, PLAIN)
    np.testing.assert_allclose(found.query, PLAIN.query, rtol=0.04)


def test_a_run_goes_on_where_it_was(tmp_path, monkeypatch) -> None:
    from fuzz import runner

    seen = []
    monkeypatch.setattr(runner, "LAYOUTS", 3)
    monkeypatch.setattr(runner, "random_problem", lambda *key: (seen.append(key), PLAIN)[1])

    def check_all(problem) -> None:
        if len(seen) == 5:
            raise KeyboardInterrupt
        assert len(seen) != 8, "wrong"

    monkeypatch.setattr(runner, "check", check_all)
    path = tmp_path / "state.json"
    failed = lambda name, problem, error: f"{name}: {error}"  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        run(State.read(path, 7), path, 40, 60, failed)
    state = State.read(path, 7)
    assert (state.structure, state.layout, state.cases) == (1, 1, 16)
    run(state, path, 40, 60, failed)
    assert seen == [(7, *divmod(n, 3)) for n in (0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9)]
    assert [f["problem"] for f in state.failures] == ["random_problem(7, 2, 0)"]
    assert State.read(path, 7) == state
    with pytest.raises(SystemExit, match="seed 7, not 8"):
        State.read(path, 8)
