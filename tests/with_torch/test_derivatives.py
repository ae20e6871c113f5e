"""Derivatives of `qkv.attention` on tensors, against finite differences and torch's own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import qkv

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, V_DIM = 2, 4, 2, 5, 6, 3, 4


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def operands(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [
        normal(BATCH, HEADS, Q_LEN, DIM, seed=1, dtype=dtype),
        normal(BATCH, KV_HEADS, KV_LEN, DIM, seed=2, dtype=dtype),
        normal(BATCH, KV_HEADS, KV_LEN, V_DIM, seed=3, dtype=dtype),
    ]


ALLOWED = normal(HEADS, Q_LEN, KV_LEN, seed=9) < 0.7
ALLOWED[:, 0] = False  # a row without keys

# gradcheck scripts a function of its own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    # torch's compiler uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

VARIANTS = {
    "none": ((), lambda: ()),
    "causal": ((), lambda: (qkv.Causal("end"),)),
    "window": ((), lambda: (qkv.SlidingWindow(2, 1),)),
    "key lengths": ((), lambda: (qkv.KeyLengths(torch.tensor([4, 0])),)),
    "segments": (
        (),
        lambda: (qkv.Segments(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 1])),),
    ),
    "mask": ((), lambda: (ALLOWED,)),
    "union": ((), lambda: (qkv.Causal() | qkv.Mask(ALLOWED),)),
    "prefix": ((), lambda: (qkv.Causal() | qkv.Prefix(torch.tensor([2, 4])),)),
    "global tokens": (
        (),
        lambda: (qkv.SlidingWindow(1, 0) | qkv.GlobalTokens(torch.tensor([0, 3])),),
    ),
    "strided": ((), lambda: (qkv.Strided(2),)),
    "block sparse": ((), lambda: (qkv.BlockSparse(ALLOWED[0, :3, :2], 2, 3),)),
    "bias": (((HEADS, Q_LEN, KV_LEN),), lambda bias: (bias,)),
    "bias of keys": (((BATCH, 1, 1, KV_LEN),), lambda bias: (qkv.Bias(bias), ALLOWED)),
    "alibi": (((HEADS,),), lambda slopes: (qkv.ALiBi(slopes), qkv.Causal())),
    "relative bias": (((8, HEADS),), lambda table: (qkv.RelativeBias(table, max_distance=6),)),
    "softcap": ((), lambda: (qkv.Softcap(1.5),)),
    "bias, then softcap": (((Q_LEN, KV_LEN),), lambda bias: (bias, qkv.Softcap(2.0))),
    "sinks": (((HEADS,),), lambda sinks: (qkv.Sinks(sinks), qkv.Causal())),
    "score mod": (
        ((KV_LEN,),),
        lambda table: (qkv.ScoreMod(lambda s, b, h, q, k: s * table[k] + 0.3 * s * s),),
    ),
    "rope": ((), lambda: (qkv.RoPE(rotary_dim=2),)),
    "dropout": ((), lambda: (qkv.Dropout(0.4, 3),)),
    "many": (
        ((HEADS, 1, KV_LEN), (HEADS,)),
        lambda bias, sinks: (qkv.Causal(), bias, qkv.Softcap(3.0), qkv.Sinks(sinks)),
    ),
}


def case(name: str):
    shapes, make = VARIANTS[name]
    own = [normal(*shape, seed=10 + n) for n, shape in enumerate(shapes)]

    def function(query, key, value, *arrays):
        return qkv.attention(
            query, key, value, *make(*arrays), q_offset=q_offset(name), return_lse=True
        )

    return function, [*operands(), *own]


def q_offset(name: str):
    return None if name == "causal" else "start"


def finite_lse(found):
    """Rows without keys have lse -inf, which differences cannot be taken of."""
    out, lse = found
    return out, torch.where(torch.isneginf(lse), 0.0, lse)


WHOLE = ("many",)
"""Every entry of the Jacobian; of the others, one random combination."""


# Both draw the same sample, and share its kernels.
@pytest.mark.slow
@pytest.mark.sampled("name", list(VARIANTS), one_in=8)
def test_gradcheck(name: str) -> None:
    function, inputs = case(name)
    inputs = [t.requires_grad_() for t in inputs]
    assert gradcheck(
        lambda *t: finite_lse(function(*t)), inputs, check_forward_ad=True,
        fast_mode=name not in WHOLE,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.sampled("name", list(VARIANTS), one_in=8)
def test_gradgradcheck(name: str) -> None:
    function, inputs = case(name)
    inputs = [t.requires_grad_() for t in inputs]
    assert gradgradcheck(
        lambda *t: finite_lse(function(*t)), inputs, check_fwd_over_rev=True,
        check_rev_over_rev=True, fast_mode=True,
    )  # fmt: skip


def dense(query, key, value, *arrays, causal: bool = False):
    """torch's own, all derivatives from its formulas."""
    bias = arrays[0] if arrays else torch.zeros(Q_LEN, KV_LEN, dtype=query.dtype)
    key, value = (t.repeat_interleave(HEADS // KV_HEADS, -3) for t in (key, value))
    scores = query @ key.mT * DIM**-0.5 + bias
    return scores.softmax(-1) @ value


def ours(query, key, value, *arrays):
    return qkv.attention(query, key, value, *arrays)


@pytest.mark.slow
@pytest.mark.sampled(
    ("transform", "arrays"),
    list(product([jacrev, jacfwd, hessian], [(), ((HEADS, Q_LEN, KV_LEN),)])),
    one_in=2,
)
def test_transforms(transform, arrays) -> None:
    inputs = [*operands(), *(normal(*shape, seed=4) for shape in arrays)]
    inputs = [t[:1] if t.ndim == 4 else t for t in inputs]
    which = (0, 2, *range(3, len(inputs)))
    found, expected = (
        transform(lambda *t, f=f: f(*t)[0, 1, :2].sum(0), argnums=which)(*inputs)
        for f in (ours, dense)
    )
    for a, b in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def flat(tree):
    return [leaf for branch in tree for leaf in flat(branch)] if isinstance(tree, tuple) else [tree]


def test_forward_over_reverse_and_reverse_over_forward() -> None:
    query, key, value = operands()
    along = normal(*query.shape, seed=5)

    def gradient(f):
        return lambda q: grad(lambda x: f(x, key, value).square().sum())(q)

    for f, g in ((ours, dense),):
        a = jvp(gradient(f), (query,), (along,))
        b = jvp(gradient(g), (query,), (along,))
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
        a, b = (
            grad(lambda x, h=h: jvp(lambda q: h(q, key, value), (x,), (along,))[1].sum())(query)
            for h in (f, g)
        )
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_dual_numbers() -> None:
    query, key, value = operands()
    along = normal(*key.shape, seed=5)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(ours(query, forward_ad.make_dual(key, along), value))
        expected = forward_ad.unpack_dual(dense(query, forward_ad.make_dual(key, along), value))
    torch.testing.assert_close(found.tangent, expected.tangent, rtol=1e-9, atol=1e-11)


FREQUENCIES = np.array([1.0, 0.1])


class Doubled(qkv.Variant):
    """Computes what scores read, which has no gradient."""

    roles: ClassVar[dict[str, Any]] = {}

    def __init__(self, array: Any) -> None:
        self.array = array

    def lower(self, builder: Any) -> None:
        builder.mod(builder.score + builder.broadcast(2 * np.asarray(self.array), "doubled"))

    def naive(self, dense: Any) -> None:
        raise NotImplementedError

    @classmethod
    def examples(cls, shape: Any, rng: Any) -> list[Any]:
        return []


def rotated(x: torch.Tensor, frequencies: Any = FREQUENCIES) -> torch.Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * torch.as_tensor(frequencies)
    turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.exp(1j * angles)
    return torch.cat([turned.real, turned.imag], -1)


BESIDE = {
    "frequencies": (qkv.RoPE(inv_freq=FREQUENCIES), rotated, 0.0),
    "a tensor of them": (qkv.RoPE(inv_freq=torch.as_tensor(FREQUENCIES)), rotated, 0.0),
    "what lower computes": (Doubled(np.arange(6.0)), lambda x: x, 2 * torch.arange(6.0)),
}


@pytest.mark.parametrize("name", BESIDE)
def test_forward_mode_beside_arrays_that_do_not_change(name: str) -> None:
    """torch made tangents of zeros for them, which were refused: such arrays have none."""
    variant, turned, bias = BESIDE[name]
    query, key, value, along = (normal(2, 6, 4, seed=n) for n in range(4))

    def attend(query: torch.Tensor) -> torch.Tensor:
        return qkv.attention(query, key, value, variant, q_offset=0)

    def written_out(query: torch.Tensor) -> torch.Tensor:
        scores = turned(query) @ turned(key).mT / 2 + bias
        return scores.softmax(-1) @ value

    _, expected = jvp(written_out, (query,), (along,))
    assert_close(jvp(attend, (query,), (along,))[1], expected)
    with forward_ad.dual_level():
        dual = attend(forward_ad.make_dual(query, along))
        assert_close(forward_ad.unpack_dual(dual).tangent, expected)
    of_sums = [lambda q, f=f: f(q).square().sum() for f in (attend, written_out)]
    found, expected = (jvp(grad(f), (query,), (along,))[1] for f in of_sums)
    assert_close(found, expected)


IN_DIMS = [(0, 0, 0), (0, None, None), (None, 1, None), (2, None, 0), (None, None, 0)]


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@pytest.mark.parametrize("variants", [(), (qkv.Causal("end"),), (qkv.Dropout(0.3, 1),)], ids=str)
def test_vmap(in_dims, variants) -> None:
    shapes = (HEADS, Q_LEN, DIM), (KV_HEADS, KV_LEN, DIM), (KV_HEADS, KV_LEN, V_DIM)
    inputs = []
    for n, (shape, dim) in enumerate(zip(shapes, in_dims, strict=True)):
        sizes = list(shape)
        if dim is not None:
            sizes.insert(dim, 3)
        inputs.append(normal(*sizes, seed=n))

    def one(*t):
        return qkv.attention(*t, *variants)

    found = vmap(one, in_dims)(*inputs)
    rows = [
        one(*(t if d is None else t.select(d, n) for t, d in zip(inputs, in_dims, strict=True)))
        for n in range(3)
    ]
    torch.testing.assert_close(found, torch.stack(rows), rtol=0, atol=0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("arrays", [(), ((HEADS, Q_LEN, KV_LEN),)], ids=["plain", "bias"])
def test_batches_of_cotangents(arrays, batch: int) -> None:
    """`torch.autograd` takes them without `torch.func`, for first and second derivatives."""
    inputs = [*operands(), *(normal(*shape, seed=4) for shape in arrays)]
    along = normal(batch, BATCH, HEADS, Q_LEN, V_DIM, seed=5)

    def derivatives(f):
        given = [t.clone().requires_grad_() for t in inputs]
        out = f(*given)
        first = torch.autograd.grad(out, given, along, is_grads_batched=True, create_graph=True)
        of_first = torch.autograd.grad(sum(g.sin().sum() for g in first), given, retain_graph=True)
        once = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        cotangents = [normal(batch, *t.shape, seed=6 + n) for n, t in enumerate(given)]
        second = torch.autograd.grad(once, given, cotangents, is_grads_batched=True)
        return *first, *of_first, *second

    for a, b in zip(derivatives(ours), derivatives(dense), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobians(strategy: str) -> None:
    query, key, value = (t[:1] for t in operands())
    jacobian, hessians = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    for transform in (
        lambda f: jacobian(lambda *t: f(*t)[0, 1, :2], (query, key, value), vectorize=True,
                           strategy=strategy),
        lambda f: hessians(lambda *t: f(*t)[0, 1, :2].sin().sum(), (query, key), vectorize=True,
                           outer_jacobian_strategy=strategy),
    ):  # fmt: skip

        def given(f, transform=transform):
            return transform(lambda *t: f(*(*t, value)[:3]))

        for a, b in zip(flat(given(ours)), flat(given(dense)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_batches_of_nothing() -> None:
    query, key, value = operands()
    bias = torch.zeros(0, Q_LEN, KV_LEN, dtype=torch.float64)
    for f in (ours, dense):
        assert vmap(lambda b, f=f: f(query, key, value, b))(bias).shape == (
            0, BATCH, HEADS, Q_LEN, V_DIM
        )  # fmt: skip
        gradient = vmap(grad(lambda b, f=f: f(query, key, value, b).sum()))(bias)
        assert gradient.shape == bias.shape


def test_gradients_of_each_sample() -> None:
    query, key, value = operands()
    bias = normal(BATCH, HEADS, Q_LEN, KV_LEN, seed=6)

    def loss(f):
        return lambda *t: f(*t).square().sum()

    found, expected = (
        vmap(grad(loss(f), argnums=(0, 1, 2, 3)))(query, key, value, bias) for f in (ours, dense)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def naive(make_scores, sinks=False):
    def attention(query, key, value, *arrays):
        key, value = (t.repeat_interleave(HEADS // KV_HEADS, -3) for t in (key, value))
        scores = make_scores(query @ key.mT * DIM**-0.5, *arrays)
        if sinks:
            column = arrays[-1][:, None, None].expand(BATCH, HEADS, Q_LEN, 1)
            return torch.cat([scores, column.to(scores.dtype)], -1).softmax(-1)[..., :-1] @ value
        return scores.softmax(-1) @ value

    return attention


def causal(scores, offset=0):
    allowed = torch.ones(Q_LEN, KV_LEN, dtype=torch.bool).tril(offset)
    return scores.masked_fill(~allowed, -torch.inf)


NAIVE = {
    "none": naive(lambda s: s),
    "causal": naive(lambda s: causal(s, KV_LEN - Q_LEN)),
    "bias": naive(lambda s, bias: s + bias),
    "sinks": naive(lambda s, sinks: causal(s), sinks=True),
    "many": naive(lambda s, bias, sinks: causal(3 * torch.tanh((s + bias) / 3)), sinks=True),
}


@pytest.mark.slow
@pytest.mark.sampled(
    ("name", "dtype"),
    list(product(NAIVE, [torch.float32, torch.bfloat16, torch.float16])),
    one_in=8,
)
def test_gradients_as_near_as_three_times_the_naive_ones(name: str, dtype: torch.dtype) -> None:
    """The bound adds three units in the last place of the largest."""
    function, exact = case(name)
    rounded = [t.to(dtype) for t in exact]
    cotangent = normal(BATCH, HEADS, Q_LEN, V_DIM, seed=8).to(dtype)

    def gradients(f, inputs, seed):
        inputs = [t.detach().clone().requires_grad_() for t in inputs]
        out = f(*inputs)
        return torch.autograd.grad(out, inputs, seed.to(out.dtype))

    truth = gradients(lambda *t: function(*t)[0], [t.double() for t in rounded], cotangent)
    found = gradients(lambda *t: function(*t)[0], rounded, cotangent)
    naive = gradients(NAIVE[name], rounded, cotangent)
    for t, f, n in zip(truth, found, naive, strict=True):
        error, allowed = ((x.double() - t).abs().max().item() for x in (f, n))
        unit = torch.finfo(dtype).eps * t.abs().max().item()
        assert error <= 3 * allowed + 3 * unit


def test_nothing_leaks_from_behind_a_mask() -> None:
    query, key, value = (t.requires_grad_() for t in operands())
    with torch.no_grad():
        key[:, :, 3], value[:, :, 4] = torch.nan, torch.inf
    allowed = torch.tensor([True, True, True, False, False, True])
    out = qkv.attention(query, key, value, allowed)
    gradients = torch.autograd.grad(
        out, (query, key, value), torch.ones_like(out), create_graph=True
    )
    assert all(t.isfinite().all() for t in (out, *gradients))
    assert (gradients[1][:, :, 3:5] == 0).all()
    again = torch.autograd.grad(gradients[0].square().sum(), (query, key, value))
    assert all(t.isfinite().all() for t in again)


def test_checkpoints() -> None:
    """What is computed again in the backward pass may be read only once."""
    inputs = [t.requires_grad_() for t in operands()]

    def function(*t: torch.Tensor) -> torch.Tensor:
        return ours(*t).square()

    plain = function(*inputs)
    again = checkpoint(function, *inputs, use_reentrant=False)
    seed = torch.ones_like(plain)
    for a, b in zip(
        torch.autograd.grad(again, inputs, seed),
        torch.autograd.grad(plain, inputs, seed),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_third_derivative_is_refused() -> None:
    query, key, value = (t[:1, :2, :2] for t in operands())

    def second(q):
        return jacrev(jacrev(lambda x: ours(x, key, value).sum()))(q)

    with pytest.raises(qkv.UnsupportedError, match="third derivative"):
        jacrev(second)(query)
    with pytest.raises(qkv.UnsupportedError, match="third derivative"):
        jvp(second, (query,), (query,))


def test_hvp_is_refused_and_vhp_named_which_gives_the_same() -> None:
    """`hvp` of torch differentiates the second derivative along its direction once more."""
    query, key, value = (t[:1, :2, :2] for t in operands())
    direction = query.cos()

    def with_ours(x):
        return ours(x, key, value).square().sum()

    def with_torch(x):
        return ((x @ key.mT / x.shape[-1] ** 0.5).softmax(-1) @ value).square().sum()

    with pytest.raises(qkv.UnsupportedError, match=r"torch\.autograd\.functional\.vhp"):
        torch.autograd.functional.hvp(with_ours, query, direction)
    _, product = torch.autograd.functional.vhp(with_ours, query, direction)
    _, expected = torch.autograd.functional.hvp(with_torch, query, direction)
    torch.testing.assert_close(product, expected)


def test_the_tangent_of_a_tangent_is_refused_and_the_hessian_named_instead() -> None:
    query, key, value = (t[:1, :2, :2] for t in operands())
    with pytest.raises(qkv.UnsupportedError, match=r"tangent of a tangent[\s\S]*hessian"):
        jacfwd(jacfwd(lambda x: ours(x, key, value).sum()))(query)


INSIDE: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, x: jvp(f, (x,), (x.cos(),))[1],
    "grad": lambda f, x: grad(lambda y: f(y).sin().sum())(x),
    "hessian": lambda f, x: hessian(lambda y: f(y).sin().sum())(x),
    "vmap of grad": lambda f, x: vmap(grad(lambda y: f(y).sin().sum()))(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
def test_derivatives_inside_of_compiled_functions(name: str) -> None:
    """Changes along a direction were zero in silence, and gradients an error of torch's."""

    def written(x: torch.Tensor) -> torch.Tensor:
        scores = (x @ x.mT / x.shape[-1] ** 0.5).masked_fill(~torch.ones(4, 4).tril().bool(), -1e9)
        return scores.softmax(-1) @ x

    def called(x: torch.Tensor) -> torch.Tensor:
        return qkv.attention(x, x, x, qkv.Causal())

    derivative = INSIDE[name]
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: derivative(called, x), backend="aot_eager")
    assert_close(compiled(x), derivative(written, x))
    torch.compiler.reset()
    compiled = torch.compile(lambda x: derivative(called, x), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Compile inside of the derivative"):
        compiled(x)


def test_forward_mode_around_compiled_functions() -> None:
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: qkv.attention(x, x, x), backend="aot_eager")
    with forward_ad.dual_level():
        out = compiled(forward_ad.make_dual(x, x.cos()))
        found = forward_ad.unpack_dual(out).tangent
    right = jvp(lambda x: (x @ x.mT / 3**0.5).softmax(-1) @ x, (x,), (x.cos(),))[1]
    assert_close(found, right)


class Own:
    """`score + bias`, of a class that declares nothing of what it holds."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias.numpy()

    def lower(self, builder: Any) -> None:
        builder.mod(builder.score + builder.broadcast(self.bias, "bias"))


def test_variants_are_let_go_after_second_derivatives() -> None:
    """What operators had read of them kept the last 1,024, with all that they hold."""
    query, key, value = operands()
    variants = [Own(normal(HEADS, Q_LEN, KV_LEN, seed=n)) for n in range(3)]
    held = [weakref.ref(variant) for variant in variants]
    for variant in variants:
        x = query.clone().requires_grad_()
        out = qkv.attention(x, key, value, variant)
        (first,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        first.sum().backward()
        grad(lambda x, variant=variant: qkv.attention(x, key, value, variant).sum())(query)
    del variants, variant, x, out, first
    gc.collect()
    assert [reference() for reference in held] == [None] * 3
