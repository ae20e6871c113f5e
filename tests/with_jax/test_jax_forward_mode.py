"""Forward mode, and what is made of it, against the formula in jax.numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="compared with jax 0.10 or later")

import jax
import jax.numpy as jnp
from several_devices import run_on_devices

import qkv
from qkv.bridges.jax import operations as jax_operations
from qkv.bridges.jax import rules as jax_rules

Calls = list[tuple[str, int]]
X64 = pytest.mark.usefixtures("x64")


def arrays(seed: int = 0) -> tuple[Any, ...]:
    """query, key, value, a bias and sinks; keys serve two heads each."""
    rng = np.random.default_rng(seed)
    shapes = (2, 2, 4, 3), (2, 1, 4, 3), (2, 1, 4, 2), (4, 4), (2,)
    return tuple(jnp.asarray(rng.normal(size=shape)) for shape in shapes)


def ours(kind: str, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
    """Output and lse."""
    variants = {
        "plain": [],
        "causal": [qkv.Causal()],
        "bias": [qkv.Bias(bias), qkv.Causal()],
        "sinks": [qkv.Sinks(sinks)],
    }[kind]
    return qkv.attention(q, k, v, *variants, return_lse=True, backend="blocked")


def formula(kind: str, q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
    k, v = (jnp.repeat(a, q.shape[-3] // a.shape[-3], axis=-3) for a in (k, v))
    s = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if kind == "bias":
        s = s + bias
    if kind in {"bias", "causal"}:
        s = jnp.where(np.tri(4, dtype=bool), s, -jnp.inf)
    if kind == "sinks":
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))], -1)
    return jax.nn.softmax(s)[..., :4] @ v, jax.nn.logsumexp(s, -1)


def close(found: Any, right: Any) -> None:
    def same(got: Any, known: Any) -> None:
        assert got.dtype == known.dtype
        largest = max(1.0, float(jnp.abs(known).max()))
        np.testing.assert_allclose(got, known, rtol=0, atol=256 * 2.0**-52 * largest)

    jax.tree.map(same, found, right)


Function = Callable[..., Any]


def jvp(f: Function) -> Any:
    return jax.jvp(f, arrays(), arrays(1))


def linearize(f: Function) -> Any:
    results, linear = jax.linearize(f, *arrays())
    return results, linear(*arrays(1)), jax.jit(linear)(*arrays(2))


def transposed(f: Function) -> Any:
    """The derivative back along what `jax.linearize` gives, which is what `jax.vjp` gives."""
    results, linear = jax.linearize(f, *arrays())
    return jax.linear_transpose(linear, *arrays())(results)


def jacfwd(f: Function) -> Any:
    return jax.jacfwd(f, argnums=(1, 3, 4))(*arrays())


def mapped_jvp(f: Function) -> Any:
    """Keys are shared, tangents are not; then tangents alone are mapped."""
    (q, *others), (dq, *along) = arrays(), arrays(1)

    def one(q: Any, dq: Any) -> Any:
        return jax.jvp(lambda q, k: f(q, k, *rest), (q, shared), (dq, along[0][0]))

    shared, rest = others[0][0], (others[1][0], *others[2:])
    each = jax.vmap(one)(q, dq)
    return each, jax.vmap(one, (None, 0))(q[0], dq)


def jvp_of_mapped(f: Function) -> Any:
    (q, k, v, *others), (dq, dk, dv, *along) = arrays(), arrays(1)

    def each(q: Any, k: Any, v: Any, *others: Any) -> Any:
        return jax.vmap(lambda q: f(q, k, v, *others))(q)

    return jax.jvp(each, (q, k[0], v[0], *others), (dq, dk[0], dv[0], *along))


def through_scan(f: Function) -> Any:
    """Derivatives of layers that are computed again in the backward pass."""
    (q, *others), (dq, *_) = arrays(), arrays(1)

    @jax.checkpoint
    def layer(x: Any) -> Any:
        return x + f(x, *others)[0].sum(-1, keepdims=True)

    def deep(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=2)[0]

    return jax.jvp(deep, (q,), (dq,)), jax.grad(lambda q: jnp.sin(deep(q)).sum())(q)


WAYS = [
    pytest.param(way, id=way.__name__)
    for way in (jvp, linearize, transposed, jacfwd, mapped_jvp, jvp_of_mapped, through_scan)
]


@pytest.mark.slow
@X64
@pytest.mark.parametrize(
    ("kind", "jit"),
    [("plain", True), ("causal", True), ("bias", True), ("bias", False), ("sinks", True)],
)
@pytest.mark.sampled("way", WAYS, one_in=3)
def test_first_derivatives(way: Any, kind: str, jit: bool) -> None:
    def found() -> Any:
        return way(lambda *given: ours(kind, *given))

    right = jax.jit(lambda: way(lambda *given: formula(kind, *given)))()
    close((jax.jit(found) if jit else found)(), right)


def total(f: Function) -> Function:
    def of(*given: Any) -> Any:
        out, lse = f(*given)
        return jnp.sin(out).sum() + (lse * lse).sum()

    return of


def hessian(f: Function) -> Any:
    return jax.hessian(total(f), argnums=(1, 3, 4))(*arrays())


def reverse_over_reverse(f: Function) -> Any:
    return jax.jacrev(jax.grad(total(f), argnums=(1, 3, 4)), argnums=(1, 3, 4))(*arrays())


def reverse_over_forward(f: Function) -> Any:
    """Gradients of tangents of output and lse, by what is moved and by the direction."""

    def moved(given: Any, along: Any) -> Any:
        return total(lambda *_: jax.jvp(f, given, along)[1])()

    return jax.grad(moved, argnums=(0, 1))(arrays(), arrays(1))


def of_what_is_mapped(f: Function) -> Any:
    """vmap inside of both derivatives, in three orders; queries are mapped, the rest is shared."""
    q, k, v, bias, sinks = arrays()

    def each(k: Any, bias: Any) -> Any:
        return jax.vmap(lambda q: total(f)(q, k, v[0], bias, sinks))(q).sum()

    def moved(k: Any, bias: Any) -> Any:
        return jax.jvp(each, (k, bias), (jnp.ones_like(k), jnp.ones_like(bias)))[1]

    return (
        jax.hessian(each, argnums=(0, 1))(k[0], bias),
        jax.jacrev(jax.grad(each, argnums=(0, 1)), argnums=(0, 1))(k[0], bias),
        jax.grad(moved, argnums=(0, 1))(k[0], bias),
    )


def by_the_vector(f: Function) -> Any:
    """Hessian-vector products, either way, differentiated by the vector."""
    given = arrays()
    gradient = jax.grad(total(f), argnums=1)

    def forward(w: Any) -> Any:
        moved = jax.jvp(lambda k: gradient(given[0], k, *given[2:]), (given[1],), (w,))[1]
        return jnp.sin(moved).sum()

    def reverse(w: Any) -> Any:
        return jnp.sin(jax.vjp(gradient, *given)[1](w)[1]).sum()

    return jax.grad(forward)(given[1]), jax.grad(reverse)(given[1])


def hessian_through_a_scan(f: Function) -> Any:
    """JAX keeps no custom rule of what a scan computes; what it repeats has a second derivative."""
    q, k, v, bias, sinks = arrays()

    def repeated(q: Any, bias: Any) -> Any:
        def step(row: Any, _: None) -> Any:
            out, lse = f(row, k, jnp.concatenate([v, v[..., :1]], -1), bias, sinks)
            return jnp.sin(out), lse

        last, lses = jax.lax.scan(step, q, None, length=2)
        return last.sum() + (lses * lses).sum()

    return jax.hessian(repeated, argnums=(0, 1))(q, bias)


SECOND = [
    pytest.param(way, id=way.__name__)
    for way in (
        hessian, reverse_over_reverse, reverse_over_forward, of_what_is_mapped, by_the_vector,
        hessian_through_a_scan,
    )
]  # fmt: skip


@pytest.mark.slow
@X64
@pytest.mark.parametrize("kind", ["bias", "sinks"])
@pytest.mark.sampled("way", SECOND, one_in=2)
def test_second_derivatives(way: Any, kind: str) -> None:
    found = jax.jit(lambda: way(lambda *given: ours(kind, *given)))()
    close(found, jax.jit(lambda: way(lambda *given: formula(kind, *given)))())


@pytest.mark.slow
@X64
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_matrices_and_layouts(layout: str) -> None:
    """vmap of matrices makes one call, in which they become heads."""
    q, dq = (given[0] for given in (arrays(), arrays(1)))

    def attend(q: Any) -> Any:
        return qkv.attention(q, q, q, qkv.Causal(), layout=layout, backend="blocked")

    def right(q: Any) -> Any:
        return formula("causal", q[None], q[None], q[None], None, None)[0][0]

    def moved(f: Function) -> Any:
        return jax.vmap(jax.vmap(lambda q, dq: jax.jvp(f, (q,), (dq,))))(q, dq)

    close(jax.jit(lambda: moved(attend))(), moved(right))
    if layout == "blhd":

        def turned(q: Any) -> Any:
            return attend(q.swapaxes(-3, -2)).swapaxes(-3, -2)

        close(jax.jvp(turned, (q,), (dq,)), jax.jvp(jax.vmap(jax.vmap(right)), (q,), (dq,)))


@pytest.mark.slow
@X64
def test_integers_and_masks_have_no_tangents() -> None:
    q, k, v, *_ = arrays()
    mask, lengths = jnp.ones((4, 4), bool).at[2].set(False), jnp.array([3, 4])
    none = [np.zeros(a.shape, jax.dtypes.float0) for a in (mask, lengths)]

    def attend(q: Any, mask: Any, lengths: Any) -> Any:
        return qkv.attention(q, k, v, mask, qkv.KeyLengths(lengths), return_lse=True)

    (out, lse), (moved, moved_lse) = jax.jvp(attend, (q, mask, lengths), (q, *none))
    s = q @ jnp.repeat(k, 2, 1).swapaxes(-1, -2) * 3**-0.5
    s = jnp.where(mask & (jnp.arange(4) < lengths[:, None, None, None]), s, -jnp.inf)
    assert not out[..., 2, :].any()
    assert jnp.isneginf(lse[..., 2]).all()
    assert not moved[..., 2, :].any()
    assert not moved_lse[..., 2].any()
    # Scores are linear in the query, whose tangent it is itself.
    weights = jax.nn.softmax(s)
    right = jnp.where(weights > 0, weights * s, 0).sum(-1)
    rows = np.arange(4) != 2
    close(moved_lse[..., rows], right[..., rows])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tangents_have_the_type_of_the_output(dtype: str) -> None:
    given, along = ([a.astype(dtype) for a in arrays(seed)[:3]] for seed in (0, 1))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return qkv.attention(q, k, v, return_lse=True)

    found = jax.jit(lambda: jax.jvp(attend, given, along)[1])()
    with jax.enable_x64(True):
        wide, moves = ([jnp.asarray(a, jnp.float64) for a in group] for group in (given, along))
        moved = jax.jvp(lambda *a: formula("plain", *a, None, None), wide, moves)[1]
    right = [np.asarray(a) for a in moved]
    assert [a.dtype for a in found] == [dtype, "float32"]
    eps = float(jnp.finfo(dtype).eps)
    for got, known, unit in zip(found, right, (eps, 2.0**-23), strict=True):
        largest = float(np.abs(known).max())
        np.testing.assert_allclose(np.asarray(got, float), known, rtol=0, atol=8 * unit * largest)


@X64
def test_only_the_forward_pass_and_tangents_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A direction that does not move the bias asks for nothing of its size; nothing runs twice."""
    seen: Calls = []

    def watch(name: str) -> None:
        run = getattr(jax_operations, name)

        def spy(operation: Any, inputs: Any, results: Any) -> None:
            seen.append((name, len(inputs)))
            run(operation, inputs, results)

        monkeypatch.setattr(jax_operations, name, spy)

    for name in ("_forward", "_tangents", "_backward", "_second"):
        watch(name)
    q, k, v, bias, _ = arrays()

    def attend(q: Any) -> Any:
        return qkv.attention(q, k, v, qkv.Bias(bias), backend="blocked")

    jax.block_until_ready(jax.jit(lambda q: jax.jvp(attend, (q,), (q,)))(q))
    assert seen == [("_forward", 4), ("_tangents", 4 + 1)]
    del seen[:]
    jax.block_until_ready(jax.jit(jax.grad(lambda q: attend(q).sum()))(q))
    assert [name for name, _ in seen] == ["_forward", "_backward"]


@pytest.mark.slow
@X64
def test_where_xla_does_not_take_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_rules, "is_registered", lambda: False)
    jax.clear_caches()
    try:
        for way in (mapped_jvp, jvp_of_mapped):
            found = jax.jit(lambda way=way: way(lambda *given: ours("bias", *given)))()
            right = jax.jit(lambda way=way: way(lambda *given: formula("bias", *given)))()
            close(found, right)
    finally:
        jax.clear_caches()


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_what_is_refused_says_what_to_write(jit: Any) -> None:
    q, k, v, *_ = arrays()

    def attend(q: Any) -> Any:
        return qkv.attention(q, k, v).sum()

    def moved(f: Function) -> Function:
        return lambda q: jax.jvp(f, (q,), (q,))[1].sum()

    def slope(f: Function) -> Function:
        return lambda q: jax.grad(f)(q).sum()

    with pytest.raises(qkv.UnsupportedError, match=r"jax.jacfwd\(jax.grad\(f\)\)"):
        jit(moved(moved(attend)))(q)
    for one, two, three in (
        (slope, slope, slope), (moved, slope, slope), (slope, moved, slope), (slope, slope, moved),
    ):  # fmt: skip
        with pytest.raises(qkv.UnsupportedError, match="third derivative"):
            jit(one(two(three(attend))))(q)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
import qkv
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
rng = np.random.default_rng(0)
x, dx = (jnp.asarray(rng.normal(size=(2, 2, 5, 8))) for _ in range(2))
bias, moved = (jnp.asarray(rng.normal(size=(5, 5))) for _ in range(2))

def attend(x, bias):
    return qkv.attention(x, x, x, bias, qkv.Causal(), return_lse=True)

def formula(x, bias):
    s = jnp.where(np.tri(5, dtype=bool), x @ x.swapaxes(-1, -2) * 8**-0.5 + bias, -jnp.inf)
    return jax.nn.softmax(s) @ x, jax.nn.logsumexp(s, -1)

def total(f):
    return lambda x, bias: sum(jnp.sin(a).sum() for a in f(x, bias))

def split(f, out=P("data")):
    return jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=out)

def inside(f):
    return lambda x, bias: (
        jax.jvp(f, (x, bias), (x, bias)), jax.jvp(jax.grad(total(f)), (x, bias), (x, bias)),
    )

right = formula(x, bias), jax.jvp(formula, (x, bias), (dx, moved)), inside(formula)(x, bias)
for jit in (jax.jit, lambda f: f):
    f, parts = jit(split(attend)), jit(split(inside(attend)))
    found = f(x, bias), jax.jvp(f, (x, bias), (dx, moved)), parts(x, bias)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), found, right)
of_bias = split(jax.grad(total(attend), argnums=1), P())(x, bias)
np.testing.assert_allclose(of_bias, jax.grad(total(formula), argnums=1)(x, bias), atol=1e-12)
print(len(jax.devices()))
"""


@pytest.mark.slow
def test_shard_map() -> None:
    """A call on two devices works outside of jit and inside, with derivatives on either side."""
    run_on_devices(SHARDED, 2, JAX_ENABLE_X64="1")
