"""Gradients like earlier ones skip the checks: what they give must not change."""

import gc
import weakref
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch

import qkv
from forced import as_it_runs
from qkv.call.attend import attend
from qkv.call.bound import bind
from qkv.call.cache import CALLS
from qkv.call.checked import check_call
from qkv.call.derivatives import pull_back as prepared_pull_back
from qkv.call.derivatives.gradients import gradients_of
from qkv.call.derivatives.pull_back import Residuals
from qkv.call.options import OptionValues
from qkv.errors import ArgumentError

KEYWORDS = {"scale": None, "layout": "bhld", "q_offset": None, "kv_offset": 0, "backend": "cpu"}


pytestmark = pytest.mark.usefixtures("no_prepared_calls")


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


def left_by(arrays, variants=(), **keywords):
    """What the forward pass leaves."""
    bound = bind(*arrays[:3], variants, OptionValues(**{**KEYWORDS, **keywords}))
    found = attend(bound, backward=True, differentiable=True, given=variants)
    call, partial = check_call(bound, variants, backward=True), found.partial
    if partial is None:
        partial = call.run_for_backward()

    # As `qkv.vjp` does: gradients start from the output as it was given.
    partial = replace(partial, out=partial.out.astype(found.out.dtype, copy=False))

    def pullback(grad_out, grad_lse=None, wrt=()):
        shapes = [array.shape for array in arrays[:3]]
        return gradients_of(call, partial, shapes, grad_out, grad_lse, wrt)

    out = found.out
    return Residuals(out, partial.lse, partial.lse_rest), pullback


def pull_back(q, k, v, variants, keywords, left, grad_out, grad_lse=None, wrt=()):
    bound = bind(q, k, v, variants, OptionValues(**keywords))
    return prepared_pull_back.pull_back(bound, left, grad_out, grad_lse, wrt, variants)


def check(arrays, variants=(), **keywords):
    """The same bits as a pullback that remembers nothing."""
    q, k, v, grad_out, grad_lse = arrays
    left, pullback = left_by(arrays, variants, **keywords)
    case = {**KEYWORDS, **keywords}
    found = pull_back(q, k, v, variants, case, left, grad_out, grad_lse)
    right = pullback(grad_out, grad_lse)
    for name in ("query", "key", "value"):
        ours, theirs = getattr(found, name), getattr(right, name)
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.flags.c_contiguous
        assert ours.tobytes() == theirs.tobytes(), name
    return found


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
def test_recalled_gradients_have_the_same_bits(watched, name, dtype) -> None:
    for seed in range(5):
        check(operands(seed, dtype), VARIANTS[name](seed), q_offset="end")
    # Gradients of rotated rows of 16 bits are rounded after they were turned back, unprepared.
    prepared = name != "rotation" or dtype in (np.float32, np.float64)
    assert watched.prepared("gradients") == int(prepared)


@pytest.mark.parametrize(
    "sizes",
    [
        {"q_len": 130, "kv_len": 1100, "heads": (1, 1), "lead": (1,)},  # parts of dQ
        {"lead": (2, 3), "heads": (2, 2)},
        {"lead": (), "dims": (32, 32)},
        {"q_len": 13, "kv_len": 5},
    ],
)
def test_of_other_shapes(watched, sizes) -> None:
    for seed in range(4):
        check(operands(seed, **sizes))
    assert watched.prepared("gradients") == 1


def test_against_the_definition() -> None:
    for seed in range(5):
        arrays = operands(seed, np.float64)
        tensors = [torch.tensor(a).requires_grad_() for a in arrays[:3]]
        scores = tensors[0] @ tensors[1].repeat_interleave(2, 1).mT / np.sqrt(24)
        out = torch.softmax(scores, -1) @ tensors[2].repeat_interleave(2, 1)
        along = (out * torch.tensor(arrays[3])).sum()
        (along + (scores.logsumexp(-1) * torch.tensor(arrays[4])).sum()).backward()
        found = check(arrays)
        for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
            np.testing.assert_allclose(getattr(found, name), tensor.grad, rtol=0, atol=1e-13)


def test_heads_behind_rows(watched) -> None:
    for seed in range(4):
        arrays = operands(seed)
        turned = [np.ascontiguousarray(a.swapaxes(-3, -2)) for a in arrays[:4]]
        check([*turned, arrays[4]], layout="blhd")
    assert watched.prepared("gradients") == 1


def test_other_strides_are_other_calls(watched) -> None:
    def apart(array):
        """The same numbers, each row with a gap behind it."""
        wide = np.zeros((*array.shape[:-1], array.shape[-1] + 3), array.dtype)
        wide[..., : array.shape[-1]] = array
        return wide[..., : array.shape[-1]]

    for places in product([False, True], repeat=4):
        for seed in range(3):
            arrays = operands(seed)
            changed = [apart(a) if p else a for a, p in zip(arrays[:4], places, strict=True)]
            check([*changed, arrays[4]])
    assert watched.prepared("gradients") == 16


def test_lse_of_any_order(watched) -> None:
    """Kernels read dense rows, whatever comes."""
    for seed in range(4):
        arrays = operands(seed)
        q, k, v, grad_out, grad_lse = arrays
        left, pullback = left_by(arrays)
        turned = [np.asfortranarray(a) for a in (left.lse, left.lse_rest, grad_lse)]
        kept = Residuals(np.asfortranarray(left.out), *turned[:2])
        found = pull_back(q, k, v, (), KEYWORDS, kept, np.asfortranarray(grad_out), turned[2])
        right = pullback(grad_out, grad_lse)
        for name in ("query", "key", "value"):
            assert getattr(found, name).tobytes() == getattr(right, name).tobytes()
    assert watched.prepared("gradients") == 1


def test_lse_of_another_type(watched) -> None:
    for seed in range(4):
        q, k, v, grad_out, grad_lse = arrays = operands(seed)
        left, pullback = left_by(arrays)
        wide = Residuals(left.out, *(a.astype(np.float64) for a in left[1:]))
        found = pull_back(q, k, v, (), KEYWORDS, wide, grad_out, grad_lse.astype(np.float64))
        right = pullback(grad_out, grad_lse)
        np.testing.assert_allclose(found.query, right.query, rtol=0, atol=2e-6)
    assert not watched.prepared("gradients")


def test_without_a_cotangent_of_lse(watched) -> None:
    for seed in range(4):
        check([*operands(seed)[:4], None])
    for seed in range(4):
        check(operands(seed))
    assert watched.prepared("gradients") == 2


@pytest.mark.slow
def test_rows_that_see_nothing_are_looked_at_each_time() -> None:
    """Where few queries see a key, their rows are summed again."""
    for seed, seeing in enumerate([40, 40, 40, 30, 13, 5, 12, 30, 13, 0, 40]):
        mask = np.zeros((40, 48), bool)
        mask[:seeing] = rng_mask(seed, seeing, 48)
        mask[:seeing, 0] = True
        check(operands(seed), (qkv.Mask(mask),))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_whole_blocks_of_queries_without_a_key(watched, dtype) -> None:
    """No kernel visits them, and yet their gradients are 0, whatever was in the memory before."""
    shape = {"q_len": 300, "heads": (1, 1), "lead": (1,), "dims": (32, 32)}
    for seed in range(6):
        arrays = operands(seed, dtype, **shape)
        dirty = [np.full_like(arrays[0], np.nan) for _ in range(8)]
        del dirty
        found = check(arrays, (qkv.Causal(),), q_offset=-260)
        assert not found.query[..., :260, :].any()
        assert found.query[..., 260:, :].any()
    assert watched.prepared("gradients") == 1


def test_a_missing_lse_rest_is_computed_again() -> None:
    for seed in range(5):
        q, k, v, grad_out, grad_lse = arrays = operands(seed)
        left, pullback = left_by(arrays)
        if seed == 3:
            left = left._replace(lse_rest=np.full_like(left.lse, np.nan))
        found = pull_back(q, k, v, (), KEYWORDS, left, grad_out, grad_lse)
        right = pullback(grad_out, grad_lse)
        assert found.query.tobytes() == right.query.tobytes()


def test_operands_that_are_broadcast_are_summed(watched) -> None:
    for seed in range(4):
        q, _, _, grad_out, grad_lse = operands(seed)
        _, k, v, *_ = operands(seed + 10, lead=(1,))
        found = check([q, k, v, grad_out, grad_lse])
        assert found.key.shape == k.shape
    assert not watched.prepared("gradients")


def test_gradients_of_variants_are_not_recalled(watched) -> None:
    for seed in range(4):
        q, k, v, grad_out, grad_lse = arrays = operands(seed)
        (bias,) = VARIANTS["bias"](seed)
        left, pullback = left_by(arrays, (bias,))
        case = (q, k, v, (bias,), KEYWORDS, left, grad_out, grad_lse)
        assert pull_back(*case, [bias]).of(bias).tobytes() == (
            pullback(grad_out, grad_lse, [bias]).of(bias).tobytes()
        )
        check(arrays, (bias,))
    assert watched.prepared("gradients") == 1


@pytest.mark.slow
def test_another_instruction_set(monkeypatch) -> None:
    for seed in range(4):
        check(operands(seed))
    before = check(operands(9))
    monkeypatch.setenv("QKV_ISA", as_it_runs("sse"))
    found = check(operands(9))
    np.testing.assert_allclose(found.query, before.query, atol=1e-5)


def test_one_call_after_another_leaves_no_trace() -> None:
    """What is added to begins at 0, and counters too."""
    sizes = {"q_len": 64, "kv_len": 1100, "heads": (2, 1), "lead": (1,)}
    arrays = operands(0, **sizes)
    left, _ = left_by(arrays)
    q, k, v, grad_out, grad_lse = arrays
    found = [
        pull_back(q, k, v, (), KEYWORDS, left, grad_out, grad_lse).query.tobytes() for _ in range(6)
    ]
    assert len(set(found)) == 1


def test_results_are_not_those_of_an_earlier_call() -> None:
    found = [check(operands(seed)) for seed in range(5)]
    before = [gradients.query.tobytes() for gradients in found]
    assert len(set(before)) == 5
    assert before == [check(operands(seed)).query.tobytes() for seed in range(5)]


def test_rows_of_one_memory_are_rounded_once() -> None:
    """Where gradients of half precision are summed up, that is done before they are rounded."""
    for seed in range(4):
        q, k, v, grad_out, grad_lse = operands(seed, np.float16)
        k, v = (np.broadcast_to(a[:1], a.shape) for a in (k, v))
        check([q, k, v, grad_out, grad_lse])


@pytest.mark.slow
def test_what_is_remembered_keeps_no_arrays() -> None:
    """Neither those of the calls nor results as long as they."""
    arrays = operands(0)
    left, _ = left_by(arrays, VARIANTS["mask"](0))
    gone = [weakref.ref(a) for a in (*arrays, *left)]
    for _ in range(3):
        pull_back(*arrays[:3], VARIANTS["mask"](0), KEYWORDS, left, *arrays[3:])
    (ready,) = [
        call
        for entry in CALLS._entries.values()
        for form, call in entry.calls.items()
        if form.passes == "gradients"
    ]
    del arrays, left
    gc.collect()
    assert not any(reference() is not None for reference in gone)
    operand_bytes = min(a.nbytes for a in operands(0)[:3])
    owners = [owner for owner in held_by(ready) if owner.nbytes >= operand_bytes]
    assert not owners, [owner.shape for owner in owners]


def held_by(thing) -> list[np.ndarray]:
    """The arrays that own the memory of all arrays that an object holds, and its parts."""
    seen, waiting, found = set(), [thing], []
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, np.ndarray):
            # A strided view of NumPy has another object between itself and its owner.
            while getattr(part, "base", None) is not None:
                part = part.base
            found.append(part)
        elif isinstance(part, list | tuple | dict):
            waiting += part.values() if isinstance(part, dict) else part
        elif type(part).__module__.startswith("qkv."):
            waiting += gc.get_referents(part)
    assert len(found) > 10
    return found


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
