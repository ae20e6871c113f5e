"""Gradients like earlier ones skip the checks: what they give must not change."""

import gc
import tracemalloc
import weakref
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch

import qkv
from forced import as_it_runs
from qkv.backends import array_at, register
from qkv.errors import ArgumentError, DTypeError, ShapeError
from watched import Watched, forget_prepared_calls

pytestmark = pytest.mark.usefixtures("no_prepared_calls")

TURNS = 6
"""The number of calls that are alike. The pullback is asked for its own sake from the third on; it
is prepared in the fourth and recalled in the fifth."""


def operands(seed, dtype=np.float32, q_len=40, kv_len=48, heads=(4, 2), dims=(24, 16), lead=(2,)):
    """query, key, value, grad_out and grad_lse."""
    rng = np.random.default_rng(seed)
    shapes = (
        (*lead, heads[0], q_len, dims[0]),
        (*lead, heads[1], kv_len, dims[0]),
        (*lead, heads[1], kv_len, dims[1]),
        (*lead, heads[0], q_len, dims[1]),
    )
    compute = np.float64 if dtype == np.float64 else np.float32
    grad_lse = rng.normal(size=shapes[3][:-1]).astype(compute)
    return [*(rng.normal(size=s).astype(dtype) for s in shapes), grad_lse]


def gradients(arrays, variants=(), wrt=(), **keywords):
    query, key, value, grad_out, grad_lse = arrays
    _, pullback = qkv.vjp(query, key, value, *variants, **{"backend": "cpu", **keywords})
    return pullback(grad_out, grad_lse, wrt)


def same(found, right) -> None:
    """The same gradients in every bit."""
    for name in ("query", "key", "value"):
        ours, theirs = getattr(found, name), getattr(right, name)
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.flags.c_contiguous
        assert ours.tobytes() == theirs.tobytes(), name


@pytest.fixture
def check(watched):
    """Calls one after the other give what each gives as a first one."""

    def run(cases, *, prepared=None, **keywords):
        found, given = [], []
        for case in cases:
            given.append(case)
            computed = watched.computed
            found.append(gradients(*case, **keywords))
        if prepared is not None:
            assert watched.prepared("gradients") == prepared
            assert (watched.computed == computed) == bool(prepared), "the last one is recalled"
        for ours, case in zip(found, given, strict=True):
            forget_prepared_calls()
            same(ours, gradients(*case, **keywords))
        return found

    return run


def rng_mask(seed, *shape):
    return np.random.default_rng(seed).random(shape) < 0.7


def _doubled(score, batch, head, q_pos, kv_pos):
    return score * 2


VARIANTS = {
    "none": lambda seed: (),
    "causal and window": lambda seed: (qkv.Causal("end"), qkv.SlidingWindow(17, 0)),
    "slopes by value": lambda seed: (qkv.ALiBi(np.linspace(0.1, 0.4, 4, dtype=np.float32)),),
    "softcap": lambda seed: (qkv.Softcap(3.0),),
    "mask": lambda seed: (qkv.Mask(rng_mask(seed, 2, 1, 40, 48)),),
    "bias": lambda seed: (
        qkv.Bias(np.random.default_rng(seed).normal(size=(4, 40, 48)).astype(np.float32)),
    ),
    "lengths": lambda seed: (qkv.KeyLengths(np.array([48, 31])),),
    "dropout": lambda seed: (qkv.Dropout(0.3, 7),),
    "score mod": lambda seed: (qkv.ScoreMod(_doubled),),
    "sinks": lambda seed: (qkv.Sinks(np.linspace(-1, 2, 4)),),
    "rotation": lambda seed: (qkv.Causal("end"), qkv.RoPE()),
}


@pytest.mark.slow
@pytest.mark.sampled(
    ("name", "dtype"),
    list(product(VARIANTS, [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])),
    one_in=11,
)
def test_recalled_gradients_have_the_same_bits(check, name, dtype) -> None:
    # Gradients of rotated rows of 16 bits are rounded after they were turned back, unprepared.
    prepared = name != "rotation" or dtype in (np.float32, np.float64)
    cases = [(operands(seed, dtype), VARIANTS[name](seed)) for seed in range(TURNS)]
    check(cases, prepared=int(prepared), q_offset="end")


@pytest.mark.parametrize(
    "sizes",
    [
        {"q_len": 130, "kv_len": 1100, "heads": (1, 1), "lead": (1,)},  # parts of dQ
        {"lead": (2, 3), "heads": (2, 2)},
        {"lead": (), "dims": (32, 32)},
        {"q_len": 13, "kv_len": 5},
    ],
)
def test_of_other_shapes(check, sizes) -> None:
    check([(operands(seed, **sizes),) for seed in range(TURNS)], prepared=1)


def test_against_the_definition(check) -> None:
    given = [operands(seed, np.float64) for seed in range(TURNS)]
    for arrays, found in zip(given, check([(arrays,) for arrays in given]), strict=True):
        tensors = [torch.tensor(a).requires_grad_() for a in arrays[:3]]
        scores = tensors[0] @ tensors[1].repeat_interleave(2, 1).mT / np.sqrt(24)
        out = torch.softmax(scores, -1) @ tensors[2].repeat_interleave(2, 1)
        along = (out * torch.tensor(arrays[3])).sum()
        (along + (scores.logsumexp(-1) * torch.tensor(arrays[4])).sum()).backward()
        for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
            np.testing.assert_allclose(getattr(found, name), tensor.grad, rtol=0, atol=1e-13)


def test_heads_behind_rows(check) -> None:
    def turned(arrays):
        return [*(np.ascontiguousarray(a.swapaxes(-3, -2)) for a in arrays[:4]), arrays[4]]

    cases = [(turned(operands(seed)),) for seed in range(TURNS)]
    check(cases, prepared=1, layout="blhd")


def test_other_strides_are_other_calls(check) -> None:
    def apart(array):
        """The same numbers, each row with a gap behind it."""
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + 3), array.dtype)
        wide[..., : array.shape[-1]] = array
        return wide[..., : array.shape[-1]]

    cases = []
    for places in product([False, True], repeat=4):
        for seed in range(TURNS):
            arrays = operands(seed)
            changed = [apart(a) if p else a for a, p in zip(arrays[:4], places, strict=True)]
            cases.append(([*changed, arrays[4]],))
    check(cases, prepared=16)


@pytest.mark.parametrize("order", [np.asfortranarray, lambda a: a[..., ::-1].copy()[..., ::-1]])
def test_cotangents_of_any_order(check, order) -> None:
    """Kernels read dense rows, whatever comes."""
    cases = [([*a[:3], *map(order, a[3:])],) for a in map(operands, range(TURNS))]
    found = check(cases, prepared=1)
    for seed, ours in enumerate(found):
        same(ours, gradients(operands(seed)))


def kept_otherwise(arrays, change):
    """Gradients of tensors; what torch keeps for them beside the operands, it keeps changed."""
    tensors = [torch.tensor(a).requires_grad_() for a in arrays[:3]]
    given = {tensor.data_ptr() for tensor in tensors}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor if tensor.data_ptr() in given else change(tensor.detach()),
        lambda tensor: tensor,
    ):
        results = qkv.attention(*tensors, return_lse=True, backend="cpu")
    return torch.autograd.grad(results, tensors, list(map(torch.tensor, arrays[3:])))


def test_residuals_of_any_order(watched) -> None:
    for seed in range(2 * TURNS):
        arrays = operands(seed)
        found = kept_otherwise(arrays, lambda t: t.mT.contiguous().mT)
        for ours, theirs in zip(found, kept_otherwise(arrays, lambda t: t), strict=True):
            assert torch.equal(ours, theirs)
    assert watched.prepared("gradients") == 2


def test_what_is_of_another_type_or_shape_is_refused(watched) -> None:
    """What was prepared refuses it too, although it reads memory as what it was prepared for."""
    for seed in range(TURNS):
        q, k, v, grad_out, grad_lse = arrays = operands(seed)
        _, pullback = qkv.vjp(q, k, v, backend="cpu")
        pullback(grad_out, grad_lse)
        kept_otherwise(arrays, torch.Tensor.contiguous)
    assert watched.prepared("gradients") == 1
    computed = watched.computed
    for refused, given in (
        (DTypeError, (grad_out, grad_lse.astype(np.float64))),
        (DTypeError, (grad_out, grad_lse.view(np.int32))),
        (DTypeError, (grad_out.view(np.int32), grad_lse)),
        (ShapeError, (grad_out[..., :-1], grad_lse)),
        (ShapeError, (grad_out, grad_lse[:1])),
        (ShapeError, (grad_out[:, :1], None)),
    ):
        with pytest.raises(refused):
            pullback(*given)
    with pytest.raises(DTypeError, match="lse"):
        kept_otherwise(arrays, torch.Tensor.double)
    pullback(grad_out, grad_lse)
    assert watched.computed == computed


def test_without_a_cotangent_of_lse(check) -> None:
    cases = [([*operands(seed)[:4], None],) for seed in range(TURNS)]
    check([*cases, *[(operands(seed),) for seed in range(TURNS)]], prepared=2)


@pytest.mark.slow
def test_rows_that_see_nothing_are_looked_at_each_time(check) -> None:
    """Where few queries see a key, their rows are summed again."""
    cases = []
    for seed, seeing in enumerate([40, 40, 40, 40, 40, 30, 13, 5, 12, 30, 13, 0, 40]):
        mask = np.zeros((40, 48), bool)
        mask[:seeing] = rng_mask(seed, seeing, 48)
        mask[:seeing, 0] = True
        cases.append((operands(seed), (qkv.Mask(mask),)))
    check(cases)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_whole_blocks_of_queries_without_a_key(check, dtype) -> None:
    """No kernel visits them, and yet their gradients are 0, whatever was in the memory before."""
    shape = {"q_len": 300, "heads": (1, 1), "lead": (1,), "dims": (32, 32)}

    def cases():
        for seed in range(TURNS + 2):
            arrays = operands(seed, dtype, **shape)
            dirty = [np.full_like(arrays[0], np.nan) for _ in range(8)]
            del dirty
            yield arrays, (qkv.Causal(),)

    for found in check(cases(), prepared=1, q_offset=-260):
        assert not found.query[..., :260, :].any()
        assert found.query[..., 260:, :].any()


class SometimesWithoutRest(Watched):
    """The rounding error of lse may be missing: `backward` then runs the forward pass again."""

    has_rest = True

    def prepare(self, problem, passes, **given):
        made = super().prepare(problem, passes, **given)
        if made is None or passes != "residuals":
            return made

        def run(addresses, *more):
            done = made.run(addresses, *more)
            if not self.has_rest:
                array_at(addresses[5], made.results[2])[...] = np.nan
            return done

        return replace(made, run=run)


def test_a_missing_rounding_error_of_lse_is_computed_again(watched) -> None:
    backend = SometimesWithoutRest()
    register(backend)
    cases = []
    for seed in range(2 * TURNS):
        arrays = operands(seed)
        backend.has_rest = seed % 4 > 0
        found = kept_otherwise(arrays, lambda tensor: tensor), gradients(arrays)
        cases.append((arrays, found))
    assert backend.prepared("gradients")
    for arrays, (of_tensors, of_arrays) in cases:
        forget_prepared_calls()
        right = gradients(arrays)
        same(of_arrays, right)
        for name, ours in zip(("query", "key", "value"), of_tensors, strict=True):
            assert ours.numpy().tobytes() == getattr(right, name).tobytes()


def test_operands_that_are_broadcast_are_summed(check) -> None:
    cases = []
    for seed in range(TURNS):
        q, _, _, grad_out, grad_lse = operands(seed)
        _, k, v, *_ = operands(seed + 10, lead=(1,))
        cases.append(([q, k, v, grad_out, grad_lse],))
    for found in check(cases, prepared=0):
        assert found.key.shape == cases[0][0][1].shape


def test_gradients_of_variants_are_not_recalled(watched, check) -> None:
    cases, own = [], []
    for seed in range(TURNS):
        cases.append((operands(seed), VARIANTS["bias"](seed)))
        own.append(gradients(*cases[-1], wrt=cases[-1][1]))
        gradients(*cases[-1])
    assert watched.prepared("gradients") == 1
    for case, found in zip(cases, own, strict=True):
        forget_prepared_calls()
        right, (bias,) = gradients(*case, wrt=case[1]), case[1]
        same(found, right)
        assert found.of(bias).tobytes() == right.of(bias).tobytes()
    check(cases)


@pytest.mark.slow
def test_another_instruction_set(check, monkeypatch) -> None:
    for seed in range(TURNS):
        before = gradients(operands(seed))
    monkeypatch.setenv("QKV_ISA", as_it_runs("sse"))
    *_, found = check([(operands(seed),) for seed in range(TURNS)])
    np.testing.assert_allclose(found.query, before.query, atol=1e-5)


def test_one_call_after_another_leaves_no_trace(watched) -> None:
    """What is added to begins at 0, and counters too."""
    sizes = {"q_len": 64, "kv_len": 1100, "heads": (2, 1), "lead": (1,)}
    q, k, v, grad_out, grad_lse = operands(0, **sizes)
    for _ in range(3):
        _, pullback = qkv.vjp(q, k, v, backend="cpu")
    found = [pullback(grad_out, grad_lse).query.tobytes() for _ in range(6)]
    assert watched.prepared("gradients") == 1
    assert len(set(found)) == 1


def test_results_are_not_those_of_an_earlier_call() -> None:
    found = [gradients(operands(seed)) for seed in range(7)]
    before = [each.query.tobytes() for each in found]
    assert len(set(before)) == 7
    assert before == [gradients(operands(seed)).query.tobytes() for seed in range(7)]


def test_rows_of_one_memory_are_rounded_once(check) -> None:
    """Where gradients of half precision are summed up, that is done before they are rounded."""
    cases = []
    for seed in range(TURNS):
        q, k, v, grad_out, grad_lse = operands(seed, np.float16)
        k, v = (np.broadcast_to(a[:1], a.shape) for a in (k, v))
        cases.append(([q, k, v, grad_out, grad_lse],))
    check(cases)


@pytest.mark.slow
def test_what_is_remembered_keeps_no_arrays(watched) -> None:
    """Neither those of the calls nor results as long as they."""
    gradients(operands(0), VARIANTS["mask"](0))  # What all calls share is loaded.
    forget_prepared_calls()
    tracemalloc.start()
    try:
        arrays, variants = operands(0), VARIANTS["mask"](0)
        gone = [weakref.ref(a) for a in arrays]
        for _ in range(TURNS):
            gradients(arrays, variants)
        operand_bytes = min(a.nbytes for a in arrays[:3])
        del arrays, variants
        gc.collect()
        of_numpy = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
        kept = tracemalloc.take_snapshot().filter_traces([of_numpy]).traces
    finally:
        tracemalloc.stop()
    assert watched.prepared("gradients") == 1
    assert not any(reference() is not None for reference in gone)
    assert len(kept) > 10
    assert max(trace.size for trace in kept) < operand_bytes


def test_a_constant_of_a_score_mod_changes_between_forward_and_backward() -> None:
    """Gradients are those of the forward pass, or an error; later calls are not touched."""
    slope = 1.0

    def sloped(score, batch, head, q_pos, kv_pos):
        return score * slope

    query, key, value, grad_out, _ = operands(0)
    expected = qkv.vjp(query, key, value, backend="cpu")[1](grad_out).query
    refused = []
    for change in (True, True, True, True, False, False, False):
        slope = 1.0
        _, pullback = qkv.vjp(query, key, value, qkv.ScoreMod(sloped), backend="cpu")
        slope = 3.0 if change else 1.0
        try:
            found = pullback(grad_out).query
        except ArgumentError as error:
            refused.append((change, str(error)))
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert refused
    for change, message in refused:
        assert change
        assert "sloped reads a constant that has changed" in message
