"""Forward and backward passes like earlier ones skip lookups and checks: gradients stay right."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import qkv  # noqa: E402
from watched import forget_prepared_calls, python_calls  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("no_prepared_calls"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),  # torch's own use of it
]

HEADS, KV_HEADS, DIM = 4, 2, 16


def operands(q_len=40, kv_len=40, *, seed=0, dtype=torch.float32, batch=2):
    """query, key, value, grad_out and grad_lse."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = [
        drawn(batch, heads, length, DIM).requires_grad_()
        for heads, length in ((HEADS, q_len), (KV_HEADS, kv_len), (KV_HEADS, kv_len))
    ]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return [*tensors, drawn(batch, HEADS, q_len, DIM), drawn(batch, HEADS, q_len).to(wide)]


def causal(q_len, kv_len):
    return torch.ones(q_len, kv_len, dtype=torch.bool).tril()


def of_definition(query, key, value, allowed, sinks=None):
    """Output and lse in float64, as the formula has them."""
    query, key, value = (t.double() for t in (query, key, value))
    group = query.shape[-3] // key.shape[-3]
    key, value = (t.repeat_interleave(group, -3) for t in (key, value))
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
    if sinks is None:
        lse = scores.logsumexp(-1)
    else:
        of_sinks = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
        lse = torch.cat([scores, of_sinks], -1).logsumexp(-1)
    return (scores - lse[..., None]).exp() @ value, lse


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.06}


def check(given, allowed, *variants, sinks=None, **keywords):
    """Output, lse and gradients are those of the definition."""
    *tensors, grad_out, grad_lse = given
    found = qkv.attention(*tensors, *variants, return_lse=True, **keywords)
    gradients = torch.autograd.grad(found, tensors, (grad_out, grad_lse))
    right = of_definition(*tensors, allowed, sinks)
    along = grad_out.double(), grad_lse.double()
    expected = torch.autograd.grad(right, tensors, along)
    atol = TOLERANCE[tensors[0].dtype]
    for ours, theirs in zip((*found, *gradients), (*right, *expected), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), atol=atol, rtol=atol)


@pytest.fixture
def only_prepared(watched):
    """Let nothing but what was prepared compute, from a call of the fixture on."""
    at_call = []
    yield lambda: at_call.append(watched.computed)
    assert at_call == [watched.computed]


LENGTHS = torch.tensor([23, 40])
MASK = torch.rand(40, 40, generator=torch.Generator().manual_seed(5)) < 0.6
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
WINDOW = causal(40, 40) & ~torch.ones(40, 40, dtype=torch.bool).tril(-8)
VARIANTS = {
    "none": ((), torch.ones(40, 40, dtype=torch.bool)),
    "causal": ((qkv.Causal(),), causal(40, 40)),
    "window": ((qkv.SlidingWindow(7, 0),), WINDOW),
    "mask in place": ((qkv.Mask(MASK),), MASK),
    "lengths by value": (
        (qkv.KeyLengths(LENGTHS),), (torch.arange(40) < LENGTHS[:, None])[:, None, None],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.one_in(4)
def test_both_passes_are_the_first_ones_tried(only_prepared, name, dtype) -> None:
    variants, allowed = VARIANTS[name]
    for seed in range(5):
        check(operands(seed=seed, dtype=dtype), allowed, *variants)
    only_prepared()
    for seed in range(5, 8):
        check(operands(seed=seed, dtype=dtype), allowed, *variants)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_repeated_training_call_looks_nothing_up(name) -> None:
    """A call after one of another type is looked up, which takes some 24 functions more."""

    def train(dtype) -> None:
        query, key, value, *_ = operands(dtype=dtype)
        out = qkv.attention(query, key, value, *VARIANTS[name][0])
        out.backward(torch.ones_like(out))

    for dtype in (torch.float32, torch.float64) * 5:
        train(dtype)
    looked_up, *repeated = (python_calls(lambda: train(torch.float32)) for _ in range(4))
    assert max(repeated) + 15 < looked_up


def test_an_array_of_numpy_compared_by_value(only_prepared) -> None:
    _, allowed = VARIANTS["lengths by value"]
    for seed in range(10):
        if seed == 5:
            only_prepared()
        lengths = LENGTHS.numpy().copy()
        check(operands(seed=seed), allowed, qkv.KeyLengths(lengths))
        lengths[:] = 0


def test_values_that_change_are_other_calls() -> None:
    position = torch.arange(40)
    for seed in range(12):
        lengths = torch.tensor([40, 23] if seed % 3 else [11, 31])
        allowed = (position < lengths[:, None])[:, None, None]
        check(operands(seed=seed), allowed, qkv.KeyLengths(lengths))


def test_the_backward_pass_reads_what_was_not_rounded() -> None:
    """Gradients of 16 bits have the bits that the first, checked call gives."""
    found = []
    for turn in range(8):
        *tensors, grad_out, _ = operands(seed=3, dtype=torch.bfloat16)
        with torch.no_grad():
            tensors[0] *= 20.0  # Nearly all the weight is on one key of each query.
        if turn == 7:
            forget_prepared_calls()
        out = qkv.attention(*tensors, qkv.Causal())
        found.append(torch.autograd.grad(out, tensors, grad_out))
    for gradients in found[:-1]:
        assert all(map(torch.equal, gradients, found[-1]))


def test_sinks_without_a_gradient(only_prepared) -> None:
    variants = qkv.Causal(), qkv.Sinks(SINKS)
    for seed in range(8):
        if seed == 5:
            only_prepared()
        check(operands(seed=seed), causal(40, 40), *variants, sinks=SINKS)


def test_sinks_that_want_a_gradient_get_one_in_between() -> None:
    for seed in range(9):
        *tensors, grad_out, _ = operands(seed=seed)
        sinks = SINKS.clone().requires_grad_(seed % 3 == 2)
        wanted = [*tensors, sinks] if sinks.requires_grad else tensors
        out = qkv.attention(*tensors, qkv.Causal(), qkv.Sinks(sinks))
        found = torch.autograd.grad(out, wanted, grad_out)
        right, _ = of_definition(*tensors, causal(40, 40), sinks)
        expected = torch.autograd.grad(right, wanted, grad_out.double())
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_a_bias_in_place_may_want_a_gradient() -> None:
    for seed in range(8):
        *tensors, grad_out, _ = operands(seed=seed)
        values = torch.randn(40, 40, generator=torch.Generator().manual_seed(seed))
        bias = values.requires_grad_(seed % 2 == 1)
        wanted = [*tensors, bias] if bias.requires_grad else tensors
        found = torch.autograd.grad(qkv.attention(*tensors, qkv.Bias(bias)), wanted, grad_out)
        query, key, value = (t.double() for t in tensors)
        key, value = (t.repeat_interleave(HEADS // KV_HEADS, -3) for t in (key, value))
        scores = query @ key.mT / DIM**0.5 + bias.double()
        expected = torch.autograd.grad(scores.softmax(-1) @ value, wanted, grad_out.double())
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_layouts_and_strides_take_turns(layout) -> None:
    for seed in range(12):
        *tensors, grad_out, _ = operands(seed=seed)
        given = tensors
        if layout == "blhd":
            given = [t.transpose(1, 2) for t in given]
        if seed % 4 == 3:
            given = [t.mT.contiguous().mT for t in given]
        cotangent = grad_out.transpose(1, 2) if layout == "blhd" else grad_out
        if seed % 3 == 2:  # What the sum of all outputs gives: one number, expanded.
            grad_out = cotangent = torch.ones(()).expand(grad_out.shape)
            cotangent = cotangent.transpose(1, 2) if layout == "blhd" else cotangent
        out = qkv.attention(*given, qkv.Causal(), layout=layout)
        found = torch.autograd.grad(out, tensors, cotangent)
        right, _ = of_definition(*tensors, causal(40, 40))
        expected = torch.autograd.grad(right, tensors, grad_out.double())
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_sizes_types_and_wishes_for_gradients_take_turns() -> None:
    sizes = [(40, 40), (17, 40), (40, 17), (3, 40), (1, 40), (40, 40)]
    for seed, (q_len, kv_len) in enumerate(sizes * 4):
        dtype = list(TOLERANCE)[seed % 2]
        given = operands(q_len, kv_len, seed=seed, dtype=dtype, batch=1 + seed % 3)
        check(given, torch.ones(q_len, kv_len, dtype=torch.bool))
        with torch.no_grad():
            out = qkv.attention(*given[:3])
        assert not out.requires_grad
        plain = [t.detach() for t in given[:3]]
        plain[seed % 3].requires_grad_()
        out = qkv.attention(*plain)
        (found,) = torch.autograd.grad(out, [plain[seed % 3]], given[3])
        right, _ = of_definition(*plain, torch.ones(q_len, kv_len, dtype=torch.bool))
        (expected,) = torch.autograd.grad(right, [plain[seed % 3]], given[3].double())
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        assert not qkv.attention(*[t.detach() for t in plain]).requires_grad


def warmed(*variants, **keywords):
    """Operands of a call that both passes are prepared for."""
    for seed in range(5):
        *tensors, grad_out, _ = operands(seed=seed, **keywords)
        torch.autograd.grad(qkv.attention(*tensors, *variants), tensors, grad_out)
    return operands(seed=9, **keywords)


def test_second_derivatives() -> None:
    *tensors, grad_out, _ = warmed(qkv.Causal(), dtype=torch.float64)

    def second(out):
        gradients = torch.autograd.grad(out, tensors, grad_out, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), tensors)

    found = second(qkv.attention(*tensors, qkv.Causal()))
    expected = second(of_definition(*tensors, causal(40, 40))[0])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_torch_func_sees_the_call() -> None:
    *tensors, grad_out, _ = warmed(qkv.Causal())

    def loss(query, key, value):
        return (qkv.attention(query, key, value, qkv.Causal()) * grad_out).sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
    right, _ = of_definition(*tensors, causal(40, 40))
    expected = torch.autograd.grad(right, tensors, grad_out.double())
    _, tangent = torch.func.jvp(loss, tuple(tensors), tuple(tensors))
    along = sum((g.double() * t).sum() for g, t in zip(expected, tensors, strict=True))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(tangent.double(), along, atol=1e-3, rtol=1e-4)


def test_batched_gradients() -> None:
    *tensors, grad_out, _ = warmed(qkv.Causal())
    both = torch.stack([grad_out, 2 * grad_out])
    out = qkv.attention(*tensors, qkv.Causal())
    found = torch.autograd.grad(out, tensors, both, is_grads_batched=True)
    right, _ = of_definition(*tensors, causal(40, 40))
    expected = torch.autograd.grad(right, tensors, grad_out.double())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[1], 2 * theirs, atol=5e-5, rtol=5e-5)


def test_checkpoints_and_saved_tensor_hooks() -> None:
    *tensors, grad_out, _ = warmed(qkv.Causal())
    right, _ = of_definition(*tensors, causal(40, 40))
    expected = torch.autograd.grad(right, tensors, grad_out.double())

    def attend(*given):
        return qkv.attention(*given, qkv.Causal())

    def in_other_strides(tensor):
        return tensor.detach().mT.contiguous().mT if tensor.ndim == 4 else tensor

    found = [torch.autograd.grad(checkpoint(attend, *tensors, use_reentrant=False),
                                 tensors, grad_out)]  # fmt: skip
    with torch.autograd.graph.saved_tensors_hooks(in_other_strides, lambda tensor: tensor):
        out = attend(*tensors)
    found.append(torch.autograd.grad(out, tensors, grad_out))
    for gradients in found:
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_a_tensor_that_changes_before_the_backward_pass_is_an_error() -> None:
    *tensors, grad_out, _ = warmed(qkv.Causal())
    out = qkv.attention(*tensors, qkv.Causal())
    with torch.no_grad():
        tensors[1].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad_out)


def test_autocast_is_obeyed() -> None:
    *tensors, _, _ = warmed(qkv.Causal())
    with torch.autocast("cpu", torch.bfloat16):
        assert qkv.attention(*tensors, qkv.Causal()).dtype is torch.bfloat16
    assert qkv.attention(*tensors, qkv.Causal()).dtype is torch.float32


def test_a_graph_is_walked_twice() -> None:
    *tensors, grad_out, _ = warmed(qkv.Causal())
    out = qkv.attention(*tensors, qkv.Causal())
    first = torch.autograd.grad(out, tensors, grad_out, retain_graph=True)
    second = torch.autograd.grad(out, tensors, 2 * grad_out)
    for once, twice in zip(first, second, strict=True):
        torch.testing.assert_close(2 * once, twice, atol=1e-6, rtol=1e-6)


def test_values_that_are_not_finite() -> None:
    """Such values lead to the checked call, which has the same rows as the definition."""
    *tensors, grad_out, _ = warmed(qkv.Causal())
    with torch.no_grad():
        tensors[2][0, 0, 3, 1] = torch.inf
    out = qkv.attention(*tensors, qkv.Causal())
    found = torch.autograd.grad(out, tensors, grad_out)
    fresh = [t.detach().clone().requires_grad_() for t in tensors]
    forget_prepared_calls()
    again = torch.autograd.grad(qkv.attention(*fresh, qkv.Causal()), fresh, grad_out)
    for ours, theirs in zip(found, again, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_one_tensor_as_query_key_and_value() -> None:
    for seed in range(7):
        query, *_, grad_out, _ = operands(seed=seed)
        out = qkv.attention(query, query, query, qkv.Causal())
        (found,) = torch.autograd.grad(out, [query], grad_out)
        right, _ = of_definition(query, query, query, causal(40, 40))
        (expected,) = torch.autograd.grad(right, [query], grad_out.double())
        torch.testing.assert_close(found, expected, atol=3e-5, rtol=3e-5)


def test_threads() -> None:
    def train(seed):
        for turn in range(30):
            check(operands(seed=100 * seed + turn), causal(40, 40), qkv.Causal())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(train, range(4)))


def test_another_machine_is_seen_between_the_passes(monkeypatch) -> None:
    """What autograd keeps may outlast what it was prepared for."""
    for seed in range(5):
        check(operands(seed=seed), causal(40, 40), qkv.Causal())
    *tensors, grad_out, _ = operands(seed=5)
    out = qkv.attention(*tensors, qkv.Causal(), backend="auto")
    monkeypatch.setenv("QKV_ISA", "no such thing")
    with pytest.raises(qkv.QkvError, match="no such thing"):
        torch.autograd.grad(out, tensors, grad_out)
