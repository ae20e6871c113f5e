"""Exported functions of JAX: saved, and called in another process after `import qkv.jax` alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REASON = "JAX arrays are tried where JAX is installed: pip install jax"
jax = pytest.importorskip("jax", reason=REASON)

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402

import qkv  # noqa: E402

X = jnp.sin(jnp.arange(96.0)).reshape(1, 2, 6, 8)
ALLOWED = (export.DisabledSafetyCheck.custom_call("qkv"),)
LOADED = """
import sys, numpy as np, qkv.jax
from jax import export
program = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
x = np.sin(np.arange(96, dtype=np.float32)).reshape(1, 2, 6, 8)
gradient = program.vjp().call(x, np.ones_like(x))[0]
np.savez(sys.argv[2], out=program.call(x), gradient=gradient)
"""


def attend(x):
    return qkv.attention(x, x, jnp.cos(x), qkv.Causal(), qkv.Softcap(2.0))


def written_out(x):
    scores = 2.0 * jnp.tanh(x @ x.swapaxes(-1, -2) * 8**-0.5 / 2.0)
    scores = jnp.where(jnp.tri(6, dtype=bool), scores, -jnp.inf)
    return jax.nn.softmax(scores) @ jnp.cos(x)


@pytest.mark.slow
def test_a_saved_function_runs_in_another_process(tmp_path: Path) -> None:
    program = export.export(jax.jit(attend), disabled_checks=ALLOWED)(X)
    file, results = tmp_path / "program.bin", tmp_path / "results.npz"
    file.write_bytes(program.serialize(vjp_order=1))
    command = [sys.executable, "-c", LOADED, str(file), str(results)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = np.load(results)
    right, pull_back = jax.vjp(written_out, X)
    np.testing.assert_allclose(found["out"], right, atol=1e-6)
    np.testing.assert_allclose(found["gradient"], *pull_back(jnp.ones_like(X)), atol=1e-5)


def test_jax_asks_whether_its_calls_stay_the_same() -> None:
    with pytest.raises(ValueError, match="@qkv"):
        export.export(jax.jit(attend))(X)
