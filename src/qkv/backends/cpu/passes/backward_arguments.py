"""The argument block of a backward pass, and the arrays that it writes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.addresses import page_aligned
from qkv.backends.cpu.backward.layout import fields_with, scratch_areas
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.passes.arguments import Arguments, rotated_operands
from qkv.backends.cpu.passes.backward import BackwardPass, gradient_dtype
from qkv.backends.cpu.passes.delta_correction import RowArrays
from qkv.backends.cpu.products.layout import round_to_pages, round_to_vectors
from qkv.backends.cpu.rows.rotation import rotated_rows
from qkv.backends.cpu.split_bf16 import choice as split_bf16
from qkv.problem.backward import BackwardInputs, OperandGradients
from qkv.problem.spec import Problem, Spec
from qkv.problem.stored_rows import plain

Array = NDArray[Any]


class Results:
    """Arrays that the kernels write, and what is left to do with them."""

    def __init__(self, problem: Problem, backward: BackwardPass) -> None:
        self.problem = problem
        self.dtype = gradient_dtype(problem)
        self.adds_query = backward.splits > 1 or self.dtype != problem.spec.compute_dtype
        self._lanes = backward.shape.lanes
        spec = problem.spec
        compute = spec.compute_dtype
        batch, kv_heads, kv_len = spec.batch_size, spec.num_kv_heads, spec.kv_len
        rows = (batch, spec.num_heads, spec.q_len, spec.head_dim)
        self.query = np.zeros(rows, self.dtype)
        self.query_partials = self.query[None]
        if self.adds_query:
            self.query_partials = np.zeros((backward.splits, *rows), compute)
        self.key, self.key_sums = self._key_arrays((batch, kv_heads, kv_len, spec.head_dim))
        self.value, self.value_sums = self._key_arrays((batch, kv_heads, kv_len, spec.v_head_dim))
        self.tables = {
            t.name: np.zeros((t.copies, *t.shape), np.float64 if t.wide else compute)
            for t in backward.tables
        }

    def _key_arrays(self, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """A gradient, and where it is added: in place if its rows are whole vectors."""
        compute = self.problem.spec.compute_dtype
        out = page_aligned_array(shape, self.dtype)
        if self.dtype == compute and shape[-1] % self._lanes == 0:
            return out, out
        return out, page_aligned_array(
            (*shape[:-1], round_to_vectors(shape[-1], self._lanes)), compute
        )

    def finish(self) -> OperandGradients:
        operands = self.problem.operands
        query = self.query.reshape(operands.query.shape)
        key = self.key.reshape(operands.key.shape)
        if operands.angles is not None:
            query = rotated_rows(self.problem, query, "q", back=True)
            key = rotated_rows(self.problem, key, "kv", back=True)
        value = self.value.reshape(operands.value.shape)
        tables = {name: copies.sum(axis=0) for name, copies in self.tables.items()}
        return OperandGradients(query, key, value, tables)


def page_aligned_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A dense array that starts at a page, uninitialised."""
    size = math.prod(shape) * dtype.itemsize
    return page_aligned(size).view(dtype).reshape(shape)


def areas_of(spec: Spec, shape: TileShape) -> dict[str, int]:
    """The areas of one worker's scratch memory, in bytes."""
    if shape.product == "tiles":
        return split_bf16.backward_kernel().areas(
            shape, spec.head_dim, spec.v_head_dim, shape.q_blocks_per_task
        )
    return scratch_areas(shape, spec.head_dim, spec.v_head_dim, spec.compute_dtype.itemsize)


def scratch_of(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: whole pages."""
    return round_to_pages(sum(areas_of(spec, shape).values()))


class BackwardArguments(Arguments):
    """The words of a backward pass."""

    def __init__(
        self,
        problem: Problem,
        inputs: BackwardInputs,
        backward: BackwardPass,
        results: Results,
        rows: RowArrays,
        workers: int,
    ) -> None:
        spec, operands, shape = problem.spec, problem.operands, backward.shape
        areas = areas_of(spec, shape)
        super().__init__(problem, fields_with(tuple(areas)))
        item = spec.compute_dtype.itemsize
        ends = np.cumsum(list(areas.values()))
        query, key = rotated_operands(problem)
        arrays = {
            "query": query, "key": plain(key), "value": plain(operands.value),
            "out": inputs.out, "grad_out": inputs.grad_out,
        }  # fmt: skip
        fields = {
            **self._common_fields(backward.tasks, scratch_of(spec, shape), workers),
            "scale": self._real_bits(operands.scale),
            "blocks": self._address(backward.plan.tasks),
            "runs": self._address(backward.plan.runs),
            "q_blocks": -(-spec.q_len // (shape.block_q * shape.q_blocks_per_task)),
            "q_blocks_per_task": shape.q_blocks_per_task,
            "sinks": 0
            if operands.sinks is None
            else self._address(np.ascontiguousarray(operands.sinks, spec.compute_dtype)),
            "splits": len(results.query_partials),
            "finished": self._address(np.zeros(spec.batch_size * spec.num_kv_heads, np.int64)),
            "query_partials": self._address(results.query_partials),
            "partial_bytes": results.query_partials.strides[0],
            "d_query": self._address(results.query),
            "add_query": int(results.adds_query),
            "row_sums": self._address(rows.sums),
            "row_bytes": rows.lse.nbytes,
        }
        for name in ("lse", "lse_rest", "grad_lse", "delta_rest"):
            fields[name] = self._address(getattr(rows, name))
        for name, array in arrays.items():
            fields.update(self._operand_fields(name, array))
        for name in ("key", "value"):
            fields[f"copy_{name}"] = int(arrays[name].strides[-1] != item)
            out, sums = getattr(results, name), getattr(results, f"{name}_sums")
            fields[f"{name}_sums"] = self._address(sums)
            fields[f"{name}_sum_row"] = sums.shape[-1] * item
            fields[f"d_{name}"] = self._address(out)
            fields[f"round_{name}"] = int(out is not sums)
        for name, end, size in zip(areas, ends.tolist(), areas.values(), strict=True):
            fields[f"area_{name}"] = end - size
        more = []
        for copies in results.tables.values():
            more += [self._address(copies), *copies.strides[1:]]
        self._write(fields, more)
