"""Decoding steps of any length: prepared once for any number of keys.

A call writes addresses, strides and lengths into an
argument block, and the kernel finds out which keys it reads. What code depends on, above all how
wide integers are, is found once for all lengths and shifts up to `LONGEST_STEP`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from qkv.backends import LONGEST_STEP
from qkv.backends.cpu.decode.layout import FIELDS
from qkv.backends.cpu.emit.argument_block import WORD, ArgumentBlock, word_index
from qkv.backends.cpu.passes.decode import DecodeArguments, DecodePass
from qkv.backends.cpu.passes.scratch import NO_RESULTS
from qkv.backends.cpu.prepared.any_length import AnyLengthForm, shift_tables
from qkv.backends.cpu.prepared.decode import KEY, NOT_FINITE, QUERY, RESULTS, VALUE, OperandWords
from qkv.backends.cpu.prepared.kernel import Kernel
from qkv.backends.cpu.prepared.placeholders import without_values
from qkv.backends.cpu.python_calls.filled_block import Axis, Operand
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import Rows, StoredRows

Array = NDArray[Any]

__all__ = ["steps_kernel"]

_KV_LEN, _Q_SHIFT = (word_index(name, FIELDS) for name in ("kv_len", "q_shift"))


def steps_kernel(problem: Problem, form: AnyLengthForm, arrays: tuple[Array, ...]) -> Kernel:
    """The kernel of steps like this problem, with `arrays` that each step brings.

    Writing the arguments of a step takes the same time for any number of keys and any position.
    """
    shifts, at_end = shift_tables(problem), problem.operands.positions.align == "end"
    problem, _ = without_values(problem, arrays)
    decode = DecodePass(problem, int_bits=form.int_bits)
    template = DecodeArguments(problem, NO_RESULTS)
    shift_words = [template.word_of_table(name) for name in shifts]

    def new_block() -> ArgumentBlock:
        """A block whose expressions read the shift from one of its own words."""
        block = ArgumentBlock(template.copy())
        for word in shift_words:
            block.words[word] = block.address + WORD * _Q_SHIFT
        # Steps tell one stride for all batch entries.
        for operand in (QUERY, KEY, VALUE):
            block.words[operand.batches] = 0
        return block

    def run(block: ArgumentBlock, kv_len: int, keep_alive: Any, between_products: bool) -> bool:
        share = decode.share(kv_len, between_products=between_products)
        return decode.run(block, share, keep_alive)

    words = {
        "not_finite": NOT_FINITE, "kv_len": _KV_LEN, "q_shift": _Q_SHIFT, "longest": LONGEST_STEP,
        "q_len": problem.spec.q_len, "at_end": int(at_end),
    }  # fmt: skip
    array_operands = [words_of_array.operand for words_of_array in form.words]
    for name, rows in (("key", problem.operands.key), ("value", problem.operands.value)):
        array_operands += _parts(name, rows)
    return Kernel(
        new_block, run, _operands(problem), array_operands, RESULTS, words,
        is_step=True, job=decode.brief_job(),
    )  # fmt: skip


def _operands(problem: Problem) -> list[Operand]:
    """Query, key and value of any number of keys and any strides, with one batch axis at most.

    Pages have none: batch rows differ in their tables alone.
    """
    operands, spec = problem.operands, problem.spec
    given = operands.query, operands.key, operands.value
    expected = []
    for words, array in zip((QUERY, KEY, VALUE), given, strict=True):
        sizes, page_layout = list(array.shape), _page_layout(array)
        if array.ndim > 3:
            sizes = sizes[-3:] if page_layout else [spec.batch_size, *sizes[-3:]]
        if words is not QUERY:
            sizes[-2] = -1
        expected.append(Operand(words.address, array.dtype, _axes(sizes, words), *page_layout))
    return expected


def _axes(sizes: Sequence[int], words: OperandWords) -> list[Axis]:
    """Axes of these sizes, the last of which is that of elements, and of any strides."""
    strides = [words.batch, words.head, words.row, words.element][-len(sizes) :]
    return [Axis(size, 0, word) for size, word in zip(sizes, strides, strict=True)]


def _page_layout(rows: Rows, part: Array | None = None) -> tuple[int, ...]:
    """The bytes and the keys of a page; () if rows are not in pages."""
    if not isinstance(rows, StoredRows) or rows.page_table is None:
        return ()
    return (rows.values if part is None else part).strides[0], rows.page_size


def _parts(name: str, rows: Rows) -> list[Operand]:
    """The page table and the scales of stored rows; see `qkv.backends.Prepared`."""
    expected: list[Operand] = []
    if not isinstance(rows, StoredRows):
        return expected
    if rows.page_table is not None:
        table, slot = (word_index(f"{name}_{part}", FIELDS) for part in ("table", "slot"))
        axes = [Axis(rows.shape[0], 0, slot)] if rows.ndim > 3 else []
        axes.append(Axis(-1, 0, slot, rows.page_size))
        expected.append(Operand(table, rows.page_table.dtype, axes))
    if rows.scales is not None:
        words, page_layout = OperandWords.of(f"{name}_scales"), _page_layout(rows, rows.scales)
        sizes = rows.scales.shape[1 if page_layout else 0 : -1]
        axes = _axes([*sizes, -1, 1], words)[:-1]
        expected.append(Operand(words.address, rows.scales.dtype, axes, *page_layout))
    return expected
