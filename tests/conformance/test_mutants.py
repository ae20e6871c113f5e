"""The test of the tests: backends broken on purpose, each of which the suite must catch."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest

from qkv.backends import blocked
from qkv.backends.blocked import BlockedBackend
from qkv.partial import Partial, finish
from qkv.problem.language.expressions import Const, Load, Op, Var, constant, operation, substitute
from qkv.problem.scores import Scores
from qkv.problem.spec import Stage
from qkv.problem.tiles import TileKind, TileRun
from qkv.testing import cases, check_case

MUTANTS = {}


def mutant(make):
    """Register a backend whose `run` is the function, given the intact `run` and the problem."""

    class Mutant(BlockedBackend):
        name = make.__name__

        def run(self, problem):
            with np.errstate(all="ignore"):
                return make(super().run, problem)

    MUTANTS[make.__name__] = Mutant()
    return make


def with_spec(problem, **changes):
    return replace(problem, spec=replace(problem.spec, **changes))


def with_operands(problem, **changes):
    return replace(problem, operands=replace(problem.operands, **changes))


def rewritten(problem, change):
    """The problem with every expression changed."""
    spec = problem.spec
    return with_spec(
        problem,
        scores=tuple(replace(s, node=change(s.node)) for s in spec.scores),
        masks=tuple(replace(s, node=change(s.node)) for s in spec.masks),
    )


def retabled(problem, label, change):
    """The problem with the tables of this label changed."""
    named = {t.name for t in problem.spec.tables if t.label == label}
    tables = problem.operands.tables
    return with_operands(
        problem, tables={n: change(t) if n in named else t for n, t in tables.items()}
    )


def attending(run, problem, attend):
    with patch.object(blocked, "attend", attend):
        return run(problem)


@mutant
def drops_the_last_key(run, problem):
    last = operation("lt", Var("kv_index"), constant(max(problem.spec.kv_len - 1, 1)))
    return run(with_spec(problem, masks=(*problem.spec.masks, Stage("", last))))


@mutant
def causal_is_strict(run, problem):
    def strict(node):
        match node:
            case Op(name=name, args=args):
                return Op("lt" if name == "le" else name, node.kind, tuple(map(strict, args)))
            case Load():
                return Load(node.table, node.kind, tuple(map(strict, node.indices)))
        return node

    return run(rewritten(problem, strict))


@mutant
def forgets_the_scale(run, problem):
    return run(with_operands(problem, scale=1.0))


@mutant
def scales_by_the_value_dimension(run, problem):
    return run(with_operands(problem, scale=max(problem.spec.v_head_dim, 1) ** -0.5))


@mutant
def ignores_the_mask_in_partial_tiles(run, problem):
    def attend(scores, batch, head, rows, runs, block, intact=blocked.attend):
        full = [TileRun(r.start, r.stop, TileKind.FULL) for r in runs]
        return intact(scores, batch, head, rows, full, block)

    return attending(run, problem, attend)


@mutant
def skips_partial_tiles(run, problem):
    def attend(scores, batch, head, rows, runs, block, intact=blocked.attend):
        full = [r for r in runs if r.kind is TileKind.FULL]
        return intact(scores, batch, head, rows, full, block)

    return attending(run, problem, attend)


@mutant
def interleaves_the_groups_of_heads(run, problem):
    spec, operands = problem.spec, problem.operands
    heads = [h % max(spec.num_kv_heads, 1) for h in range(spec.num_heads)]
    problem = with_spec(problem, num_kv_heads=spec.num_heads)
    return run(
        with_operands(
            problem,
            key=operands.key[..., heads, :, :],
            value=operands.value[..., heads, :, :],
        )
    )


@mutant
def gives_lse_in_base_two(run, problem):
    whole = run(problem)
    return Partial(whole.out, whole.lse * whole.lse.dtype.type(np.log2(np.e)))


@mutant
def does_not_rescale(run, problem):
    def attend(scores, batch, head, rows, runs, block):
        count = rows.stop - rows.start
        row_max = np.full(count, -np.inf, scores.dtype)
        row_sum = np.zeros(count, scores.dtype)
        total = np.zeros((count, scores.problem.spec.v_head_dim), scores.dtype)
        for run in runs:
            for start in range(run.start, run.stop, block):
                keys = slice(start, min(start + block, run.stop))
                s = scores.tile(batch, head, rows, keys, run.kind)
                row_max = np.maximum(row_max, s.max(axis=1))
                weights = np.exp(s - np.where(np.isneginf(row_max), 0, row_max)[:, None])
                row_sum += weights.sum(axis=1)
                q_index = np.arange(rows.start, rows.stop)[:, None]
                factors = scores.factors(batch, head, q_index, np.arange(start, keys.stop)[None])
                weights = weights if factors is None else weights * factors
                total += blocked.weighted_sum(weights, s, scores.value(batch, head, keys))
        out = np.where(np.isneginf(row_max)[:, None], 0, total / row_sum[:, None])
        lse = row_max + np.log(row_sum)
        return out, lse, np.zeros_like(lse)

    return attending(run, problem, attend)


@mutant
def averages_blocks_of_keys(run, problem):
    def attend(scores, batch, head, rows, runs, block, intact=blocked.attend):
        parts = [
            intact(scores, batch, head, rows, [TileRun(a, min(a + block, r.stop), r.kind)], block)
            for r in runs
            for a in range(r.start, r.stop, block)
        ]
        if not parts:
            return intact(scores, batch, head, rows, [], block)
        lse = np.logaddexp.reduce([part[1] for part in parts])
        return np.mean([part[0] for part in parts], axis=0), lse, np.zeros_like(lse)

    return attending(run, problem, attend)


@mutant
def gives_nan_for_an_empty_row(run, problem):
    whole = run(problem)
    return Partial(np.where(np.isneginf(whole.lse)[..., None], np.nan, whole.out), whole.lse)


@mutant
def masks_with_a_large_number(run, problem):
    def tile(self, *args, intact=Scores.tile):
        return np.nan_to_num(intact(self, *args), nan=np.nan, posinf=np.inf, neginf=-1e9)

    with patch.object(Scores, "tile", tile):
        return run(problem)


@mutant
def leaks_nan_from_behind_the_mask(run, problem):
    def leaky(weights, scores, value):
        return weights @ value

    with patch.object(blocked, "weighted_sum", leaky):
        return run(problem)


@mutant
def lets_forbidden_values_change_the_rounding(run, problem):
    """The row is right either way, but not to the bit."""
    finite = np.isfinite(problem.operands.value.astype(float)).all()
    whole = run(problem)
    return whole if finite else Partial(np.nextafter(whole.out, np.inf), whole.lse)


@mutant
def swallows_nan(run, problem):
    value = problem.operands.value
    finite = np.where(np.isnan(value), value.dtype.type(0), value)
    return run(with_operands(problem, value=finite))


@mutant
def ignores_kv_offset(run, problem):
    return run(retabled(problem, "kv_offset", np.zeros_like))


@mutant
def ignores_q_offset(run, problem):
    return run(retabled(problem, "q_offset", np.zeros_like))


@mutant
def takes_the_first_offset_for_all_rows(run, problem):
    def first(table):
        return np.full_like(table, table.reshape(-1)[0]) if table.size else table

    return run(retabled(problem, "q_offset", first))


@mutant
def takes_the_first_batch_row_for_all(run, problem):
    return run(rewritten(problem, lambda node: substitute(node, {"batch": Const("int", 0)})))


@mutant
def takes_the_first_head_for_all(run, problem):
    return run(rewritten(problem, lambda node: substitute(node, {"head": Const("int", 0)})))


@mutant
def applies_score_mods_in_reverse(run, problem):
    return run(with_spec(problem, scores=problem.spec.scores[::-1]))


@mutant
def counts_sinks_twice(run, problem):
    return finish(run(problem), problem.operands.sinks)


@mutant
def draws_dropout_of_its_own(run, problem):
    dropout = problem.operands.dropout
    if dropout is None:
        return run(problem)
    return run(with_operands(problem, dropout=replace(dropout, seed=dropout.seed ^ 1)))


@mutant
def drops_before_the_sum(run, problem):
    """Weights that are left add up to one again."""
    whole, dropout = run(problem), problem.operands.dropout
    if dropout is None:
        return whole
    ones = np.ones_like(problem.operands.value)
    left = run(with_operands(problem, value=ones)).out
    return Partial(np.divide(whole.out, left, where=left > 0, out=whole.out), whole.lse)


@mutant
def rotates_one_position_off(run, problem):
    angles = problem.operands.angles
    if angles is None:
        return run(problem)
    return run(with_operands(problem, angles=replace(angles, q_pos=angles.q_pos + 1)))


@mutant
def rotates_the_other_layout(run, problem):
    rotation = problem.spec.rotation
    if rotation is None:
        return run(problem)
    other = "interleaved" if rotation.layout == "half_split" else "half_split"
    return run(with_spec(problem, rotation=replace(rotation, layout=other)))


@mutant
def rounds_weights_to_sixteen_bits(run, problem):
    def rounding(weights, scores, value, intact=blocked.weighted_sum):
        return intact(weights.astype(np.float16).astype(weights.dtype), scores, value)

    with patch.object(blocked, "weighted_sum", rounding):
        return run(problem)


@mutant
def does_not_shift_the_exponent(run, problem):
    """Right until a score is beyond what exp can take."""
    whole = run(problem)
    unshifted = np.log(np.exp(whole.lse))
    return Partial(np.where(np.isposinf(unshifted)[..., None], np.nan, whole.out), whole.lse)


@mutant
def writes_into_its_input(run, problem):
    whole, owner = run(problem), problem.operands.value
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.flags.writeable:
        np.negative(owner, out=owner)
    return whole


calls = {"n": 0}


@mutant
def is_one_bit_off_every_other_time(run, problem):
    whole = run(problem)
    calls["n"] += 1
    return Partial(np.nextafter(whole.out, np.inf), whole.lse) if calls["n"] % 2 else whole


@pytest.fixture(scope="module")
def caught():
    """The first complaint about each mutant."""
    complaints = {}
    for case in sorted(cases(), key=lambda c: c.shape.q_len * c.shape.kv_len):
        if "float32" not in case.dtypes or len(complaints) == len(MUTANTS):
            continue
        for name, backend in MUTANTS.items():
            if name not in complaints:
                try:
                    check_case(backend, case, "float32")
                except AssertionError as error:
                    complaints[name] = str(error)
    return complaints


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, caught) -> None:
    assert name in caught, f"no case tells {name} from a right backend"
    assert caught[name].startswith(f"{name} on ")


@pytest.mark.slow
def test_the_same_wrapper_unbroken_passes() -> None:
    class Intact(BlockedBackend):
        name = "intact"

        def run(self, problem):
            return super().run(problem)

    for case in cases()[::5]:
        assert check_case(Intact(), case, case.dtypes[0])
