"""One process: `python -m benchmarks.first_calls.worker CALL MODULE` prints its milliseconds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.first_calls.calls import CALLS, COLUMNS, Call

__all__ = ["measured"]

Array = NDArray[Any]

_HEADS, _KEYS, _DIM = 8, 64, 64
_TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}


def measured(name: str, module: str) -> dict[str, float]:
    """The milliseconds of each column; preparing is part of the first call."""
    call, prepare = CALLS[name], _PREPARE[module]
    query, key, value = _inputs(call)
    built = prepare(call, query, key, value)
    start = time.perf_counter()
    library = import_module(module)
    times = [time.perf_counter() - start]
    compute: Compute | None = None
    for column in COLUMNS[1:]:
        start = time.perf_counter()
        compute = compute or built(library)
        out = compute(column == "another mask")
        times.append(time.perf_counter() - start)
        expected = _from_the_definition(query, key, value)
        np.testing.assert_allclose(
            np.asarray(out, np.float64), expected, rtol=0, atol=_TOLERANCE[call.dtype]
        )
    return dict(zip(COLUMNS, (1e3 * t for t in times), strict=True))


def _inputs(call: Call) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((3, 1, _HEADS, _KEYS, _DIM)).astype(np.float32)
    query, key, value = arrays.astype(ml_dtypes.bfloat16) if call.dtype == "bfloat16" else arrays
    return np.ascontiguousarray(query[:, :, -call.q_len :]), key, value


def _from_the_definition(query: Array, key: Array, value: Array) -> Array:
    q, k, v = (array.astype(np.float64) for array in (query, key, value))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    allowed = np.tri(q.shape[-2], k.shape[-2], k.shape[-2] - q.shape[-2], dtype=bool)
    weights = np.where(allowed, np.exp(scores), 0)
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


Compute = Callable[[bool], Any]
"""A call, with another mask if that is asked for."""
Built = Callable[[Any], Compute]
"""Given the library that has been imported, what is called."""


def _qkv(call: Call, query: Array, key: Array, value: Array) -> Built:
    def built(qkv: Any) -> Compute:
        def mask(other: bool) -> Any:
            return qkv.SlidingWindow(_KEYS, 0) if other else qkv.Causal()

        def forward(other: bool) -> Any:
            return qkv.attention(query, key, value, mask(other), q_offset="end")

        def both(other: bool) -> Any:
            out, pullback = qkv.vjp(query, key, value, mask(other), q_offset="end")
            pullback(out)
            return out

        return both if call.backward else forward

    return built


def _torch(call: Call, query: Array, key: Array, value: Array) -> Built:
    allowed = np.tri(call.q_len, _KEYS, _KEYS - call.q_len, dtype=bool)

    def built(torch: Any) -> Compute:
        tensors = [torch.from_numpy(array.astype(np.float32)) for array in (query, key, value)]
        tensors = [t.to(getattr(torch, call.dtype)).requires_grad_(call.backward) for t in tensors]
        attend = torch.nn.functional.scaled_dot_product_attention

        def forward(other: bool) -> Any:
            if other:
                return attend(*tensors, attn_mask=torch.from_numpy(allowed))
            # One query after all keys sees them all.
            return attend(*tensors, is_causal=call.q_len > 1)

        def both(other: bool) -> Any:
            out = forward(other)
            out.backward(out.detach())
            return out

        function = both if call.backward else forward
        return lambda other: function(other).detach().float().numpy()

    return built


def _onnxruntime(call: Call, query: Array, key: Array, value: Array) -> Built:
    from onnx import TensorProto, helper

    inputs = {
        name: np.ascontiguousarray(array.swapaxes(1, 2).reshape(1, array.shape[2], -1))
        for name, array in (("query", query), ("key", key), ("value", value))
    }

    def described(name: str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, inputs["query"].shape)

    node = helper.make_node(
        "MultiHeadAttention", list(inputs), ["out"], domain="com.microsoft", num_heads=_HEADS,
        unidirectional=1,
    )  # fmt: skip
    graph = helper.make_graph([node], "attention", list(map(described, inputs)), [described("out")])
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=8).SerializeToString()

    def built(onnxruntime: Any) -> Compute:
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

        def run(other: bool) -> Any:
            # Another mask would be another input of the same operation.
            (out,) = session.run(None, inputs)
            return out.reshape(1, -1, _HEADS, _DIM).swapaxes(1, 2)

        return run

    return built


_PREPARE: dict[str, Callable[[Call, Array, Array, Array], Built]] = {
    "qkv": _qkv,
    "torch": _torch,
    "onnxruntime": _onnxruntime,
}


if __name__ == "__main__":
    print(json.dumps(measured(*sys.argv[1:])))
