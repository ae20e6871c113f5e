"""The decode kernel for one call, and prepared for further calls of the same form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Addresses
from qkv.backends.cpu.decode.rows import FIELDS
from qkv.backends.cpu.emit.frame import operand_fields
from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.passes.arguments import batch_offsets, word_index
from qkv.backends.cpu.passes.decode import DecodeArguments, DecodePass, batch_stride
from qkv.backends.cpu.passes.scratch import NO_RESULTS, ArgumentBlock
from qkv.backends.cpu.prepared.placeholders import without_values
from qkv.backends.cpu.prepared.repeated import RepeatedCall
from qkv.backends.cpu.python_calls.filled_block import Operand, operand_of
from qkv.partial import Partial, RowStatistics
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import plain

Array = NDArray[Any]

OUT, LSE = word_index("out", FIELDS), word_index("lse", FIELDS)
RESULT_WORDS = {"out": OUT, "lse": LSE, "not_finite": word_index("not_finite", FIELDS)}
"""What the code that reads arrays is told of the results."""


@dataclass(frozen=True, slots=True)
class OperandWords:
    """Which words of a block say where the rows of one operand lie."""

    address: int
    batches: int
    batch: int
    head: int
    row: int
    element: int

    @classmethod
    def of(cls, name: str) -> OperandWords:
        address, batches, *strides = (word_index(field, FIELDS) for field in operand_fields(name))
        return cls(address, batches, word_index(f"{name}_batch", FIELDS), *strides)

    def write(
        self, words: memoryview, batch_shape: tuple[int, ...], strides: Sequence[int]
    ) -> Array | None:
        """Write byte strides `(*batch, heads, rows, elements)`; the result must be kept alive."""
        *lead, words[self.head], words[self.row], words[self.element] = strides
        if len(lead) < 2:
            words[self.batch] = lead[0] if lead else 0
            words[self.batches] = 0
            return None
        batch = batch_stride(batch_shape, lead)
        if batch is not None:
            words[self.batch] = batch
            words[self.batches] = 0
            return None
        offsets = batch_offsets(batch_shape, lead)
        words[self.batches] = quick_address_of(offsets)
        return offsets


QUERY, KEY, VALUE = (OperandWords.of(name) for name in ("query", "key", "value"))


def run_decode(problem: Problem, result: Partial, statistics: RowStatistics | None) -> bool:
    """Run one call, with results in these arrays; whether the output is known to be finite."""
    arguments = DecodeArguments(problem, result, statistics)
    decode = DecodePass(problem, statistics=statistics is not None)
    return decode.run(ArgumentBlock(arguments.copy()), decode.share(problem.spec.kv_len), arguments)


class PreparedDecode:
    """The pass of few queries for operands like those of one problem."""

    def __init__(self, problem: Problem, *, arrays: tuple[Array, ...] = ()) -> None:
        problem, read = without_values(problem, arrays)
        spec = problem.spec
        self._pass = DecodePass(problem)
        self._kv_len = spec.kv_len
        share = self._pass.share(spec.kv_len)
        self._share = share if share.brief else None
        """How a brief call is shared out, which does not depend on the number of threads."""
        self._template = template = DecodeArguments(problem, NO_RESULTS)
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        self._out = shape, self._pass.out_dtype
        self._lse = shape[:-1], spec.compute_dtype
        self._read = [list(map(template.word_of_table, tables)) for tables in read]
        self._blocks: list[ArgumentBlock] = []
        self._operands: list[Operand] = []
        if not arrays:
            operands = problem.operands
            given = operands.query, plain(operands.key), plain(operands.value)
            places = QUERY.address, KEY.address, VALUE.address
            self._operands = list(map(operand_of, places, given))

    def __call__(
        self, query: Array, key: Array, value: Array, rows: bool, arrays: Sequence[Array] = ()
    ) -> tuple[Array, Array | None, None, None] | None:
        at, out = quick_address_of, np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        found = self.run(
            (
                at(query), at(key), at(value), at(out), 0 if lse is None else at(lse), 0,
                [at(array) for array in arrays],
            ),
            (query, key, value, out, lse, arrays),
        )  # fmt: skip
        return (out, lse, None, None) if found else None

    def run(self, addresses: Addresses, keep_alive: Any) -> bool:
        """Read operands, and write out and lse, at these addresses.

        `keep_alive` are the objects that own the memory.

        False if an output is not finite: the caller then makes a checked call.
        """
        try:
            block = self._blocks.pop()
        except IndexError:
            block = self._new_block()
        words = block.words
        (words[QUERY.address], words[KEY.address], words[VALUE.address],
         words[OUT], words[LSE], _, arrays) = addresses  # fmt: skip
        if arrays:
            for places, address in zip(self._read, arrays, strict=True):
                for place in places:
                    words[place] = address
        is_finite = self._run_block(block, self._kv_len, keep_alive)
        self._blocks.append(block)
        return is_finite

    def repeated(self, at_end: bool = False) -> RepeatedCall | None:
        """See `qkv.backends.RepeatingCall`."""
        if not self._operands:
            return None
        job, expected = self._pass.brief_job(self._kv_len), (self._operands, RESULT_WORDS)
        return RepeatedCall(self._new_block, *expected, self._out, self._lse, job, self._run_block)

    def _new_block(self) -> ArgumentBlock:
        return ArgumentBlock(self._template.copy())

    def _run_block(self, block: ArgumentBlock, _: int, keep_alive: Any) -> bool:
        """Run a block that was filled; whether the output is known to be finite."""
        share = self._share or self._pass.share(self._kv_len)
        return self._pass.run(block, share, keep_alive)
