"""The decode kernel for one call, and prepared for further calls of the same form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from qkv.backends.cpu.decode.rows import FIELDS
from qkv.backends.cpu.emit.argument_block import ArgumentBlock
from qkv.backends.cpu.emit.frame import operand_fields
from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.passes.arguments import batch_offsets, word_index
from qkv.backends.cpu.passes.decode import DecodeArguments, DecodePass, batch_stride
from qkv.backends.cpu.passes.scratch import NO_RESULTS
from qkv.backends.cpu.prepared.call import Kernel, expected_of
from qkv.backends.cpu.prepared.placeholders import without_values
from qkv.partial import Partial, RowStatistics
from qkv.problem.spec import Problem

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


def decode_kernel(problem: Problem, arrays: tuple[Array, ...]) -> Kernel:
    """The kernel of calls like this problem, with `arrays` that each call brings."""
    problem, read = without_values(problem, arrays)
    decode, kv_len = DecodePass(problem), problem.spec.kv_len
    template = DecodeArguments(problem, NO_RESULTS)
    always = decode.share(kv_len)

    def run(block: ArgumentBlock, _: int, keep_alive: Any) -> bool:
        # How a brief call is shared out does not depend on the number of threads.
        share = always if always.brief else decode.share(kv_len)
        return decode.run(block, share, keep_alive)

    return Kernel(
        lambda: ArgumentBlock(template.copy()),
        run,
        expected_of(problem, (QUERY.address, KEY.address, VALUE.address)),
        RESULT_WORDS,
        [template.word_of_table(name) for (name,) in read],
        decode.brief_job(kv_len),
    )
