"""The argument block of one call: addresses, strides and sizes as the kernel reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.forward import FIELDS, scratch_bytes
from qkv.backends.cpu.frame import COUNTER_BYTES, WORD, Shape
from qkv.backends.cpu.schedule import Schedule
from qkv.backends.cpu.vector_math import LN_2, LOG2_E
from qkv.partial import Partial, RowStatistics
from qkv.problem.expressions import SCORE
from qkv.problem.scores import Scores
from qkv.problem.spec import Problem

Array = NDArray[Any]

_FIRST = COUNTER_BYTES // WORD
_PAGE = 4096


class Arguments:
    """The words of one call as a kernel reads them; keeps alive whatever its addresses point to."""

    def __init__(self, problem: Problem, names: tuple[str, ...]) -> None:
        self._problem = problem
        self._names = names
        self._compute = problem.spec.compute_dtype
        self._kept: list[Array] = []

    def allow(self, start: int, stop: int) -> None:
        """Let the next run take the tasks from `start` to `stop`."""
        self._words[0] = start
        self._words[_FIRST + self._names.index("limit")] = stop

    def _write(self, fields: Mapping[str, int], more: Sequence[int] = ()) -> None:
        """Lay out the block: counter, fields, tables of the expressions, and what follows them."""
        words = [0] * _FIRST + [fields[name] for name in self._names]
        for table in self._problem.spec.tables:
            array = self._problem.operands.tables[table.name]
            words.append(self._address(array))
            for size, stride in zip(array.shape, array.strides, strict=True):
                words += [size, stride]
        words += more
        self._words = _pages(len(words) * WORD).view(np.int64)
        self._words[:] = words
        self.address = _address(self._words)

    def _address(self, array: Array) -> int:
        """Where an array lies; it stays there as long as the block."""
        self._kept.append(array)
        return _address(array)

    def _common(self, tasks: Array, per_worker: int, workers: int) -> dict[str, int]:
        """The fields of every kernel but `scale`."""
        spec, dropout = self._problem.spec, self._problem.operands.dropout
        fields = {
            "limit": 0,
            "tasks": self._address(tasks),
            "scratch": self._address(_pages(per_worker * workers)),
            "scratch_bytes": per_worker,
            "num_heads": spec.num_heads,
            "group_size": spec.group_size,
            "q_len": spec.q_len,
            "kv_len": spec.kv_len,
            "head_dim": spec.head_dim,
            "v_head_dim": spec.v_head_dim,
            "dropout_seed": 0,
            "dropout_threshold": 0,
            "dropout_factor": 0,
        }
        if dropout is not None:
            signed = dropout.seed - 2**64 if dropout.seed >= 2**63 else dropout.seed
            fields["dropout_seed"] = signed
            fields["dropout_threshold"] = math.ceil(dropout.p * 2.0**32)
            fields["dropout_factor"] = self._real(1 / (1 - dropout.p))
        return fields

    def _real(self, value: float) -> int:
        """The bits of a number in the type of computation."""
        with np.errstate(over="ignore"):
            real = self._compute.type(value)
        return int(real.view(np.int32 if real.itemsize == 4 else np.int64))

    def _operand(self, name: str, array: Array) -> dict[str, int]:
        spec = self._problem.spec
        *lead, head, row, element = array.strides
        batches = np.zeros(spec.batch_shape, np.int64)
        for axis, stride in enumerate(lead):
            steps = np.arange(spec.batch_shape[axis], dtype=np.int64) * stride
            batches += steps.reshape(-1, *[1] * (len(lead) - axis - 1))
        return {
            name: self._address(array),
            f"{name}_batches": self._address(batches),
            f"{name}_head": head,
            f"{name}_row": row,
            f"{name}_element": element,
        }


class ForwardArguments(Arguments):
    """The words of a forward pass."""

    def __init__(
        self,
        problem: Problem,
        plan: Schedule,
        result: Partial,
        statistics: RowStatistics | None,
        *,
        folded: bool,
        shape: Shape,
        workers: int,
    ) -> None:
        super().__init__(problem, FIELDS)
        spec, operands = problem.spec, problem.operands
        item = spec.compute_dtype.itemsize
        per_worker = scratch_bytes(shape, item, spec.head_dim, spec.v_head_dim)
        fields = {
            **self._common(plan.tasks, per_worker, workers),
            **self._scales(operands.scale, plain=spec.score == SCORE),
            "runs": self._address(plan.runs),
            "out": self._address(result.out),
            "lse": self._address(result.lse),
            "rows": spec.q_len * (spec.group_size if folded else 1),
            "entropy": 0,
            "max_score": 0,
        }
        if statistics is not None:
            fields["entropy"] = self._address(statistics.entropy)
            fields["max_score"] = self._address(statistics.max_score)
        query, key = rotated(problem)
        for name, array in (("query", query), ("key", key), ("value", operands.value)):
            fields.update(self._operand(name, array))
            fields[f"copy_{name}"] = int(array.strides[-1] != item)
        self._write(fields)

    def _scales(self, scale: float, *, plain: bool) -> dict[str, int]:
        """Scores in base 2 if no mod reads them; the way back to natural ones, in two parts."""
        if not plain:
            sign, factor, exact = 1.0, scale, 1.0
        else:
            sign = math.copysign(1.0, scale)
            factor = float(self._compute.type(abs(scale) * LOG2_E))
            exact = abs(scale) / factor if factor else LN_2
        unit = float(self._compute.type(exact))
        parts = {"sign": sign, "scale": factor, "unit": unit, "unit_rest": exact - unit}
        return {name: self._real(value) for name, value in parts.items()}


def rotated(problem: Problem) -> tuple[Array, Array]:
    """Query and key as the product meets them: rotated copies, or the arrays as they are."""
    spec, operands = problem.spec, problem.operands
    if spec.rotation is None or spec.rotation.rotary_dim == 0:
        return operands.query, operands.key
    scores = Scores(problem, spec.compute_dtype)
    query = np.empty(operands.query.shape, spec.compute_dtype)
    key = np.empty(operands.key.shape, spec.compute_dtype)
    for batch, index in enumerate(np.ndindex(*spec.batch_shape)):
        for head in range(spec.num_heads):
            query[(*index, head)] = scores.query(batch, head, slice(None))
        for head in range(spec.num_kv_heads):
            key[(*index, head)] = scores.key(batch, head * spec.group_size, slice(None))
    return query, key


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _pages(size: int) -> Array:
    """Bytes that start at a page, uninitialised."""
    raw = np.empty(size + _PAGE, np.uint8)
    start = -_address(raw) % _PAGE
    return raw[start : start + size]
