"""Values and gradients of every variant against `jax.grad` of the formula, in float64."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="compared with jax 0.10 or later")

import jax
import jax.numpy as jnp
from written_out import OWN, attention

import qkv
from qkv.problem.building.builder import Shape
from qkv.testing import truth
from qkv.variants import ALL
from watched import forget_prepared_calls

SHAPE = Shape((2,), 4, 2, 7, 9, 6, 5)
EPS = 64 * 2.0**-52
EXAMPLES = [
    pytest.param(variant, id=f"{kind.__name__}-{n}")
    for kind in ALL
    if kind is not qkv.ScoreMod  # its examples call numpy; see test_a_score_mod
    for n, variant in list(enumerate(kind.examples(SHAPE, np.random.default_rng(1))))[-1:]
]
COMPILED = (qkv.Causal, qkv.Bias, qkv.RelativeBias, qkv.RoPE, qkv.Sinks)
"""Kinds for which kernels are made; the others take the readable backend, which needs none."""


def operands(shape: Shape = SHAPE, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    sizes = (
        (shape.num_heads, shape.q_len, shape.head_dim),
        (shape.num_kv_heads, shape.kv_len, shape.head_dim),
        (shape.num_kv_heads, shape.kv_len, shape.v_head_dim),
    )
    return [jnp.asarray(rng.normal(size=(*shape.batch_shape, *size))) for size in sizes]


def close(got: Any, right: Any) -> None:
    got, right = np.asarray(got), np.asarray(right)
    assert got.shape == right.shape
    assert got.dtype == right.dtype
    finite = np.isfinite(right)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    largest = max(1.0, float(np.max(np.abs(right[finite]), initial=0.0)))
    error = float(np.max(np.abs(got[finite] - right[finite]), initial=0.0))
    assert error <= EPS * largest, f"{error:.3g} off, allowed is {EPS * largest:.3g}"


def arrays_of(variant: Any) -> dict[str, Any]:
    """Fields that hold arrays; each becomes an argument of a jitted function."""
    return {
        field.name: jnp.asarray(value, jnp.float64 if value.dtype.kind == "f" else None)
        for field in fields(variant)
        if isinstance(value := getattr(variant, field.name), np.ndarray)
    }


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.sampled("variant", EXAMPLES, one_in=7)
def test_every_variant(variant: Any) -> None:
    """The arrays that it holds are traced as well, and differentiated where they are floating."""
    q, k, v = operands()
    known = truth(q, k, v, [variant], q_offset="start")
    rng = np.random.default_rng(2)
    along_out = jnp.asarray(rng.normal(size=known.out.shape))
    along_lse = jnp.asarray(np.where(np.isneginf(known.lse), 0, rng.normal(size=known.lse.shape)))
    given = arrays_of(variant)
    backend = "cpu" if isinstance(variant, COMPILED) else "blocked"
    own = OWN.get(type(variant), "")
    if own and own not in given and getattr(variant, own) is not None:
        given[own] = jnp.asarray(getattr(variant, own))
    wanted = {own: given.pop(own)} if own in given else {}

    def ours(q: Any, k: Any, v: Any, wanted: Any, given: Any) -> Any:
        call_variants = replace(variant, **wanted, **given)
        return qkv.attention(
            q, k, v, call_variants, q_offset="start", return_lse=True, backend=backend
        )

    def right(q: Any, k: Any, v: Any, wanted: Any, given: Any) -> Any:
        return attention(q, k, v, known, {0: wanted.get(own)})

    def total(f: Any) -> Any:
        def of(*arguments: Any) -> Any:
            out, lse = f(*arguments)
            rows = jnp.where(along_lse == 0, 0, lse * along_lse)
            return (out * along_out).sum() + rows.sum(), (out, lse)

        return jax.grad(of, argnums=(0, 1, 2, 3), has_aux=True)

    found = jax.jit(total(ours))(q, k, v, wanted, given)
    expected = total(right)(q, k, v, wanted, given)
    jax.tree.map(close, found, expected)
    out, lse = found[1]
    close(out, known.out)
    close(lse, known.lse)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_score_mod() -> None:
    """Traced arrays in its closure have gradients, each its own."""
    q, k, v = operands()
    rng = np.random.default_rng(3)
    per_head, by_distance = (jnp.asarray(rng.normal(size=n)) for n in (SHAPE.num_heads, 17))
    along = jnp.asarray(rng.normal(size=(2, 4, 7, 5)))

    def ours(q: Any, per_head: Any, by_distance: Any) -> Any:
        def mod(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
            return score * per_head[head] + by_distance[np.clip(q_pos - kv_pos + 8, 0, 16)]

        return (qkv.attention(q, k, v, qkv.ScoreMod(mod), q_offset="start") * along).sum()

    def right(q: Any, per_head: Any, by_distance: Any) -> Any:
        keys, values = (jnp.repeat(a, 2, axis=1) for a in (k, v))
        s = jnp.einsum("bhid,bhjd->bhij", q, keys) * 6**-0.5
        near = np.clip(np.arange(7)[:, None] - np.arange(9) + 8, 0, 16)
        s = s * per_head[:, None, None] + by_distance[near]
        return (jax.nn.softmax(s, axis=-1) @ values * along).sum()

    found, expected = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(q, per_head, by_distance)
        for f in (ours, right)
    )
    jax.tree.map(close, found, expected)
    jax.tree.map(close, jax.grad(ours, argnums=2)(q, per_head, by_distance), expected[1][2])


SECOND = [
    qkv.Bias(np.random.default_rng(4).normal(size=(4, 7, 9))),
    qkv.Softcap(1.5),
]


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("variant", SECOND, ids=lambda v: type(v).__name__)
def test_second_derivatives(variant: Any) -> None:
    """A function of all gradients is differentiated by everything that they depend on."""
    q, k, v = operands()
    known = truth(q, k, v, [variant, qkv.Causal()], q_offset="start")
    field = OWN.get(type(variant), "")
    own = {0: jnp.asarray(getattr(variant, field))} if field else {}
    along = jnp.asarray(np.random.default_rng(5).normal(size=known.out.shape))

    def ours(q: Any, k: Any, v: Any, own: Any) -> Any:
        call_variants = replace(variant, **{field: own[0]}) if field else variant
        return qkv.attention(
            q,
            k,
            v,
            call_variants,
            qkv.Causal(),
            q_offset="start",
            return_lse=True,
            backend="blocked",
        )

    def right(q: Any, k: Any, v: Any, own: Any) -> Any:
        return attention(q, k, v, known, own)

    def second(f: Any) -> Any:
        def first(along: Any, *inputs: Any) -> Any:
            def total(*inputs: Any) -> Any:
                out, lse = f(*inputs)
                return (out * along).sum() + (lse * lse).sum()

            found = jax.grad(total, argnums=(0, 1, 2, 3))(*inputs)
            return sum(jnp.sin(gradient).sum() for gradient in jax.tree.leaves(found))

        return jax.grad(first, argnums=(0, 1, 2, 3, 4))

    found = jax.jit(second(ours))(along, q, k, v, own)
    jax.tree.map(close, found, second(right)(along, q, k, v, own))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_a_hessian_of_matrices(layout: str) -> None:
    """Reverse over reverse mode, batched by `jax.jacrev`."""
    rng = np.random.default_rng(8)
    q, k, v = (jnp.asarray(rng.normal(size=(5, 3))) for _ in range(3))

    def ours(q: Any, v: Any) -> Any:
        out = qkv.attention(q, k, v, qkv.Causal(), layout=layout, backend="blocked")
        return jnp.sin(out).sum()

    def right(q: Any, v: Any) -> Any:
        s = jnp.where(np.tri(5, dtype=bool), q @ k.T * 3**-0.5, -jnp.inf)
        return jnp.sin(jax.nn.softmax(s, axis=-1) @ v).sum()

    found = jax.jacrev(jax.grad(ours, argnums=(0, 1)), argnums=(0, 1))(q, v)
    jax.tree.map(close, found, jax.hessian(right, argnums=(0, 1))(q, v))


@pytest.mark.usefixtures("x64")
def test_only_what_is_followed_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that nobody differentiates costs no gradient of its size."""
    from qkv.bridges.jax import operations as jax_operations

    seen: list[Any] = []
    run = jax_operations._backward

    def spy(operation: Any, inputs: Any, results: Any) -> None:
        seen.append((operation.wanted, len(inputs)))
        run(operation, inputs, results)

    monkeypatch.setattr(jax_operations, "_backward", spy)
    q, k, v = operands()
    bias = jnp.ones((7, 9))

    def f(q: Any, bias: Any) -> Any:
        return qkv.attention(q, k, v, qkv.Bias(bias), return_lse=True, backend="blocked")

    jax.grad(lambda q: f(q, bias)[0].sum())(q)
    assert seen == [((0,), 4 + 4)]
    jax.grad(lambda bias: f(q, bias)[0].sum())(bias)
    assert seen[1:] == [((3,), 4 + 4)]
    jax.grad(lambda q: f(q, bias)[1].sum())(q)
    assert seen[2:] == [((0,), 4 + 5)]


def attend(q: Any, k: Any, v: Any, layout: str = "bhld") -> Any:
    return qkv.attention(q, k, v, qkv.Causal(), layout=layout, backend="cpu")


def turned(q: Any, k: Any, v: Any) -> Any:
    return attend(*(a.swapaxes(-3, -2) for a in (q, k, v)), layout="blhd").swapaxes(-3, -2)


def scanned(q: Any, k: Any, v: Any) -> Any:
    return jax.lax.scan(lambda _, one: (None, attend(*one)), None, (q, k, v))[1]


def each_with_a_bias(q: Any, k: Any, v: Any) -> Any:
    """Arrays of variants that are mapped make one call for each place."""
    return jax.vmap(lambda *a: qkv.attention(*a[:3], qkv.Causal(), a[3], backend="cpu"))(
        q, k, v, jnp.zeros((q.shape[0], 40, 40), q.dtype)
    )


WAYS = [
    pytest.param(attend, id="call"),
    pytest.param(turned, id="blhd"),
    pytest.param(jax.vmap(attend), id="vmap"),
    pytest.param(jax.vmap(jax.vmap(attend)), id="vmap of matrices"),
    pytest.param(jax.vmap(jax.vmap(partial(attend, layout="blhd"))), id="vmap of blhd matrices"),
    pytest.param(each_with_a_bias, id="vmap over a bias"),
    pytest.param(scanned, id="scan"),
]


@pytest.mark.slow
@pytest.mark.parametrize("through", ["jit", "eager", "callback"])
@pytest.mark.sampled("way", WAYS, one_in=3)
def test_the_way_back_runs_no_forward_pass(
    monkeypatch: pytest.MonkeyPatch, way: Any, through: str
) -> None:
    """What the forward pass has kept is enough for gradients of sharp rows, as exact as on NumPy.

    There, one key has nearly all the weight: what rounding takes from lse would show.
    """
    from qkv.backends import register, unregister
    from qkv.backends.cpu import CpuBackend
    from qkv.bridges.jax import rules as jax_rules

    runs: list[Any] = []

    class Counted(CpuBackend):
        """Prepares nothing, so that each call runs it."""

        def _run(self, *arguments: Any, **keywords: Any) -> Any:
            runs.append(keywords)
            return super()._run(*arguments, **keywords)

        def prepare(self, *arguments: Any, **keywords: Any) -> None:
            return None

    rng = np.random.default_rng(7)
    q, k, v, along = (rng.normal(size=(3, 2, 40, 8)).astype(np.float32) for _ in range(4))
    q[..., 0] += 9
    k[..., 0] += 9
    # A bias of zeros is another kernel, whose sums may round otherwise.
    zeros = [qkv.Bias(np.zeros((3, 1, 40, 40), np.float32))] if way is each_with_a_bias else []
    out, pullback = qkv.vjp(q, k, v, qkv.Causal(), *zeros, backend="cpu")
    right = pullback(along)

    def both(q: Any, k: Any, v: Any) -> Any:
        out, back = jax.vjp(way, q, k, v)
        return out, *back(jnp.asarray(along))

    both = both if through == "eager" else jax.jit(both)
    register(Counted())
    if through == "callback":
        monkeypatch.setattr(jax_rules, "is_registered", lambda: False)
        jax.clear_caches()
    try:
        jax.block_until_ready(way(*map(jnp.asarray, (q, k, v))))
        forward = len(runs)
        found = jax.block_until_ready(both(q, k, v))
        assert len(runs) == 2 * forward > 0
    finally:
        unregister(Counted.name)
        if through == "callback":
            jax.clear_caches()
    for got, known in zip(found, (out, right.query, right.key, right.value), strict=True):
        np.testing.assert_array_equal(np.asarray(got), known)


@pytest.mark.usefixtures("x64")
def test_rows_without_keys_have_gradient_zero() -> None:
    q, k, v = operands()
    mask = jnp.ones((7, 9), bool).at[2].set(False)
    v = v.at[..., 3, :].set(jnp.nan)
    mask = mask.at[:, 3].set(False)
    gradients = jax.jit(jax.grad(lambda *a: qkv.attention(*a, mask).sum(), argnums=(0, 1, 2)))(
        q, k, v
    )
    assert all(bool(jnp.isfinite(g).all()) for g in gradients)
    assert not gradients[0][..., 2, :].any()
    assert not gradients[1][..., 3, :].any()
    assert not gradients[2][..., 3, :].any()


@pytest.mark.slow
@pytest.mark.sampled("dtype", ["bfloat16", "float16"], one_in=2)
def test_16_bits(dtype: str) -> None:
    """Errors are within three times that of the formula in the type, the worst of a few orders."""
    shape = Shape((2,), 4, 2, 24, 24, 16, 16)
    arrays = [jnp.asarray(np.asarray(a), dtype) for a in operands(shape)]
    along = jnp.asarray(np.random.default_rng(5).normal(size=(2, 4, 24, 16)), dtype)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return qkv.attention(q, k, v, qkv.Causal())

    def plain(q: Any, k: Any, v: Any, order: Any) -> Any:
        q, k, v = q[..., order, :], k[..., order, :], v[..., order, :]
        k, v = (jnp.repeat(a, 2, axis=1) for a in (k, v))
        s = jnp.einsum("bhid,bhjd->bhij", q, k) * jnp.asarray(16**-0.5, q.dtype)
        s = jnp.where(order[:, None] >= order, s, -jnp.inf)
        weights = jax.nn.softmax(s.astype(jnp.promote_types(s.dtype, jnp.float32)), axis=-1)
        out = jnp.einsum("bhij,bhjd->bhid", weights.astype(v.dtype), v)
        return out[..., jnp.argsort(order), :]

    @jax.jit
    def both(arrays: Any, along: Any, order: Any) -> Any:
        out, pullback = jax.vjp(lambda *a: plain(*a, order), *arrays)
        return out, *pullback(along)

    @jax.jit
    def of_ours(arrays: Any, along: Any) -> Any:
        out, pullback = jax.vjp(ours, *arrays)
        return out, *pullback(along)

    def wide(results: Any) -> list[Any]:
        return [np.asarray(a, np.float64) for a in results]

    rng = np.random.default_rng(6)
    orders = [np.arange(24), *(rng.permutation(24) for _ in range(7))]
    with jax.enable_x64(True):
        exact = [jnp.asarray(a, jnp.float64) for a in (*arrays, along)]
        right = wide(both(exact[:3], exact[3], orders[0]))
    errors = [
        [np.max(np.abs(a - b)) for a, b in zip(wide(both(arrays, along, o)), right, strict=True)]
        for o in orders
    ]
    found = of_ours(arrays, along)
    assert {a.dtype for a in found} == {jnp.dtype(dtype)}
    eps = float(jnp.finfo(dtype).eps)
    for got, truth_, error, times in zip(
        wide(found), right, np.max(errors, axis=0), (2, 3, 3, 3), strict=True
    ):
        unit = eps * 2.0 ** np.floor(np.log2(np.max(np.abs(truth_))))
        assert np.max(np.abs(got - truth_)) <= times * error + (times if times > 2 else 1) * unit


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("batched", [False, True])
def test_many_steps(watched, batched: bool) -> None:
    """The later ones are recalled, and read their own arrays."""
    forget_prepared_calls()
    shape = Shape((2,), 4, 2, 17, 17, 8, 8)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (qkv.attention(q, k, v, qkv.Causal(), backend="cpu") ** 2).sum()

    def formula(q: Any, k: Any, v: Any) -> Any:
        k, v = (jnp.repeat(a, 2, axis=-3) for a in (k, v))
        s = jnp.einsum("...id,...jd->...ij", q, k) * 8**-0.5
        s = jnp.where(np.tri(17, dtype=bool), s, -jnp.inf)
        return (jnp.einsum("...ij,...jd->...id", jax.nn.softmax(s), v) ** 2).sum()

    step, right = (jax.jit(jax.grad(f, argnums=(0, 1, 2))) for f in (loss, formula))
    if batched:
        step, right = (jax.vmap(f, in_axes=(0, None, None)) for f in (step, right))
    for seed in range(5):
        q, k, v = operands(shape, seed)
        q = jnp.stack([q, 2 * q, q - 1]) if batched else q
        for got, known in zip(step(q, k, v), right(q, k, v), strict=True):
            close(got, known)
    assert watched.prepared("gradients")
