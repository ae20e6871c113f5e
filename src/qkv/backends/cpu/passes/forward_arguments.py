"""The argument block of a forward pass."""

from __future__ import annotations

import math

from qkv.backends.cpu.emit.argument_block import word_index
from qkv.backends.cpu.forward.layout import FIELDS
from qkv.backends.cpu.passes.arguments import Arguments, rotated_operands
from qkv.backends.cpu.passes.forward import ForwardPass
from qkv.partial import Partial, RowStatistics
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import plain

_NOT_FINITE = word_index("not_finite", FIELDS)


class ForwardArguments(Arguments):
    """The words of a forward pass."""

    def __init__(
        self,
        problem: Problem,
        forward: ForwardPass,
        workers: int,
        result: Partial,
        statistics: RowStatistics | None = None,
    ) -> None:
        super().__init__(problem, FIELDS)
        spec, operands = problem.spec, problem.operands
        item = spec.compute_dtype.itemsize
        fields = {
            **self._common_fields(forward.plan.tasks, forward.scratch_bytes, workers),
            **self._scale_fields(operands.scale),
            "runs": self._address(forward.plan.runs),
            "out": self._address(result.out),
            "unrounded": 0 if result.unrounded is None else self._address(result.unrounded),
            "lse": self._address(result.lse),
            "lse_rest": 0 if result.lse_rest is None else self._address(result.lse_rest),
            "rows": spec.q_len,
            **self._statistics_fields(statistics),
            "q_blocks": len(forward.plan.tasks) // (spec.batch_size * spec.num_heads),
            "q_blocks_per_task": forward.shape.q_blocks_per_task,
            "not_finite": 0,
        }
        query, key = rotated_operands(problem)
        arrays = {"query": query, "key": plain(key), "value": plain(operands.value)}
        for name, array in arrays.items():
            fields.update(self._operand_fields(name, array))
            fields[f"copy_{name}"] = int(array.strides[-1] != item)
        self._write(fields)

    def is_finite(self) -> bool:
        """Whether the output that the kernel has written is known to be finite."""
        return not self.words[_NOT_FINITE]

    def _scale_fields(self, scale: float) -> dict[str, int]:
        return {
            "sign": self._real_bits(math.copysign(1.0, scale)),
            "scale": self._real_bits(abs(scale)),
        }
