"""Calls on tensors like an earlier one skip the checks: what they give must not change."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import qkv  # noqa: E402
import qkv.torch  # noqa: E402
from qkv.bridges.torch.repeated import guards as torch_guards  # noqa: E402
from qkv.bridges.torch.repeated import layouts as torch_layouts  # noqa: E402
from qkv.call.repeated.cache import CALLS  # noqa: E402
from qkv.errors import QkvError, ShapeError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")

sdpa = torch.nn.functional.scaled_dot_product_attention
drop_in = qkv.torch.scaled_dot_product_attention


@pytest.fixture(autouse=True, params=["guards", "no guards"])
def has_guards(request, monkeypatch, no_prepared_calls):
    """Whether this torch tells about tensors in one call; each test runs without it, too.

    torch does not document it, no setting takes it away, and this torch has it.
    """
    if request.param == "no guards":
        monkeypatch.setattr(torch_guards, "_can_tell", lambda: False)
        monkeypatch.setattr(torch_layouts, "_empty_of_compiled_code", lambda: None)
    return request.param == "guards"


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(seed=0, dtype=torch.float32):
    return [normal(2, 4, 16, 8, seed=3 * seed + i, dtype=dtype) for i in range(3)]


def remembered(watched, function=qkv.attention, *more, **keywords):
    """Operands of a call that the next one will be taken to be like."""
    known = operands()
    for _ in range(3):
        function(*known, *more, **keywords)
    assert watched.prepared("forward", any_length=False)
    return known


def naive(query, key, value):
    return torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1) @ value


def close(found, expected, atol=2e-6):
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_repeated_call_calls_no_operator_of_torch(watched, has_guards, return_lse) -> None:
    """Calls that call an operator are as right as ever, but take longer than torch's own."""
    tensors = remembered(watched)
    qkv.attention(*tensors, return_lse=return_lse)
    with torch.autograd.profiler.profile() as seen:
        qkv.attention(*tensors, return_lse=return_lse)
    assert bool(seen.function_events) != has_guards


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_remembered_call_reads_its_own_tensors(watched, dtype) -> None:
    atol = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 2e-6)
    for seed in range(6):
        tensors = operands(seed, dtype)
        exact = [tensor.double() for tensor in tensors]
        for causal, variants in ((False, ()), (True, (qkv.Causal(),))):
            expected = sdpa(*exact, is_causal=causal).to(dtype)
            found, lse = qkv.attention(*tensors, *variants, return_lse=True)
            close(found, expected, atol)
            scores = exact[0] @ exact[1].mT / 8**0.5
            if causal:
                scores = scores.masked_fill(~torch.ones(16, 16).tril().bool(), -torch.inf)
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            close(lse, scores.logsumexp(-1).to(wide), 4e-6)
            for again in (qkv.attention(*tensors, *variants), drop_in(*tensors, is_causal=causal)):
                assert again.equal(found)
                assert again.is_contiguous()
    # Nothing and `Causal()`, and `Causal("start")`, which the drop-in says.
    assert watched.prepared("forward", any_length=False) == 3


def test_tensors_may_be_one_object(watched) -> None:
    for seed in range(6):
        x, y, z = operands(seed)
        for tensors in ((x, x, x), (x, y, y), (x, x, y), (x, y, x), (x, y, z)):
            close(qkv.attention(*tensors), sdpa(*tensors))
    assert watched.prepared("forward") == 1


def test_strides_are_part_of_it() -> None:
    wide = [normal(2, 4, 32, 16, seed=i) for i in range(3)]
    views = [
        [t[:, :, ::2, :8] for t in wide],
        [t[:, :, ::2, ::2] for t in wide],
        [t[:, :, :16, :8].transpose(1, 2).contiguous().transpose(1, 2) for t in wide],
        [t[:, :, :16, :8].contiguous() for t in wide],
        [t[:1, :1, :16, :8].expand(2, 4, 16, 8) for t in wide],
        [t[:, :, :16, :8].mT.contiguous().mT for t in wide],
        [torch.complex(t, t).conj().imag[:, :, :16, :8] for t in wide],
    ]
    for _ in range(4):
        for view in views:
            out = qkv.attention(*view)
            close(out, sdpa(*view))
            assert out.is_contiguous()


def test_values_of_another_width() -> None:
    for seed in range(4):
        q, k, _ = operands(seed)
        v = normal(2, 4, 16, 24, seed=seed)
        close(qkv.attention(q, k, v), sdpa(q, k, v))


def test_constants_of_another_type_are_not_taken_for_them(watched) -> None:
    tensors = remembered(watched, scale=1.0)
    remembered(watched)
    for keywords in ({"kv_offset": 0.0}, {"kv_offset": False}):
        with pytest.raises(QkvError):
            qkv.attention(*(t.numpy() for t in tensors), **keywords)
        with pytest.raises(QkvError):
            qkv.attention(*tensors, **keywords)


def test_tensors_elsewhere_are_not_taken_for_them(watched) -> None:
    remembered(watched)
    for _ in range(2):
        meta = [t.to("meta") for t in operands()]
        assert qkv.attention(*meta).device.type == "meta"
        sparse = operands()[0].to_sparse()
        with pytest.raises(QkvError):
            qkv.attention(sparse, sparse, sparse)


def test_the_default_device_is_not_where_the_output_lies(watched) -> None:
    tensors = remembered(watched)
    v = normal(2, 4, 16, 24)
    for _ in range(3):
        qkv.attention(tensors[0], tensors[1], v)
    with torch.device("meta"):
        close(qkv.attention(*tensors), sdpa(*tensors))
        close(qkv.attention(*tensors[:2], v, return_lse=True)[0], sdpa(*tensors[:2], v))


@pytest.mark.parametrize("function", [qkv.attention, drop_in])
def test_gradients_are_not_lost(watched, function) -> None:
    tensors = [t.requires_grad_() for t in operands()]
    with torch.no_grad():
        for _ in range(3):
            assert not function(*tensors).requires_grad
    assert watched.prepared("forward", any_length=False)
    assert function(*tensors).requires_grad
    remembered(watched, function)
    for n in range(3):
        leaves = [t.detach().requires_grad_(i == n) for i, t in enumerate(tensors)]
        for f in (function, sdpa):
            f(*leaves).square().sum().backward()
            leaves[n].grad, other = None, leaves[n].grad
            if f is function:
                found = other
        close(found, other, 2e-5)


@pytest.mark.parametrize("function", [qkv.attention, drop_in])
def test_transformations_are_seen(watched, function) -> None:
    tensors = remembered(watched, function)
    for transform in (torch.func.grad, torch.func.jacrev):
        found, expected = (
            transform(lambda q, k, v, f=f: f(q, k, v).square().sum())(*tensors)
            for f in (function, naive)
        )
        close(found, expected, 2e-5)
    rows = [t.unflatten(0, (2, 1)) for t in tensors]
    close(torch.func.vmap(function)(*rows), sdpa(*tensors).unflatten(0, (2, 1)))
    tangents = tuple(operands(1))
    found = torch.func.jvp(function, tuple(tensors), tangents)[1]
    close(found, torch.func.jvp(naive, tuple(tensors), tangents)[1], 2e-5)


@pytest.mark.parametrize("function", [qkv.attention, drop_in])
def test_modes_see_the_operation(watched, function) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    tensors, seen = remembered(watched, function), []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            seen.append(str(operation))
            return operation(*args, **(kwargs or {}))

    with Recorder():
        close(function(*tensors), sdpa(*tensors))
    assert any("qkv" in name for name in seen)
    graph = make_fx(lambda q, k, v: function(q, k, v))(*tensors)
    fresh = operands(1)
    close(graph(*fresh), sdpa(*fresh))
    with FakeTensorMode() as mode:
        assert function(*(mode.from_tensor(t) for t in tensors)).shape == tensors[0].shape
    with torch.autocast("cpu", torch.bfloat16):
        assert function(*tensors).dtype is torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda q, k, v: function(q, k, v), tuple(tensors))
    close(traced(*fresh), sdpa(*fresh))


def test_subclasses_are_seen(watched) -> None:
    class Marked(torch.Tensor):
        pass

    tensors = remembered(watched)
    found = qkv.attention(*(t.as_subclass(Marked) for t in tensors))
    torch.testing.assert_close(found.as_subclass(torch.Tensor), sdpa(*tensors))
    parameter = torch.nn.Parameter(tensors[0])
    assert qkv.attention(parameter, *tensors[1:]).requires_grad


def test_in_inference_mode_and_out_of_it(watched) -> None:
    tensors = remembered(watched)
    for _ in range(4):
        close(qkv.attention(*tensors), sdpa(*tensors))
        with torch.inference_mode():
            inside = operands(1)
            close(qkv.attention(*inside), sdpa(*inside))
            close(qkv.attention(*tensors), sdpa(*tensors))


def test_heads_of_the_drop_in() -> None:
    """Heads that groups share are not heads that broadcast."""
    q, k, v = normal(2, 4, 16, 8), normal(2, 2, 16, 8), normal(2, 2, 16, 8, seed=1)
    one = [t[:, :1] for t in (k, v)]
    for _ in range(4):
        close(drop_in(q, k, v, enable_gqa=True), sdpa(q, k, v, enable_gqa=True))
        with pytest.raises(ShapeError):
            drop_in(q, k, v)
        close(drop_in(q, *one), sdpa(q, *one))
        close(drop_in(q[:, :1], k, v), sdpa(q[:, :1], k, v))


def test_the_drop_in_distinguishes_its_arguments(watched) -> None:
    tensors = remembered(watched, drop_in)
    mask = torch.ones(16, 16).tril().bool()
    for _ in range(4):
        for keywords in (
            {"is_causal": True}, {"scale": 0.3}, {"attn_mask": mask},
            {"attn_mask": 2 * mask.float()},
            {"is_causal": True, "scale": 0.3},
        ):  # fmt: skip
            close(drop_in(*tensors, **keywords), sdpa(*tensors, **keywords))
    torch.manual_seed(0)
    assert not drop_in(*tensors, dropout_p=0.5).equal(drop_in(*tensors, dropout_p=0.5))


def masks(seed=0):
    """A mask and a bias, of which some rows allow nothing."""
    allowed = normal(2, 1, 16, 16, seed=seed) > 0.5
    return allowed, normal(4, 16, 16, seed=seed + 50).masked_fill(~allowed[0], -torch.inf)


@pytest.mark.parametrize("function", [qkv.attention, drop_in])
def test_masks_may_have_other_values(watched, function) -> None:
    for seed in range(6):
        tensors = operands(seed)
        for mask in masks(seed):
            found = function(*tensors, mask)
            close(found, sdpa(*tensors, mask).nan_to_num(0.0))
            assert function(*tensors, mask.contiguous()).equal(found)
    assert watched.prepared("forward", any_length=False) == 2


@pytest.mark.parametrize("function", [qkv.attention, drop_in])
def test_other_masks_are_other_calls(watched, function) -> None:
    """Masks differ in dtype and shape, and in how and where they lie in memory."""
    tensors = remembered(watched, function, masks()[0])
    allowed, bias = masks(1)
    for _ in range(3):
        for mask in (
            allowed, allowed[:1], allowed.mT, allowed[..., :1, :], bias, bias.mT, bias.double(),
            bias[:1].expand(4, 16, 16), allowed.expand(2, 4, 16, 16), torch.ones(16, 16) > 0,
        ):  # fmt: skip
            same = mask.to(torch.float32) if mask.dtype is torch.float64 else mask
            close(function(*tensors, mask), sdpa(*tensors, same).nan_to_num(0.0))
        with pytest.raises(QkvError):
            function(*tensors, torch.ones(3, 16, 16) > 0)
    meta = [t.to("meta") for t in tensors]
    assert function(*meta, bias.to("meta")).device.type == "meta"


@pytest.mark.parametrize("function", [qkv.attention, drop_in])
def test_gradients_of_biases_are_not_lost(watched, function) -> None:
    bias = normal(4, 16, 16)
    tensors = remembered(watched, function, bias)
    bias.requires_grad_()
    with torch.no_grad():
        assert not function(*tensors, bias).requires_grad
    function(*tensors, bias).square().sum().backward()
    found, bias.grad = bias.grad, None
    sdpa(*tensors, bias).square().sum().backward()
    close(found, bias.grad, 2e-5)
    rows = torch.stack([bias.detach(), -bias.detach()])
    batched = torch.func.vmap(lambda b: function(*tensors, b))(rows)
    close(batched, torch.stack([sdpa(*tensors, b) for b in rows]))


def test_another_machine_is_seen(watched, monkeypatch) -> None:
    tensors = remembered(watched, backend="cpu")
    monkeypatch.setenv("QKV_ISA", "no such thing")
    with pytest.raises(QkvError, match="no such thing"):
        qkv.attention(*tensors, backend="cpu")
    monkeypatch.delenv("QKV_ISA")
    for _ in range(3):
        close(qkv.attention(*tensors, backend="cpu"), sdpa(*tensors))


def test_a_registered_backend_is_seen(watched) -> None:
    from qkv.backends import register, unregister
    from qkv.backends.reference import ReferenceBackend

    class Loud(ReferenceBackend):
        name = "loud"
        priority = 1000
        calls = 0

        def run(self, problem):
            Loud.calls += 1
            return super().run(problem)

    tensors = remembered(watched)
    register(Loud())
    try:
        close(qkv.attention(*tensors), sdpa(*tensors))
    finally:
        unregister("loud")
    assert Loud.calls == 1


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_many_threads() -> None:
    """Each call has its own memory, whether Python's lock is free during it or not."""
    for length in (16, 160):
        inputs = [[normal(1, 8, length, 32, seed=3 * s + i) for i in range(3)] for s in range(16)]
        expected = [sdpa(*tensors) for tensors in inputs]
        for _ in range(3):
            qkv.attention(*inputs[0])

        def attend(number, inputs=inputs):
            for _ in range(50):
                found = qkv.attention(*inputs[number])
            return found

        with ThreadPoolExecutor(16) as pool:
            for found, right in zip(pool.map(attend, range(16)), expected, strict=True):
                close(found, right)


def test_calls_that_were_used_least_recently_are_forgotten_first(watched, monkeypatch) -> None:
    monkeypatch.setattr(CALLS, "capacity", 100)
    tensors, count = [normal(1, 1, 17, 2, seed=i) for i in range(3)], 110

    def prepared(scale, times=2) -> int:
        """How many problems are made ready while a call is made so many times."""
        before = watched.prepared("forward")
        for _ in range(times):
            qkv.attention(*tensors, scale=float(scale))
        return watched.prepared("forward") - before

    assert prepared(2000) == 1
    for scale in range(1, count + 1):
        assert prepared(scale) == 1
        assert prepared(2000, times=1) == 0
    assert [prepared(scale) for scale in (count, count - 50, count - 95, 2000)] == [0, 0, 0, 0]
    assert [prepared(scale) for scale in (1, 2, 5)] == [1, 1, 1]
    close(qkv.attention(*tensors, scale=1.0), sdpa(*tensors, scale=1.0))


LENGTH_RULE = (qkv.KeyLengths, lambda given, at: at < given.expand(2)[:, None, None, None])
RULES = {
    "lengths": LENGTH_RULE,
    "prefix": (qkv.Prefix, LENGTH_RULE[1]),
    "global tokens": (
        qkv.GlobalTokens,
        lambda given, at: torch.isin(at[:, None], given) | torch.isin(at, given),
    ),
}
"""Variants of an array of integers, and which keys they allow."""


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("wants_gradients", [False, True])
def test_arrays_of_equal_bytes_and_other_types_are_told_apart(kind, wants_gradients) -> None:
    variant, rule = RULES[kind]
    tensors = [tensor.requires_grad_(wants_gradients) for tensor in operands()]
    one, two = torch.tensor([3]), torch.tensor([3, 0], dtype=torch.int32)
    for given in (one, two, one):
        allowed = rule(given, torch.arange(16)).expand(2, 1, 16, 16)
        scores = tensors[0].double() @ tensors[1].double().mT / 8**0.5
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
        expected = (weights @ tensors[2].double()).float()
        for _ in range(4):
            close(qkv.attention(*tensors, variant(given.clone())), expected)
