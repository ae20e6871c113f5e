"""Variants are pytrees: arguments, results and parameters of functions that JAX transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from processes import in_a_process

pytest.importorskip("jax", minversion="0.10", reason="compared with jax 0.10 or later")

import jax
import jax.numpy as jnp

import qkv
from qkv.problem.building.builder import Shape
from qkv.variants import ALL

SHAPE = Shape((2,), 2, 2, 6, 6, 8, 8)
RNG = np.random.default_rng(7)
X = jnp.asarray(RNG.normal(size=(2, 2, 6, 8)), jnp.float32)
EXAMPLES = [variant for kind in ALL for variant in kind.examples(SHAPE, RNG)]


def attend(query: Any, variant: Any) -> Any:
    return qkv.attention(query, query, query, variant)


def theirs(query: Any, allowed: Any) -> Any:
    """JAX's own attention, of the same layout, with a mask."""
    rows = jnp.swapaxes(query, -2, -3)
    out = jax.nn.dot_product_attention(rows, rows, rows, mask=jnp.asarray(allowed))
    return jnp.swapaxes(out, -2, -3)


@pytest.mark.parametrize("variant", EXAMPLES, ids=repr)
def test_every_variant_is_taken_apart_and_put_together(variant: Any) -> None:
    leaves, structure = jax.tree.flatten(variant)
    whole: Any = structure
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves)
    again = jax.tree.unflatten(structure, leaves)
    assert jax.tree.structure(again) == whole
    if any(leaf.dtype.itemsize == 8 for leaf in leaves):
        variant = jax.tree.map(jnp.asarray, again)  # As JAX has numbers of 64 bits.
    np.testing.assert_array_equal(jax.jit(attend)(X, variant), attend(X, variant))


def test_segments_that_change_are_one_program() -> None:
    traced = []

    @jax.jit
    def jitted(x: Any, segments: Any) -> Any:
        traced.append(segments)
        return attend(x, segments)

    for ids in ([0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]):
        same = np.equal.outer(ids, ids)[None, None]
        got = jitted(X, qkv.Segments(jnp.array(ids)))
        np.testing.assert_allclose(got, theirs(X, same), atol=2e-6)
    assert len(traced) == 1


def test_masks_of_masks_are_mapped_over_their_arrays() -> None:
    ids = np.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 2, 2]])
    masks = qkv.Causal() & qkv.Segments(jnp.array(ids))
    allowed = np.tril(np.ones((6, 6), bool)) & (ids[:, :, None] == ids[:, None, :])
    right = theirs(X, allowed[:, None])
    np.testing.assert_allclose(jax.vmap(attend)(X, masks), right, atol=2e-6)
    np.testing.assert_allclose(
        jax.lax.scan(lambda n, args: (n, attend(*args)), 0, (X, masks))[1], right, atol=2e-6
    )
    # A mask that is not mapped: JAX counts its leaves with objects in place of arrays.
    one = jax.tree.map(lambda array: array[0], masks)
    got = jax.vmap(attend, in_axes=(0, None))(X, one)
    np.testing.assert_allclose(got[0], right[0], atol=2e-6)


def test_a_bias_is_trained_as_a_parameter() -> None:
    bias = jnp.asarray(RNG.normal(size=(2, 6, 6)), jnp.float32)
    target = jnp.asarray(RNG.normal(size=X.shape), jnp.float32)

    def loss(variant: Any) -> Any:
        return (attend(X, variant) * target).sum()

    def written_out(array: Any) -> Any:
        scores = jnp.einsum("bhid,bhjd->bhij", X, X, precision="highest") / np.sqrt(8) + array
        out = jnp.einsum("bhij,bhjd->bhid", jax.nn.softmax(scores), X, precision="highest")
        return (out * target).sum()

    given = qkv.Bias(bias)
    found: Any = jax.jit(jax.grad(loss))(given)
    assert type(found) is qkv.Bias
    right: Any = jax.grad(written_out)(bias)
    np.testing.assert_allclose(found.array, right, atol=5e-6)
    moved = jax.tree.map(lambda value, slope: value - 0.1 * slope, given, found)
    assert loss(moved) < loss(given)


def test_frequencies_keep_their_digits() -> None:
    frequencies = 10_000.0 ** (-np.arange(4) / 4)
    far = jax.jit(lambda x, rope: qkv.attention(x, x, x, rope, q_offset=99_000, kv_offset=1_000))
    got = far(X, qkv.RoPE(inv_freq=frequencies))
    right = qkv.attention(X, X, X, qkv.RoPE(), q_offset=99_000, kv_offset=1_000)
    np.testing.assert_allclose(got, right, atol=2e-6)


def test_shapes_in_place_of_arrays_are_a_tree_too() -> None:
    shapes = jax.eval_shape(lambda variant: variant, qkv.ALiBi(jnp.ones(2)))
    named = jax.tree.map(lambda _: "slope", shapes)
    assert repr(named) == "ALiBi without arrays"
    assert jax.tree.leaves(named) == ["slope"]


def test_places_of_a_mesh_are_said_for_each_array() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("x")
    ids = np.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    each = jax.jit(
        jax.shard_map(attend, mesh=mesh, in_specs=(rows, qkv.Segments(rows)), out_specs=rows)
    )
    right = theirs(X, ids[:, None, :, None] == ids[:, None, None, :])
    np.testing.assert_allclose(each(X, qkv.Segments(jnp.array(ids))), right, atol=2e-6)


@pytest.mark.parametrize("imports", ["import qkv, jax", "import jax, qkv", "import qkv.jax, jax"])
def test_jax_may_be_imported_before_or_after(imports: str) -> None:
    script = f"""
    {imports}
    print(jax.tree.leaves(qkv.KeyLengths(jax.numpy.arange(3))))
    """
    assert "[0, 1, 2]" in in_a_process(script)
