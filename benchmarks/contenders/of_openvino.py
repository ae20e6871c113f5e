"""OpenVINO: a model of one ScaledDotProductAttention."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders import Prepared
from benchmarks.problems.reference import Inputs
from benchmarks.problems.workloads import Workload
from qkv.errors import UnsupportedError

__all__ = ["prepare"]

Array = NDArray[Any]

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def prepare(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """Prepare a call with OpenVINO's causal flag; heads of a group share keys by broadcasting."""
    import openvino

    if workload.dtype not in _PRECISIONS or workload.direction != "forward":
        raise UnsupportedError(f"it runs forward in {', '.join(_PRECISIONS)} only.")
    if workload.rule.name not in ("all", "causal"):
        raise UnsupportedError(f"it has no words for {workload.rule.name}.")
    arrays = (inputs.query, inputs.key, inputs.value)
    precision = _PRECISIONS[workload.dtype]
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
    }
    model = _model(workload, arrays, precision)
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    tensors = [_tensor(array, precision) for array in arrays]
    for i, tensor in enumerate(tensors):
        request.set_input_tensor(i, tensor)

    def run() -> Any:
        request.infer()
        return request.get_output_tensor(0)

    return Prepared(run, lambda out: {"out": _array(out, precision)})


def _model(workload: Workload, arrays: tuple[Array, ...], precision: str) -> Any:
    import openvino
    from openvino import opset13 as ops

    s = workload.shape
    kind = getattr(openvino.Type, precision)
    query, key, value = (ops.parameter(array.shape, kind) for array in arrays)
    out = ops.scaled_dot_product_attention(
        query,
        _spread(key, workload),
        _spread(value, workload),
        causal=workload.rule.name == "causal" and s.q_len > 1,
    )
    return openvino.Model([out], [query, key, value], "attention")


def _spread(rows: Any, workload: Workload) -> Any:
    """Each kv head for every query head of its group."""
    from openvino import opset13 as ops

    s = workload.shape
    group = s.num_heads // s.num_kv_heads
    if group == 1:
        return rows
    batch, heads, length, dim = rows.shape
    wide = ops.broadcast(
        ops.unsqueeze(rows, np.array([2])), np.array([batch, heads, group, length, dim])
    )
    return ops.reshape(wide, np.array([batch, heads * group, length, dim]), special_zero=False)


def _tensor(array: Array, precision: str) -> Any:
    import openvino

    tensor = openvino.Tensor(getattr(openvino.Type, precision), array.shape)
    np.copyto(tensor.data.view(array.dtype), array)
    return tensor


def _array(tensor: Any, precision: str) -> Array:
    if precision != "bf16":
        return np.array(tensor.data)
    import ml_dtypes

    return np.asarray(np.array(tensor.data).view(ml_dtypes.bfloat16).astype(np.float32))
