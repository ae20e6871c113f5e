"""Arrays that are spread over devices: what is computed of them lies as the query does."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", minversion="0.10", reason="compared with jax 0.10 or later")

from several_devices import run_on_devices

SETUP = """
import jax, jax.numpy as jnp, numpy as np
import qkv
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.normal(size=(4, 4, 8, 8)), jnp.float32) for _ in range(3))

def formula(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) * 8**-0.5) @ v

def near(found, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, right)
"""

TYPES = (
    SETUP
    + """
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)

def total(f):
    def of(q, k, v):
        last, _ = jax.lax.scan(lambda row, _: (f(row, k, v), None), q, None, length=2)
        return (last * last).sum()
    return of

def carried(f):
    return jax.jit(jax.grad(total(jax.checkpoint(f)), argnums=(0, 1, 2)))

def pulled_back(f):
    def of(*given):
        out, back = jax.vjp(f, *given)
        return out, *back(out)
    return of

for way, spec in ((jax.jit, P("x")), (carried, P("x", "y")), (pulled_back, P(None, None, "x")),
                  (lambda f: jax.jit(pulled_back(jax.vmap(f))), P(None, "x"))):
    right = way(formula)(q, k, v)
    with jax.set_mesh(mesh):
        spread = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (q, k, v)]
        found = way(qkv.attention)(*spread)
    near(found, right)
    for result in jax.tree.leaves(found):
        assert jax.typeof(result) == jax.typeof(spread[0]), (result, spec)

with jax.set_mesh(mesh):
    def with_lse(q, k, v, layout):
        return qkv.attention(q, k, v, layout=layout, return_lse=True)
    for layout, spec, of_rows in (("bhld", P("x", None, "y"), P("x", None, "y")),
                                  ("blhd", P("x", "y"), P("x", None, "y"))):
        spread = [jax.device_put(a, NamedSharding(mesh, spec)) for a in (q, k, v[..., :3])]
        out, lse = jax.jit(with_lse, static_argnums=3)(*spread, layout)
        assert jax.typeof(out).sharding.spec == P(*spec, *[None] * (4 - len(spec)))
        assert jax.typeof(lse).sharding.spec == of_rows
print(len(jax.devices()))
"""
)

PLACES = (
    SETUP
    + """
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
def spread(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))

for spec in ((), ("x",), (None, "x"), (None, None, "x"), (None, None, None, "x")):
    query = spread(q, *spec)
    near(qkv.attention(query, k, v), formula(q, k, v))
    for layout in ("bhld", "blhd"):
        out, lse = qkv.attention(query, k, v[..., :3], layout=layout, return_lse=True)
        assert out.devices() == lse.devices() == query.devices()
        batch, first, second = (*spec, None, None, None)[:3]
        of_rows = (batch, first, second) if layout == "bhld" else (batch, second, first)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec[:3])), 4)
        assert lse.sharding.is_equivalent_to(NamedSharding(mesh, P(*of_rows)), 3)

# The output has another batch than the query.
three = qkv.attention(spread(q[0], "x"), k[:3], v[:3])
near(three, formula(jnp.broadcast_to(q[0], (3, 4, 8, 8)), k[:3], v[:3]))
wide = qkv.attention(spread(q[:1], None, None, "x"), k[:3], v[:3])
assert wide.devices() == set(jax.devices())
print(len(jax.devices()))
"""
)


@pytest.mark.slow
def test_the_sharding_in_the_type_of_an_array() -> None:
    """A mesh of explicit axes is carried through a scan, and differentiated in jit and outside."""
    run_on_devices(TYPES, 4)


@pytest.mark.slow
def test_results_of_another_shape_than_the_query() -> None:
    """lse has a dimension less, values may be narrower, and keys may have more batches."""
    run_on_devices(PLACES, 4)
