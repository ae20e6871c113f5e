"""Train a small causal transformer in JAX through qkv: it learns to repeat a random sequence.

The second half of every row repeats the first, so that the next token can be known there by looking
back. `python examples/jax_training_step.py` prints the loss as it falls, in some seconds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import qkv

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 16, 32, 64, 4, 2, 32
SLOPES = jnp.array([2.0, 0.5, 0.1, 0.02])

Params = dict[str, Any]


def init(key: jax.Array) -> Params:
    """Weights, and for each layer the slopes of ALiBi, which are trained as well."""
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    layers = [
        {
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 2 * WIDTH),
            "down": matrix(2 * WIDTH, WIDTH),
            "slopes": SLOPES,
        }
        for _ in range(LAYERS)
    ]
    return {"embedding": matrix(VOCABULARY, WIDTH), "head": matrix(WIDTH, VOCABULARY),
            "layers": layers}  # fmt: skip


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attend(layer: Params, x: jax.Array) -> jax.Array:
    batch, length, _ = x.shape
    q, k, v = jnp.moveaxis((x @ layer["qkv"]).reshape(batch, length, 3, HEADS, -1), 2, 0)
    out = qkv.attention(q, k, v, qkv.ALiBi(layer["slopes"]), qkv.Causal(), layout="blhd")
    return out.reshape(batch, length, WIDTH) @ layer["out"]


def logits(params: Params, tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        x = x + attend(layer, norm(x))
        x = x + jax.nn.relu(norm(x) @ layer["up"]) @ layer["down"]
    return norm(x) @ params["head"]


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    """Mean negative log probability, in nats, of the tokens that can be known."""
    log_probability = jax.nn.log_softmax(logits(params, tokens[:, :-1]))
    chosen = jnp.take_along_axis(log_probability, tokens[:, 1:, None], axis=-1)
    return -chosen[:, LENGTH // 2 :].mean()


@jax.jit
def step(params: Params, mean: Params, square: Params, tokens: jax.Array, n: jax.Array) -> Any:
    """One step of Adam."""
    value, gradient = jax.value_and_grad(loss)(params, tokens)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradient)

    def moved(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return p - 3e-3 * (m / (1 - 0.9**n)) / (jnp.sqrt(s / (1 - 0.99**n)) + 1e-8)

    return jax.tree.map(moved, params, mean, square), mean, square, value


def sequences(key: jax.Array) -> jax.Array:
    half = jax.random.randint(key, (BATCH, LENGTH // 2), 0, VOCABULARY)
    return jnp.concatenate([half, half], axis=1)


def main(steps: int = 200) -> tuple[float, float]:
    """The loss before and after."""
    keys = jax.random.split(jax.random.key(0), steps + 1)
    params = init(keys[0])
    mean, square = jax.tree.map(jnp.zeros_like, (params, params))
    values = []
    for n in range(steps):
        result = step(params, mean, square, sequences(keys[n + 1]), jnp.float32(n + 1))
        params, mean, square, value = result
        values.append(float(value))
        if n % 20 == 0 or n == steps - 1:
            print(f"step {n:3}  loss {values[-1]:.3f}")
    return values[0], values[-1]


if __name__ == "__main__":
    first, last = main()
    print(f"from {first:.2f} (guessing: {jnp.log(VOCABULARY):.2f}) to {last:.2f} nats")
