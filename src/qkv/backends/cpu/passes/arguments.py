"""The argument block of one call: addresses, strides and sizes as the kernel reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.addresses import address_of, batch_offsets, page_aligned
from qkv.backends.cpu.emit.argument_block import LIMIT, WORD, ArgumentBlock
from qkv.partial import RowStatistics
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import Rows, whole_rows
from qkv.process.forks import importing

Array = NDArray[Any]


class Arguments(ArgumentBlock):
    """The words of one call as a kernel reads them; keeps alive whatever its addresses point to."""

    def __init__(self, problem: Problem, names: tuple[str, ...]) -> None:
        self._problem = problem
        self._names = names
        self._compute = problem.spec.compute_dtype
        self._arrays: list[Array] = []

    def copy(self) -> Array:
        """A copy of the words, for a call of its own."""
        words = page_aligned(self.words.nbytes).view(np.int64)
        words[:] = self.words
        return words

    def word_of_table(self, name: str) -> int:
        """Which word of the block is the address of a table."""
        word = LIMIT + len(self._names)
        for table in self._problem.spec.tables:
            if table.name == name:
                return word
            word += 1 + 2 * table.ndim
        raise KeyError(name)

    def _write(self, fields: Mapping[str, int], more: Sequence[int] = ()) -> None:
        """Lay out the block: counter, fields, tables of the expressions, and what follows them."""
        words = [0] * LIMIT + [fields[name] for name in self._names]
        for table in self._problem.spec.tables:
            array = self._problem.operands.tables[table.name]
            words.append(self._address(array))
            for size, stride in zip(array.shape, array.strides, strict=True):
                words += [size, stride]
        words += more
        block = page_aligned(len(words) * WORD).view(np.int64)
        block[:] = words
        super().__init__(block, self._arrays)

    def _address(self, array: Array) -> int:
        """Where an array lies; it stays there as long as the block."""
        self._arrays.append(array)
        return address_of(array)

    def _common_fields(self, tasks: Array, per_worker: int, workers: int) -> dict[str, int]:
        """The fields of every kernel but `scale`."""
        spec, dropout = self._problem.spec, self._problem.operands.dropout
        fields = {
            "limit": 0,
            "tasks": self._address(tasks),
            "scratch": self._address(page_aligned(per_worker * workers)),
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
            fields["dropout_factor"] = self._real_bits(1 / (1 - dropout.p))
        return fields

    def _statistics_fields(self, statistics: RowStatistics | None) -> dict[str, int]:
        names = ("entropy", "max_score", "max_weight")
        if statistics is None:
            return dict.fromkeys(names, 0)
        return {name: self._address(getattr(statistics, name)) for name in names}

    def _real_bits(self, value: float) -> int:
        """The bits of a number in the type of computation."""
        with np.errstate(over="ignore"):
            real = self._compute.type(value)
        return int(real.view(np.int32 if real.itemsize == 4 else np.int64))

    def _operand_fields(self, name: str, array: Array) -> dict[str, int]:
        *lead, head, row, element = array.strides
        return {
            name: self._address(array),
            f"{name}_batches": self._address(batch_offsets(self._problem.spec.batch_shape, lead)),
            f"{name}_head": head,
            f"{name}_row": row,
            f"{name}_element": element,
        }


def batch_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Bytes from one batch row to the next in C order, 0 if there is one; None if they differ."""
    innermost, count = None, 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=False):
        if size == 1:
            continue
        if innermost is None:
            innermost = stride
        elif stride != innermost * count:
            return None
        count *= size
    return innermost or 0


def rotated_operands(problem: Problem) -> tuple[Array, Rows]:
    """Query and key as they are multiplied: rotated copies, or as they are."""
    operands = problem.operands
    if problem.spec.rotation is None or operands.angles is None:
        return operands.query, operands.key
    with importing():
        from qkv.backends.cpu.rows.rotation import rotated_rows

    key = whole_rows(operands.key, problem.spec.compute_dtype)
    return rotated_rows(problem, operands.query, "q"), rotated_rows(problem, key, "kv")
