"""jit, vmap, scan, checkpoint, threads: one meaning, whatever JAX makes of a call."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from functools import partial
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
from qkv.testing import truth


def arrays(*lead: int, seed: int = 0, length: int = 9) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(  # type: ignore[return-value]
        jnp.asarray(rng.normal(size=(*lead, length, 8)), jnp.float32) for _ in range(3)
    )


def near(got: Any, right: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(right), rtol=0, atol=2e-6)


def causal(q: Any, k: Any, v: Any) -> Any:
    return qkv.attention(q, k, v, qkv.Causal(), return_lse=True)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_values(jit: Any) -> None:
    q, k, v = arrays(2, 4)
    known = truth(q, k, v, [qkv.Causal()])
    out, lse = jit(causal)(q, k, v)
    assert isinstance(out, jax.Array)
    near(out, known.out)
    near(lse, known.lse)


def test_arrays_that_a_traced_function_has_from_outside_are_constants_in_it() -> None:
    q, k, v = arrays(2, 4)
    known = truth(q, k, v, [qkv.Causal()])
    kept = []

    def branch() -> Any:
        kept.append(qkv.inspect(q, k, v, qkv.Causal()).entropy)
        return causal(q, k, v)

    entropy = qkv.inspect(q, k, v, qkv.Causal()).entropy
    for traced in (
        jax.jit(branch),
        lambda: jax.lax.cond(True, branch, branch),
        lambda: jax.lax.scan(lambda carry, _: (branch(), None), branch(), length=2)[0],
    ):
        out, lse = traced()
        near(out, known.out)
        near(lse, known.lse)
    for found in kept:  # They have values, also after the function has been traced.
        near(found, entropy)


def test_layout_and_shapes() -> None:
    q, k, v = arrays(2, 4)
    known = truth(q, k, v, [qkv.Causal()])
    turned = [a.swapaxes(1, 2) for a in (q, k, v)]
    f = partial(qkv.attention, layout="blhd", return_lse=True)
    out, lse = jax.jit(lambda *a: f(*a, qkv.Causal()))(*turned)
    near(out.swapaxes(1, 2), known.out)
    near(lse, known.lse)
    out, lse = jax.jit(causal)(q[0, 0], k[0, 0], v[0, 0])
    near(out, known.out[0, 0])
    near(lse, known.lse[0, 0])
    near(jax.jit(causal)(q, k[0], v[0])[0], truth(q, k[0], v[0], [qkv.Causal()]).out)
    empty = jax.jit(qkv.attention)(q[..., :0, :], k, v)
    assert empty.shape == (2, 4, 0, 8)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("depth", [1, 2])
def test_vmap_is_a_stack_of_calls(depth: int, layout: str) -> None:
    """Matrices and arrays with heads are stacked, and gradients as well."""
    q, k, v = arrays(2, 3, 3) if depth == 1 else arrays(2, 3)
    q, k, v = (a.swapaxes(-3, -2) if layout == "blhd" and a.ndim > 4 else a for a in (q, k, v))

    def one(q: Any, k: Any, v: Any) -> Any:
        return qkv.attention(q, k, v, qkv.Causal(), layout=layout, return_lse=True)

    def gradients(q: Any, k: Any, v: Any) -> Any:
        return jax.grad(lambda *a: sum(map(jnp.sum, one(*a))), argnums=(0, 1, 2))(q, k, v)

    for f in (one, gradients):
        g = f
        for _ in range(depth):
            g = jax.vmap(g)
        found = jax.jit(g)(q, k, v)
        for index in np.ndindex(2, 3) if depth == 2 else np.ndindex(2):
            jax.tree.map(
                lambda whole, part, index=index: near(whole[index], part),
                found,
                f(q[index], k[index], v[index]),
            )


def test_vmap_leaves_what_it_does_not_map_in_one_piece() -> None:
    q, k, v = arrays(3, 2)
    seen = []
    run = jax_operations._forward

    def spy(operation: Any, inputs: Any, results: Any) -> None:
        seen.append([array.strides[0] for array in inputs[:3]])
        run(operation, inputs, results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_operations, "_forward", spy)
        out, _ = jax.vmap(causal, in_axes=(0, None, None))(q, k[0], v[0])
    assert len(seen) == 1
    assert seen[0][0] > 0
    assert seen[0][1:] == [0, 0], "keys are broadcast, not copied"
    near(out, truth(q, k[:1], v[:1], [qkv.Causal()]).out)


@pytest.mark.slow
def test_vmap_over_arrays_of_variants() -> None:
    """A bias, lengths and slopes of one's own in each place."""
    q, k, v = arrays(3, 2)
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.normal(size=(3, 9, 9)), jnp.float32)
    lens, slopes = jnp.array([4, 9, 0]), jnp.asarray(rng.random((3, 2)), jnp.float32)

    def f(q: Any, k: Any, v: Any, bias: Any, n: Any, slopes: Any) -> Any:
        call_variants = qkv.Bias(bias), qkv.KeyLengths(n), qkv.ALiBi(slopes)
        return qkv.attention(q, k, v, *call_variants).sum()

    mapped = jax.jit(jax.vmap(jax.value_and_grad(f, argnums=(0, 3, 5))))
    found = mapped(q, k, v, bias, lens, slopes)
    for i in range(3):
        alone = jax.value_and_grad(f, argnums=(0, 3, 5))(
            q[i], k[i], v[i], bias[i], lens[i], slopes[i]
        )
        jax.tree.map(lambda whole, part, i=i: near(whole[i], part), found, alone)
        call_variants = [np.asarray(bias[i]), qkv.KeyLengths(np.asarray(lens[i])),
                qkv.ALiBi(np.asarray(slopes[i]))]  # fmt: skip
        near(found[0][i] / 100, truth(q[i], k[i], v[i], call_variants).out.sum() / 100)


def test_a_bias_shared_by_a_vmap_has_the_sum_of_gradients() -> None:
    q, k, v = arrays(3, 2)
    bias = jnp.zeros((9, 9))

    def total(bias: Any) -> Any:
        return jax.vmap(lambda *a: qkv.attention(*a, bias, qkv.Causal()))(q, k, v).sum()

    def each(bias: Any) -> Any:
        return sum(qkv.attention(q[i], k[i], v[i], bias, qkv.Causal()).sum() for i in range(3))

    found = jax.grad(total)(bias)
    assert float(jnp.abs(found).max()) > 0.1
    near(found, jax.grad(each)(bias))


@pytest.mark.parametrize("kind", ["dropout", "score mod"])
def test_vmap_does_not_change_the_batch_index(kind: str) -> None:
    """What reads the flat index over leading dimensions reads that of its own call."""
    q, k, v = arrays(3, 2)
    variant = qkv.Dropout(0.5, 7)
    if kind == "score mod":
        variant = qkv.ScoreMod(lambda score, batch, head, q_pos, kv_pos: score * (batch + 1))
    found = jax.vmap(lambda *a: qkv.attention(*a, variant))(q, k, v)
    for i in range(3):
        near(found[i], truth(q[i], k[i], v[i], [variant]).out)


def test_scan_and_checkpoint() -> None:
    q, k, v = arrays(2)

    def layer(x: Any, _: Any) -> Any:
        return x + qkv.attention(x, k, v, qkv.Causal()), None

    def scanned(x: Any) -> Any:
        return jax.lax.scan(jax.checkpoint(layer), x, None, length=3)[0].sum()

    def looped(x: Any) -> Any:
        for _ in range(3):
            x, _ = layer(x, None)
        return x.sum()

    near(jax.jit(scanned)(q), looped(q))
    near(jax.jit(jax.grad(scanned))(q), jax.grad(looped)(q))


def test_values_that_jit_knows_are_constants() -> None:
    """NumPy arrays and lists in variants; offsets, traced or not."""
    q, k, v = arrays(2)
    mask = np.random.default_rng(0).random((9, 9)) < 0.5
    call_variants = [mask, qkv.SlidingWindow(3, 1) | qkv.GlobalTokens([0, 5])]
    found = jax.jit(lambda q, at: qkv.attention(q, k, v, *call_variants, q_offset=at))(
        q, jnp.int32(2)
    )
    near(found, truth(q, k, v, call_variants, q_offset=2).out)


def test_a_compiled_score_mod_is_prepared(watched) -> None:
    """The function keeps the constants it was compiled with, as everything does under jit."""
    slope = 0.1

    def mod(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
        return score - slope * abs(q_pos - kv_pos)

    q, k, v = arrays(2)
    variants = [qkv.ScoreMod(mod)]
    expected = truth(q, k, v, variants).out
    compiled = jax.jit(lambda q: qkv.attention(q, k, v, *variants))
    before = watched.prepared("forward", any_length=False)
    near(compiled(q), expected)
    slope = 5.0
    for _ in range(3):
        near(compiled(q), expected)
    assert watched.prepared("forward", any_length=False) == before + 1


@pytest.mark.usefixtures("two_threads")
def test_many_threads_at_once() -> None:
    """Sixteen threads, each with a compiled function of its own; JAX runs some on its threads."""
    results: dict[int, Any] = {}
    inputs = [arrays(2, 4, seed=n, length=64 + n % 3) for n in range(16)]

    def work(n: int) -> None:
        f = jax.jit(jax.value_and_grad(lambda *a: causal(*a)[0].sum() * (n + 1)))
        for _ in range(5):
            results[n] = f(*inputs[n])
        jax.block_until_ready(results[n])

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert not any(thread.is_alive() for thread in threads), "calls wait for one another"
    for n in range(16):
        near(results[n][0] / (n + 1) / 1e3, causal(*inputs[n])[0].sum() / 1e3)


PROGRAM = """
import atexit, sys

@atexit.register
def late():  # earlier than qkv, so run after it
    try:
        print(jax.block_until_ready(f(x)).shape)
    except jax.errors.JaxRuntimeError as error:
        print(error)

import numpy as np
import jax, jax.numpy as jnp
import qkv
jax.config.update("jax_cpu_enable_async_dispatch", sys.argv[1] == "async")
x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 8, 512, 32)), jnp.float32)
f = jax.jit(lambda x: qkv.attention(x, x, x, qkv.Causal()))
many = [f(x + i) for i in range(16)]
if sys.argv[2] == "wait":
    many = jax.block_until_ready(many)
    right = qkv.attention(np.asarray(x) + 15, np.asarray(x) + 15, np.asarray(x) + 15, qkv.Causal())
    assert np.array_equal(np.asarray(many[15]), right)
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("async", "wait"), ("sync", "wait"), ("async", "leave")])
@pytest.mark.one_in(2)
def test_a_process_ends(arguments: tuple[str, str]) -> None:
    """The process ends even while calls are under way."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[0] == "done"
    # JAX 0.10 says in between what it waited for.
    assert re.search("CANCELLED: (.*: )?qkv: the interpreter is ending", ran.stdout)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
import qkv
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
rng = np.random.default_rng(0)
x, along = (jnp.asarray(rng.normal(size=(4, 2, 9, 8)), jnp.float32) for _ in range(2))
bias = jnp.asarray(rng.normal(size=(9, 9)), jnp.float32)

def attend(x, bias):
    return qkv.attention(x, x, x, bias, qkv.Causal(), return_lse=True)

split = (P("data"), P("data"))
sharded = jax.shard_map(attend, mesh=mesh, in_specs=(P("data"), P()), out_specs=split)
for part in (0, 1):
    both = []
    for f in (sharded, attend):
        def total(x, bias, f=f):
            result = f(x, bias)[part]
            return (result * (along if part == 0 else along[..., 0])).sum(), result
        both.append(jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(x, bias))
    for got, right in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(got, right, atol=2e-6)
print(len(jax.devices()))
"""


@pytest.mark.slow
def test_shard_map() -> None:
    """Each device its rows, at the same time; a bias that all share has the sum of gradients."""
    run_on_devices(SHARDED, 4)


@pytest.mark.slow
@pytest.mark.parametrize("other_device", [False, True], ids=["refused", "other device"])
def test_where_xla_does_not_take_the_function(
    monkeypatch: pytest.MonkeyPatch, other_device: bool
) -> None:
    """The same by `jax.pure_callback`; what lies on the CPU beside another device is as ever."""
    q, k, v = arrays(3, 2)
    bias = jnp.asarray(np.random.default_rng(2).normal(size=(9, 9)), jnp.float32)

    def f(q: Any, bias: Any) -> Any:
        return jax.vmap(lambda q, k, v: qkv.attention(q, k, v, qkv.Causal(), bias).sum())(q, k, v)

    gradient = jax.value_and_grad(lambda q, bias: f(q, bias).sum(), argnums=(0, 1))
    right = jax.jit(gradient)(q, bias)
    if other_device:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    else:
        monkeypatch.setattr(jax_rules, "is_registered", lambda: False)
    jax.clear_caches()
    try:
        text = jax.jit(gradient).lower(q, bias).as_text()
        assert ("callback" in text) is not other_device
        jax.tree.map(near, jax.jit(gradient)(q, bias), right)
    finally:
        jax.clear_caches()
