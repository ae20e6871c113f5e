"""ONNX Runtime: its own operators MultiHeadAttention and GroupQueryAttention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders import Prepared
from benchmarks.problems.reference import Inputs
from benchmarks.problems.workloads import Workload
from qkv.errors import UnsupportedError

__all__ = ["prepare", "prepare_grouped"]

Array = NDArray[Any]

_DOMAIN = "com.microsoft"


def prepare(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """MultiHeadAttention, with its causal flag."""
    s, rule = workload.shape, workload.rule
    _float_forward(workload)
    if s.num_heads != s.num_kv_heads or rule.name not in ("all", "causal"):
        raise UnsupportedError(f"MultiHeadAttention has no words for {workload.summary}.")
    arrays = {name: _joined(getattr(inputs, name)) for name in ("query", "key", "value")}
    session = _session(
        "MultiHeadAttention",
        arrays,
        {"out": arrays["query"]},
        {"num_heads": s.num_heads, "unidirectional": int(rule.name == "causal")},
        threads,
    )
    return _prepared(workload, session, arrays, {})


def prepare_grouped(workload: Workload, inputs: Inputs, threads: int) -> Prepared:
    """GroupQueryAttention, which is causal; one query row comes after a cache of all the others.

    The cache is one buffer in and out, as a decoder keeps it, so that nothing is copied.
    """
    s, rule = workload.shape, workload.rule
    _float_forward(workload)
    step = s.q_len == 1
    if rule.name not in ("causal", "window") and not (step and rule.name == "all"):
        raise UnsupportedError(f"GroupQueryAttention has no words for {workload.summary}.")
    new = slice(s.kv_len - 1, None) if step else slice(None)
    arrays = {
        "query": _joined(inputs.query),
        "key": _joined(inputs.key[:, :, new]),
        "value": _joined(inputs.value[:, :, new]),
        "past_key": inputs.key if step else inputs.key[:, :, :0],
        "past_value": inputs.value if step else inputs.value[:, :, :0],
        "seqlens_k": np.full(s.batch_shape, s.kv_len - 1, np.int32),
        "total_sequence_length": np.array(s.kv_len, np.int32),
    }
    session = _session(
        "GroupQueryAttention",
        arrays,
        {"out": arrays["query"], "present_key": inputs.key, "present_value": inputs.value},
        {
            "num_heads": s.num_heads,
            "kv_num_heads": s.num_kv_heads,
            "local_window_size": rule.parameters[0] if rule.name == "window" else -1,
        },
        threads,
    )
    kept = {f"present_{name}": f"past_{name}" for name in ("key", "value")} if step else {}
    return _prepared(workload, session, arrays, kept)


def _float_forward(workload: Workload) -> None:
    if workload.dtype != "float32" or workload.direction != "forward":
        raise UnsupportedError("its attention runs forward in float32 only.")


def _session(
    operator: str,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    attributes: Mapping[str, Any],
    threads: int,
) -> Any:
    """A model of one node."""
    import onnxruntime
    from onnx import TensorProto, helper

    kinds = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}

    def described(arrays: Mapping[str, Array]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, kinds[array.dtype.name], array.shape)
            for name, array in arrays.items()
        ]

    node = helper.make_node(operator, list(inputs), list(outputs), domain=_DOMAIN, **attributes)
    graph = helper.make_graph([node], "attention", described(inputs), described(outputs))
    versions = [helper.make_opsetid("", 17), helper.make_opsetid(_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _prepared(
    workload: Workload, session: Any, arrays: Mapping[str, Array], kept: Mapping[str, str]
) -> Prepared:
    """Inputs bound once; outputs in memory that the runtime keeps, or in place of an input."""
    import onnxruntime

    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        for name, array in arrays.items()
    }
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        if output.name in kept:
            binding.bind_ortvalue_output(output.name, values[kept[output.name]])
        else:
            binding.bind_output(output.name, "cpu")
    s = workload.shape

    def run() -> Any:
        session.run_with_iobinding(binding)
        return binding

    def read(result: Any) -> dict[str, Array]:
        out = result.get_outputs()[0].numpy()
        return {"out": out.reshape(*s.batch_shape, s.q_len, s.num_heads, -1).swapaxes(1, 2)}

    return Prepared(run, read)


def _joined(array: Array) -> Array:
    """(batch, heads, length, dim) as (batch, length, heads * dim)."""
    turned = array.swapaxes(1, 2)
    return np.ascontiguousarray(turned.reshape(*turned.shape[:2], -1))
