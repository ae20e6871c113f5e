"""Tables that decoding reads along the keys, beside softmax in float64 for each row."""

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from forced import OF_ARM, as_it_runs
from qkv.backends.cpu.machine.host import host

IS_ARM = host().isa in OF_ARM
ISAS = ["neon"] if IS_ARM else [as_it_runs(isa) for isa in ("avx512", "avx2", "sse")]
BATCH, HEADS, QUERIES, DIM = 2, 3, 2, 16

Array = NDArray[np.generic]


def layouts(table: Array) -> dict[str, Array]:
    """The same entries where keys lie side by side in memory, and where they do not."""
    apart = np.zeros((*table.shape[:-1], 2 * table.shape[-1]), table.dtype)
    apart[..., ::2] = table
    turned = np.ascontiguousarray(table.swapaxes(-2, -1)).swapaxes(-2, -1)
    backwards = np.ascontiguousarray(table[..., ::-1])[..., ::-1]
    return {"together": table, "apart": apart[..., ::2], "turned": turned, "backwards": backwards}


def by_the_definition(q: Array, k: Array, v: Array, bias: Array) -> NDArray[np.float64]:
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype(float), k.astype(float)) / np.sqrt(DIM)
    scores = scores + bias
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = np.nan_to_num(weights)  # Rows without keys.
    total = weights.sum(axis=-1, keepdims=True)
    shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("bhqk,bhkd->bhqd", shares, v.astype(float))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "float64"])
def test_biases_and_masks(isa: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_ISA", isa)
    rng = np.random.default_rng(0)
    for kv_len in (1, 5, 16, 47, 64, 130, 700):
        q, k, v = (
            rng.normal(size=(BATCH, HEADS, n, DIM)).astype(np.float32)
            for n in (QUERIES, kv_len, kv_len)
        )
        shape = BATCH, HEADS, QUERIES, kv_len
        table = rng.random(shape) < 0.8 if dtype == "bool" else rng.normal(size=shape).astype(dtype)
        hidden = slice(kv_len // 4, kv_len // 2)
        table[1, ..., hidden] = False if dtype == "bool" else -np.inf
        bias = np.where(table, 0.0, -np.inf) if dtype == "bool" else table.astype(float)
        right = by_the_definition(q, k, v, bias)
        for name, laid in layouts(table).items():
            found = qkv.attention(q, k, v, laid, backend="cpu")
            np.testing.assert_allclose(found, right, atol=4e-6, err_msg=f"{name}, {kv_len} keys")
