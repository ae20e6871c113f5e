"""The decode kernel for one call, and prepared for further calls of the same form."""

from __future__ import annotations

from typing import Any, NamedTuple

from numpy.typing import NDArray

from qkv.backends.cpu.decode.layout import FIELDS
from qkv.backends.cpu.emit.argument_block import ArgumentBlock, operand_fields, word_index
from qkv.backends.cpu.passes.decode import DecodeArguments, DecodePass
from qkv.backends.cpu.passes.scratch import NO_RESULTS
from qkv.backends.cpu.plan.kernel_spec import integer_bits
from qkv.backends.cpu.prepared.kernel import Kernel, expected_of
from qkv.backends.cpu.prepared.placeholders import without_values
from qkv.backends.cpu.python_calls.filled_block import operand_of
from qkv.partial import Partial, RowStatistics
from qkv.problem.spec import Problem

Array = NDArray[Any]

RESULTS = tuple([word_index(name, FIELDS) for name in ("out", "lse")])
NOT_FINITE = word_index("not_finite", FIELDS)


class OperandWords(NamedTuple):
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


QUERY, KEY, VALUE = (OperandWords.of(name) for name in ("query", "key", "value"))


def run_decode(problem: Problem, result: Partial, statistics: RowStatistics | None) -> bool:
    """Run one call, with results in these arrays; whether the output is known to be finite."""
    arguments = DecodeArguments(problem, result, statistics)
    decode = DecodePass(problem, statistics=statistics is not None)
    return decode.run(ArgumentBlock(arguments.copy()), decode.share(problem.spec.kv_len), arguments)


def decode_kernel(problem: Problem, arrays: tuple[Array, ...]) -> Kernel:
    """The kernel of calls like this problem, with `arrays` that each call brings."""
    problem, read = without_values(problem, arrays)
    decode = DecodePass(problem, int_bits=integer_bits(problem, read))
    kv_len = problem.spec.kv_len
    template = DecodeArguments(problem, NO_RESULTS)
    always = decode.share(kv_len)

    def run(block: ArgumentBlock, _: int, keep_alive: Any, between_products: bool) -> bool:
        # How a brief call is shared out does not depend on the number of threads.
        share = always
        if not always.brief:
            share = decode.share(kv_len, between_products=between_products)
        return decode.run(block, share, keep_alive)

    words = [template.word_of_table(name) for (name,) in read]
    return Kernel(
        lambda: ArgumentBlock(template.copy()),
        run,
        expected_of(problem, (QUERY.address, KEY.address, VALUE.address)),
        list(map(operand_of, words, arrays)),
        RESULTS,
        {"not_finite": NOT_FINITE},
        job=decode.brief_job(kv_len),
    )
