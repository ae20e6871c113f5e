"""torch's own kernels, as they run on other devices, against the oracle and against the CPU.

They are asked for on the CPU with `backend="torch"`, and run on a GPU where there is one.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck
from torch.testing import assert_close

import qkv
import qkv.torch
from qkv.arrays.torch_arrays import TorchArrays
from qkv.arrays.views import view
from qkv.testing import cases

# torch.func and torch's compiler use what torch has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CASES = [(case, dtype) for case in cases() for dtype in case.dtypes]
restore = TorchArrays().restore


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("case", "dtype"), CASES[::11], ids=str)
@pytest.mark.one_in(4)
def test_every_eleventh_case(case, dtype: str, device: str) -> None:
    call = case.build(dtype)
    tensors = [restore(np.array(a)).to(device) for a in call.arrays]
    out, lse = qkv.attention(
        *tensors, *call.variants, **call.keywords, backend="torch", return_lse=True
    )
    assert out.device.type == device
    truth, limits = case.truth(dtype), case.bounds(dtype)
    found = case.plain_order(view(out.cpu(), "out"))
    seen = ~np.isneginf(truth.lse)
    rows = lse.cpu().double().numpy().reshape(truth.lse.shape)
    assert np.abs(found.astype(float) - truth.out).max(initial=0) <= limits.out
    assert (np.isneginf(rows) == ~seen).all()
    assert np.abs(rows[seen] - truth.lse[seen]).max(initial=0) <= limits.lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("variants", [(), (qkv.Causal(),)], ids=str)
def test_fused_kernels_mean_the_same(device: str, layout: str, variants) -> None:
    query, key, value = normal(2, 4, 7, 6), normal(4, 7, 6, seed=1), normal(2, 2, 7, 5, seed=2)
    key, value = key[:2], value
    if layout == "blhd":
        query, key, value = (t.transpose(-3, -2).contiguous() for t in (query, key, value))
    tensors = [t.to(device) for t in (query, key, value)]
    found = qkv.attention(*tensors, *variants, layout=layout, backend="torch", scale=0.3)
    expected = qkv.attention(query, key, value, *variants, layout=layout, scale=0.3)
    assert_close(found.cpu(), expected)
    spoiled = [t.clone() for t in tensors]
    spoiled[2].select(-2 if layout == "bhld" else -3, 6).fill_(torch.nan)
    out = qkv.attention(*spoiled, *variants, layout=layout, backend="torch", scale=0.3)
    first = out.select(-2 if layout == "bhld" else -3, 0)
    assert bool(first.isfinite().all()) == bool(variants)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_gradients_are_those_of_the_compiled_backend(device: str, layout: str) -> None:
    query, key, value = normal(2, 4, 7, 6), normal(2, 2, 9, 6, seed=1), normal(2, 2, 9, 5, seed=2)
    if layout == "blhd":
        query, key, value = (t.transpose(1, 2).contiguous() for t in (query, key, value))
    own = [normal(4, 1, 9, seed=3), normal(4, seed=4).abs(), normal(4, seed=5)]
    inputs = [t.to(device).requires_grad_() for t in (query, key, value, *own)]

    def function(query, key, value, bias, slopes, sinks, backend):
        return qkv.attention(
            query, key, value, qkv.Causal("end"), bias, qkv.ALiBi(slopes), qkv.Softcap(4.0),
            qkv.Sinks(sinks), qkv.RoPE(), qkv.Dropout(0.2, 5), layout=layout, backend=backend,
        )  # fmt: skip

    found = function(*inputs, "torch")
    plain = [t.detach().cpu().requires_grad_() for t in inputs]
    expected = function(*plain, "cpu")
    assert_close(found.cpu(), expected)
    gradients = torch.autograd.grad(found.square().sum(), inputs)
    for a, b in zip(gradients, torch.autograd.grad(expected.square().sum(), plain), strict=True):
        assert_close(a.cpu(), b)


def written_out(query, key, value, kind: str):
    """torch's formulas, two query heads for each of key and value."""
    key, value = (t.repeat_interleave(2, -3) for t in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if kind == "softcap":
        scores = 2 * torch.tanh(scores / 2)
    if kind == "causal":
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril(1)
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ value


KINDS = {"plain": (), "causal": (qkv.Causal("end"),), "softcap": (qkv.Softcap(2.0),)}
TRANSFORMS = {
    "grad": lambda f, *t: torch.func.grad(lambda *x: f(*x).sin().sum(), (0, 1, 2))(*t),
    "jvp": lambda f, *t: torch.func.jvp(f, t, tuple(x.cos() for x in t)),
    "hessian": lambda f, *t: torch.func.hessian(lambda x: f(x, *t[1:]).sin().sum())(t[0]),
    "vmap": lambda f, *t: torch.vmap(f)(*(torch.stack([x, x + 1]) for x in t)),
    "make_fx": lambda f, *t: torch.fx.experimental.proxy_tensor.make_fx(f)(*t)(*t),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, kind: str, device: str) -> None:
    shapes = (1, 4, 2, 3), (1, 2, 3, 3), (1, 2, 3, 3)
    inputs = [normal(*shape, seed=n).to(device) for n, shape in enumerate(shapes)]
    found, expected = (
        TRANSFORMS[name](f, *inputs)
        for f in (
            lambda *t: qkv.attention(*t, *KINDS[kind], backend="torch"),
            lambda *t: written_out(*t, kind),
        )
    )
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(2)
def test_compile(kind: str, device: str) -> None:
    torch.compiler.reset()
    shapes = (2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)
    inputs = [normal(*shape, seed=n).to(device).requires_grad_() for n, shape in enumerate(shapes)]

    def function(*t):
        return qkv.attention(*t, *KINDS[kind], backend="torch").sin()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), written_out(*inputs, kind).sin()
    assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found.sum(), inputs),
        torch.autograd.grad(expected.sum(), inputs),
        strict=True,
    ):
        assert_close(a, b)
    with torch.no_grad():
        assert_close(compiled(*inputs), expected)


def test_arrays_of_variants_whose_values_are_hidden() -> None:
    query, key, value = (normal(1, 2, 3, 4, seed=n) for n in range(3))
    bias = normal(2, 3, 3, seed=3)
    bias[0, 1, 2] = -torch.inf

    def ours(*t):
        return qkv.attention(*t, backend="torch")

    def theirs(query, key, value, bias):
        return (query @ key.mT / 2 + bias).softmax(-1) @ value

    inputs = query, key, value, bias
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs), theirs(*inputs))
    found, expected = (
        torch.func.grad(lambda *t, f=f: f(*t).sin().sum(), (0, 1, 2, 3))(*inputs)
        for f in (ours, theirs)
    )
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)
    both = torch.stack([bias, bias + normal(2, 3, 3, seed=4)])
    assert_close(
        torch.vmap(lambda b: ours(query, key, value, b))(both),
        torch.stack([theirs(query, key, value, b) for b in both]),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("joined", [False, True])
def test_masks_whose_values_are_hidden(joined: bool, device: str) -> None:
    """Torch has the values of a mask where it compiles, transforms, or has no values at all."""
    tensors = [normal(2, heads, 6, 4, seed=n).to(device) for n, heads in enumerate((4, 2, 2))]
    allowed = normal(2, 1, 6, 6, seed=3).to(device) > 0

    def function(query, allowed):
        mask = qkv.Mask(allowed) | qkv.Mask(allowed.mT) if joined else allowed
        return qkv.attention(query, *tensors[1:], mask, backend="torch")

    def gradient(query):
        return torch.func.grad(lambda q: function(q, allowed).sin().sum())(query)

    query = tensors[0].clone().requires_grad_()
    expected = function(tensors[0], allowed)
    assert_close(expected.cpu(), qkv.attention(
        *(t.cpu() for t in tensors),
        (allowed | allowed.mT if joined else allowed).cpu(),
    ))  # fmt: skip
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_close(compiled(tensors[0], allowed), expected)
    assert_close(compiled(tensors[0], ~allowed), function(tensors[0], ~allowed))
    assert_close(torch.func.jvp(lambda q: function(q, allowed), (query,), (query,))[0], expected)
    both = torch.stack([allowed, ~allowed])
    found = torch.vmap(function, (None, 0))(tensors[0], both)
    assert_close(found, torch.stack([function(tensors[0], mask) for mask in both]))
    (known,) = torch.autograd.grad(function(query, allowed).sin().sum(), query)
    assert_close(gradient(tensors[0]), known)


def test_a_mask_without_values() -> None:
    x = torch.empty(1, 2, 5, 4, device="meta")
    allowed = torch.ones(5, 5, dtype=torch.bool, device="meta")
    assert qkv.torch.scaled_dot_product_attention(x, x, x, allowed).shape == x.shape


def test_a_mask_that_lower_computes_needs_its_values() -> None:
    class Opposite:
        roles: ClassVar = {"array": "in_place"}

        def __init__(self, array) -> None:
            self.array = array

        def lower(self, builder) -> None:
            builder.mask(builder.dense_mask(~np.asarray(self.array)))

    x, allowed = normal(1, 2, 6, 4), normal(6, 6) > 0
    found = qkv.attention(x, x, x, Opposite(allowed), backend="torch")
    assert_close(found, qkv.attention(x, x, x, ~allowed))
    with pytest.raises(qkv.UnsupportedError, match="the values of an array are asked for"):
        torch.vmap(lambda m: qkv.attention(x, x, x, Opposite(m), backend="torch"))(
            torch.stack([allowed, allowed])
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "variant",
    [
        qkv.Segments(torch.arange(6) // 4), qkv.ALiBi(torch.tensor([0.5, 0.25])),
        qkv.Bias(torch.arange(6.0)), qkv.Dropout(0.5, torch.tensor(3)),
        qkv.Segments(np.arange(6) // 4), qkv.ALiBi(np.array([0.5, 0.25])),
        qkv.KeyLengths(np.array([4])), qkv.RoPE(inv_freq=np.array([1.0, 0.1])),
    ],
    ids=repr,
)  # fmt: skip
def test_transforms_beside_arrays_that_they_do_not_transform(variant, device: str) -> None:
    query, key, value = (normal(1, 2, 6, 4, seed=n).to(device) for n in range(3))

    def function(query):
        return qkv.attention(query, key, value, variant, backend="torch").sin().sum()

    given = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(given), given)
    assert_close(torch.func.grad(function)(query), expected)


def test_a_class_with_the_name_of_another_is_not_that_one() -> None:
    """`lower` of these reads values, and that of qkv.Sinks does not."""

    class Sinks:
        roles: ClassVar = {"values": "value"}

        def __init__(self, values) -> None:
            self.values = values

        def lower(self, builder) -> None:
            builder.mask(builder.kv_index < int(np.asarray(self.values).sum()))

    class Derived(qkv.Sinks):
        def lower(self, builder) -> None:
            builder.mask(builder.kv_index < int(np.asarray(self.values).sum()))

    x, limit = normal(1, 2, 6, 4), torch.tensor([1.0, 2.0])
    for variant in (Sinks, Derived):
        found = qkv.attention(x, x, x, variant(limit), backend="torch")
        assert_close(found, (x @ x[..., :3, :].mT / 2).softmax(-1) @ x[..., :3, :])
        with pytest.raises(qkv.UnsupportedError, match="the values of an array are asked for"):
            torch.vmap(lambda v, kind=variant: qkv.attention(x, x, x, kind(v), backend="torch"))(
                torch.stack([limit, limit])
            )
    meta = x.to("meta")
    assert qkv.attention(meta, meta, meta, qkv.Sinks(limit.to("meta"))).shape == x.shape


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_values(kind: str) -> None:
    tensors = [torch.empty(2, heads, 5, 8, device="meta") for heads in (4, 2, 2)]
    assert qkv.attention(*tensors, *KINDS[kind], return_lse=True)[1].shape == (2, 4, 5)
    found = qkv.attention(*tensors, *KINDS[kind])
    assert found.is_meta
    assert found.shape == (2, 4, 5, 8)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_where_tensors_have_no_memory(device: str) -> None:
    """The weights that are dropped follow from the indices, not from tensors of them."""

    def function(*t):
        return qkv.attention(*t, qkv.Dropout(0.5, 3), backend="torch")

    tensors = [normal(2, 2, 5, 4, seed=n).to(device) for n in range(3)]
    expected = function(*tensors)
    assert_close(torch.func.functionalize(function)(*tensors), expected)
    assert_close(torch.func.jvp(function, tuple(tensors), tuple(tensors))[0], expected)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_close(compiled(*tensors), expected)
    query = tensors[0].requires_grad_()
    (gradient,) = torch.autograd.grad(function(*tensors).sin().sum(), query)
    assert_close(torch.func.grad(lambda q: function(q, *tensors[1:]).sin().sum())(query), gradient)
    assert function(*(t.to("meta") for t in tensors)).shape == expected.shape


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_under_transforms(device: str) -> None:
    """The same as without one, where values can be asked for."""
    query, key, value = (normal(1, 2, 6, 4, seed=n).to(device) for n in range(3))
    key[:, 0, 2], value[:, :, 3, 0], value[:, :, 4, 1] = torch.nan, torch.nan, torch.inf
    value[:, :, 5, 1] = -torch.inf

    def function(*t):
        return qkv.attention(*t, qkv.Causal(), backend="torch")

    found = torch.vmap(function)(query[None], key[None], value[None])[0]
    expected = function(query, key, value)
    assert expected[:, :, :2].isfinite().all()
    assert expected[0, 1, 4, 1] == torch.inf
    assert_close(found, expected, equal_nan=True)

    def forbidden(*t):
        return qkv.attention(*t, qkv.KeyLengths(2), backend="torch").sin().sum()

    gradients = torch.func.grad(forbidden, (0, 1, 2))(query, key, value)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("device", DEVICES)
def test_a_learned_number_under_transforms(device: str) -> None:
    """The number was taken for an array of one entry, which score mods may not use whole."""
    query, key, value = (normal(1, 2, 6, 4, seed=n).to(device) for n in range(3))

    def total(number: torch.Tensor) -> torch.Tensor:
        given = qkv.ScoreMod(lambda s, b, h, i, j: s * number)
        return qkv.attention(query, key, value, given, backend="torch").square().sum()

    def written_out(number: torch.Tensor) -> torch.Tensor:
        return ((query @ key.mT / 2 * number).softmax(-1) @ value).square().sum()

    number = torch.tensor(1.5, dtype=torch.float64, device=device)
    assert_close(torch.func.grad(total)(number), torch.func.grad(written_out)(number))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_of_the_device(device: str) -> None:
    tensors = [normal(2, 2, 5, 8, seed=n).float().to(device) for n in range(3)]
    asked = {"device_type": device, "dtype": torch.bfloat16}
    for variants in KINDS.values():
        with torch.autocast(**asked):
            found, lse = qkv.attention(*tensors, *variants, backend="torch", return_lse=True)
        rounded = [t.bfloat16() for t in tensors]
        out, rows = qkv.attention(*rounded, *variants, backend="torch", return_lse=True)
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, out)
        assert torch.equal(lse, rows)


def test_second_derivatives() -> None:
    inputs = [normal(1, 2, 3, 4, seed=n).requires_grad_() for n in range(3)]
    assert gradcheck(
        lambda *t: torch.autograd.grad(
            qkv.attention(*t, qkv.Causal(), backend="torch").square().sum(), t, create_graph=True
        ),
        inputs,
        fast_mode=True,
    )


def test_nothing_leaks_from_behind_a_mask() -> None:
    query, key, value = (normal(1, 2, 6, 4, seed=n) for n in range(3))
    key[:, :, 4], value[:, :, 5] = torch.nan, torch.inf
    inputs = [t.requires_grad_() for t in (query, key, value)]
    seen = qkv.attention(*inputs, qkv.Causal(), backend="torch")
    assert seen[:, :, :4].isfinite().all()
    assert not seen[:, :, 4:].isfinite().any()
    out = qkv.attention(*inputs, qkv.KeyLengths(4), backend="torch")
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    assert all(t.isfinite().all() for t in (out, *gradients))


HIDING = {
    "softcap": (qkv.Causal(), qkv.Softcap(5.0)),
    "score mod": (qkv.Causal(), qkv.ScoreMod(lambda s, b, h, i, j: s * torch.exp(s - 2))),
    "only a score mod": (
        qkv.ScoreMod(lambda s, b, h, i, j: torch.where(j <= i, 5 * torch.tanh(s / 5), -torch.inf)),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variants", HIDING.values(), ids=HIDING)
@pytest.mark.parametrize("transformed", [False, True])
def test_forbidden_products_reach_no_gradient_of_a_score_mod(
    transformed: bool, variants, device: str
) -> None:
    """Gradients of all queries were NaN, since 0 was multiplied with the slope of a mod at NaN."""
    query, key, value = torch.randn(3, 1, 2, 6, 8, device=device)
    spoiled = key.clone()
    spoiled[:, :, 5] = torch.nan

    def gradients(keys: torch.Tensor) -> torch.Tensor:
        def total(query: torch.Tensor) -> torch.Tensor:
            out = qkv.attention(query, keys, value, *variants, q_offset=0, backend="torch")
            return out[:, :, :5].square().sum()

        if transformed:
            return torch.func.grad(total)(query)[:, :, :5]
        leaf = query.clone().requires_grad_()
        return torch.autograd.grad(total(leaf), leaf)[0][:, :, :5]

    assert_close(gradients(spoiled), gradients(key))


HOLES = normal(6, 6, seed=7).masked_fill(normal(6, 6, seed=8) < -0.5, -torch.inf)
CAUSAL = torch.ones(6, 6).tril().bool()
NOT_FINITE = {
    "a bias, then a factor": (
        lambda t: (qkv.Bias(HOLES), qkv.ScoreMod(lambda s, b, h, i, j: s * t)),
        lambda s, t, i, j: (s + HOLES[i, j]) * t,
        HOLES.isfinite(),
    ),
    "both in one function": (
        lambda t: (qkv.ScoreMod(lambda s, b, h, i, j: (s + HOLES[i, j]) * t),),
        lambda s, t, i, j: (s + HOLES[i, j]) * t,
        HOLES.isfinite(),
    ),
    "logarithm of the distance": (
        lambda t: (qkv.Causal(), qkv.ScoreMod(lambda s, b, h, i, j: s * t * np.log(1.5 + i - j))),
        lambda s, t, i, j: s * t * (1.5 + i - j).log(),
        CAUSAL,
    ),
}


@pytest.mark.parametrize("name", NOT_FINITE)
@pytest.mark.parametrize("transformed", [False, True])
def test_numbers_of_forbidden_pairs_reach_no_gradient_of_a_table(
    transformed: bool, name: str
) -> None:
    """The gradient of a learned factor was NaN: 0 was multiplied with the -inf beside it."""
    variants, mod, allowed = NOT_FINITE[name]
    query, key, value = (normal(1, 2, 6, 4, seed=n) for n in range(3))
    factor = torch.tensor(1.5, dtype=torch.float64)

    def total(query: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        given = variants(factor)
        out = qkv.attention(query, key, value, *given, q_offset=0, backend="torch")
        return out.square().sum()

    def written_out(query: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Row by row, of the keys alone that the row may see."""
        rows = []
        for head, i in np.ndindex(2, 6):
            (j,) = torch.nonzero(allowed[i], as_tuple=True)
            scores = mod(key[0, head, j] @ query[0, head, i] / 2, factor, i, j)
            rows.append(scores.softmax(0) @ value[0, head, j])
        return torch.stack(rows).square().sum()

    inputs = [query.requires_grad_(), factor.requires_grad_()]
    expected = torch.autograd.grad(written_out(*inputs), inputs)
    if transformed:
        found = torch.func.grad(total, argnums=(0, 1))(*(t.detach() for t in inputs))
    else:
        found = torch.autograd.grad(total(*inputs), inputs)
    assert_close(found, expected)


I, J = torch.arange(6)[:, None], torch.arange(6)


def choices(s, b, h, i, j, t):
    for n in range(40):
        s = torch.where(i - j == n, s * t / (1.0 + n * j), s)
    return s


PIECES = {
    "divided by the distance": (
        lambda s, b, h, i, j, t: torch.where(i != j, s * t / abs(i - j), s),
        lambda s, t: torch.where(I != J, s * t / abs(I - J).clamp(min=1), s),
    ),
    "infinite where it is not chosen": (
        lambda s, b, h, i, j, t: torch.where(s < 0, torch.exp(1000 * s * t), s * t),
        lambda s, t: torch.where(s < 0, torch.exp(1000 * s.clamp(max=0) * t), s * t),
    ),
    "the larger of two": (
        lambda s, b, h, i, j, t: torch.maximum(s, t * torch.log(1.0 * j)),
        lambda s, t: torch.where(J > 0, torch.maximum(s, t * J.clamp(min=1).log()), s),
    ),
    "equal ones": (
        lambda s, b, h, i, j, t: torch.minimum(s * s, t * s * s / torch.exp(0.0 * j)),
        lambda s, t: torch.minimum(s * s, t * s * s),
    ),
    "many choices": (choices, lambda s, t: choices(s, 0, 0, I, J, t)),
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("transformed", [False, True])
def test_pieces_that_are_not_chosen_have_no_gradient(transformed: bool, name: str) -> None:
    """All gradients were NaN where the slope of a piece that is not chosen was."""
    mod, formula = PIECES[name]
    inputs = [normal(1, 2, 6, 4, seed=n) for n in range(3)]
    inputs.append(torch.tensor(1.0, dtype=torch.float64))

    def total(query, key, value, t):
        given = qkv.ScoreMod(lambda s, b, h, i, j: mod(s, b, h, i, j, t))
        out = qkv.attention(query, key, value, given, q_offset=0, backend="torch")
        return out.square().sum()

    def written_out(query, key, value, t):
        return (formula(query @ key.mT / 2, t).softmax(-1) @ value).square().sum()

    expected = torch.func.grad(written_out, argnums=(0, 1, 2, 3))(*inputs)
    if transformed:
        found = torch.func.grad(total, argnums=(0, 1, 2, 3))(*inputs)
    else:
        leaves = [t.requires_grad_() for t in inputs]
        found = torch.autograd.grad(total(*leaves), leaves)
    assert_close(found, expected)


def test_lse_without_keys_has_gradients_of_zero() -> None:
    """lse was a constant, of which torch refuses gradients."""
    inputs = [torch.zeros(1, 2, n, 4, requires_grad=True) for n in (3, 0, 0)]
    _, lse = qkv.attention(*inputs, backend="torch", return_lse=True)
    assert lse.tolist() == [[[-torch.inf] * 3] * 2]
    found = torch.autograd.grad(lse, inputs[:2], torch.ones_like(lse))
    assert_close(found, tuple(map(torch.zeros_like, inputs[:2])))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_finite_have_gradients_of_nan(device: str) -> None:
    """Gradients of such rows were 0, as if nothing depended on them."""
    query, key, value = torch.randn(3, 1, 2, 6, 8, device=device)
    query[:, 0, 3], key[:, 1, 2] = torch.nan, torch.nan
    query.requires_grad_(), key.requires_grad_()
    bias = torch.zeros(6, 6, device=device)
    qkv.attention(query, key, value, bias.add(0.5), backend="torch").sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    assert query.grad[:, 0, 3].isnan().all()
    assert not query.grad[:, 0, :3].isnan().any()
    assert key.grad.isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_len", [0, 3, 6])
def test_a_sink_of_infinity_takes_all(kv_len: int, device: str) -> None:
    """The output was NaN, since infinity was subtracted from infinity."""
    query, key, value = torch.randn(3, 1, 2, 6, 8, device=device)
    query.requires_grad_()
    sinks = torch.tensor([torch.inf, 0.5], device=device, requires_grad=True)
    variants = (qkv.Sinks(sinks), qkv.KeyLengths(kv_len))
    out, lse = qkv.attention(query, key, value, *variants, return_lse=True, backend="torch")
    assert (out[:, 0] == 0).all()
    assert lse[:, 0].isposinf().all()
    assert lse[:, 1].isfinite().all()
    gradients = torch.autograd.grad(out.sum(), (query, sinks))
    assert all(g.isfinite().all() for g in gradients)
    assert (gradients[0][:, 0] == 0).all()


def test_memory_does_not_grow_with_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    from qkv.backends.torch import attention

    sizes: list[int] = []
    monkeypatch.setattr(attention, "PAIRS", 2**10)
    query = normal(1, 1, 64, 4).requires_grad_()

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda t: t):
        out = qkv.attention(query, query, query, qkv.Causal(), backend="torch")
    assert max(sizes, default=0) <= 64 * 4
    (gradient,) = torch.autograd.grad(out.sum(), query)
    expected = torch.autograd.grad(qkv.attention(query, query, query, qkv.Causal()).sum(), query)
    assert_close(gradient, expected[0])


def test_backends_of_the_cpu_are_refused_elsewhere() -> None:
    query = torch.zeros(1, 2, 3, 4, device="meta")
    with pytest.raises(qkv.UnsupportedError, match="query is on meta"):
        qkv.attention(query, query, query, backend="cpu")


@pytest.mark.parametrize("wants_gradient", [False, True])
@pytest.mark.parametrize("place", [1, 2])
def test_operands_on_two_devices_are_named(wants_gradient: bool, place: int) -> None:
    operands = [torch.ones(1, 2, 4, 8, requires_grad=wants_gradient) for _ in range(3)]
    operands[place] = operands[place].to("meta")
    with pytest.raises(qkv.UnsupportedError) as caught:
        qkv.attention(*operands, qkv.Causal())
    assert "meta" in str(caught.value)
    assert ("key", "value")[place - 1] in str(caught.value)
