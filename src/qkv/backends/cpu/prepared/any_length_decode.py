"""Decoding steps of any length: prepared once for any number of keys.

Nothing about a step is worked out in Python. A call writes addresses, strides and lengths into an
argument block, and the kernel finds out which keys it reads. What code depends on, above all how
wide integers are, is found once for all lengths and shifts up to `LONGEST`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Addresses
from qkv.backends.cpu.decode.rows import FIELDS
from qkv.backends.cpu.emit.frame import WORD
from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.passes.arguments import word_index
from qkv.backends.cpu.passes.decode import DecodeArguments, DecodePass, Share
from qkv.backends.cpu.passes.scratch import NO_RESULTS, ArgumentBlock
from qkv.backends.cpu.prepared.any_length import LONGEST, ArrayWords, any_length_form, shift_tables
from qkv.backends.cpu.prepared.decode import (
    KEY,
    LSE,
    OUT,
    QUERY,
    RESULT_WORDS,
    VALUE,
)
from qkv.backends.cpu.prepared.placeholders import without_values
from qkv.backends.cpu.prepared.repeated import RepeatedCall, brief_block
from qkv.backends.cpu.python_calls.filled_block import Axis, FilledBlock, Operand
from qkv.backends.cpu.python_calls.function import has_gil
from qkv.backends.cpu.rows.sinks import Sinks
from qkv.partial import Partial
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import plain

Array = NDArray[Any]

_KV_LEN, _Q_SHIFT = (word_index(name, FIELDS) for name in ("kv_len", "q_shift"))
STEP_WORDS = {"kv_len": _KV_LEN, "q_shift": _Q_SHIFT, "longest": LONGEST}
"""What compiled code is told of steps."""


class AnyLengthDecode:
    """The pass of few queries for any number of keys and any position of the queries.

    A block of words is prepared once. A step writes into it where its operands lie, how many keys
    there are and the position of the queries; all steps cost the same.
    """

    def __init__(
        self, problem: Problem, int_bits: int, arrays: tuple[Array, ...], read: list[ArrayWords]
    ) -> None:
        shifts = shift_tables(problem)
        problem, _ = without_values(problem, arrays)
        spec = problem.spec
        self._pass = DecodePass(problem, int_bits=int_bits)
        self._template = template = DecodeArguments(problem, NO_RESULTS)
        self._batch_shape = spec.batch_shape
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        self._out = shape, np.dtype(spec.dtype)
        self._partial_out = shape, self._pass.out_dtype
        self._lse = shape[:-1], spec.compute_dtype
        sinks = problem.operands.sinks
        self._sinks = None if sinks is None else Sinks(sinks, shape, *self._sinks_dtypes())
        self._ndim = problem.operands.query.ndim
        self._shifts = [template.word_of_table(name) for name in shifts]
        self._read = read
        self._blocks: list[ArgumentBlock] = []
        operands = problem.operands
        self._arrays = operands.query, operands.key, operands.value

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        rows: bool,
        arrays: Sequence[Array] = (),
        q_shift: int = 0,
    ) -> tuple[Array, Array | None, None, None] | None:
        at, out = quick_address_of, np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        found = self.run(
            (at(query), at(key), at(value), at(out), 0 if lse is None else at(lse), 0, ()),
            key.shape[-2],
            q_shift,
            (query.strides, key.strides, value.strides),
            (query, key, value, out, lse, arrays),
            [(at(array), array.shape, array.strides) for array in arrays],
        )
        return (out, lse, None, None) if found else None

    def run(
        self,
        addresses: Addresses,
        kv_len: int,
        q_shift: int,
        strides: tuple[Sequence[int], Sequence[int], Sequence[int]],
        keep_alive: Any,
        arrays: Sequence[tuple[int, Sequence[int], Sequence[int]]] = (),
    ) -> bool:
        """Read operands, and write out and lse, at these addresses.

        `keep_alive` are the objects that own the memory.

        False if something is not as it was prepared for (a length or shift beyond
        `LONGEST`, the form of an array), or if an output is not finite: the caller then makes a
        checked call.
        """
        block = self._take_block()
        tables = self._fill_words(block.words, kv_len, q_shift, strides, arrays)
        if tables is None:
            return False
        is_finite = self._run(block, self._pass.share(kv_len), addresses, (keep_alive, tables))
        self._blocks.append(block)
        return is_finite

    def repeated(self, at_end: bool = False) -> RepeatedCall | None:
        """See `qkv.backends.RepeatingCall`."""
        operands = self._any_operands()
        if operands is None or self._read or self._sinks is not None:
            return None
        of_call = {"q_len": operands[0].axes[-2].size, "at_end": int(at_end)}
        words = {**RESULT_WORDS, **STEP_WORDS, **of_call}

        def run(block: ArgumentBlock, kv_len: int, keep_alive: Any) -> bool:
            return self._pass.run(block, self._pass.share(kv_len), keep_alive)

        job = self._pass.brief_job()
        return RepeatedCall(self._new_block, operands, words, self._out, self._lse, job, run)

    def repeated_addresses(self, *, between_products: bool = False) -> RepeatedDecode | None:
        """See `qkv.backends.RepeatingSteps`."""
        operands = self._any_operands()
        return None if operands is None else RepeatedDecode(self, operands, between_products)

    def of_length(
        self, kv_len: int, q_shift: int, strides: Sequence[Sequence[int]]
    ) -> RepeatedCall | None:
        """See `qkv.backends.RepeatingSteps`."""
        operands = self._any_operands()
        if operands is None or self._read or self._sinks is not None:
            return None

        def new_block() -> ArgumentBlock:
            block = self._new_block()
            self._fill_words(block.words, kv_len, q_shift, strides, ())
            return block

        def run(block: ArgumentBlock, _: int, keep_alive: Any) -> bool:
            return self._pass.run(block, self._pass.share(kv_len), keep_alive)

        job = self._pass.brief_job(kv_len)
        results = self._out, self._lse
        return RepeatedCall(new_block, operands, RESULT_WORDS, *results, job, run)

    def _any_operands(self) -> list[Operand] | None:
        """Operands and arrays of any number of keys and any strides.

        None if they have more than one stride for all batch rows.
        """
        if self._ndim > 4:
            return None
        found = []
        for words, array in zip((QUERY, KEY, VALUE), map(plain, self._arrays), strict=True):
            strides = [words.batch, words.head, words.row, words.element][-array.ndim :]
            sizes = list(array.shape)
            if words is not QUERY:
                sizes[-2] = -1
            axes = [Axis(size, 0, word) for size, word in zip(sizes, strides, strict=True)]
            found.append(Operand(words.address, array.dtype, axes))
        return found + [words.operand for words in self._read]

    def _fill_words(
        self,
        words: memoryview,
        kv_len: int,
        q_shift: int,
        strides: Sequence[Sequence[int]],
        arrays: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    ) -> tuple[Array | None, ...] | None:
        """Write everything of a step but the addresses of its operands.

        The result must be kept alive; None if something is not as it was prepared for.
        """
        of_query, of_key, of_value = strides
        if (
            not 0 < kv_len <= LONGEST
            or not -LONGEST <= q_shift <= LONGEST
            or not self._ndim == len(of_query) == len(of_key) == len(of_value)
            or ((arrays or self._read) and not self._write_arrays(words, arrays, kv_len))
        ):
            return None
        words[_KV_LEN] = kv_len
        words[_Q_SHIFT] = q_shift
        batch_shape = self._batch_shape
        return (
            QUERY.write(words, batch_shape, of_query),
            KEY.write(words, batch_shape, of_key),
            VALUE.write(words, batch_shape, of_value),
        )

    def _run(
        self, block: ArgumentBlock, share: Share, addresses: Addresses, keep_alive: Any
    ) -> bool:
        """Run a block that was filled for operands of this form; whether the output is finite."""
        words = block.words
        words[QUERY.address], words[KEY.address], words[VALUE.address], out, lse, _, _ = addresses
        if self._sinks is None:
            words[OUT] = out
            words[LSE] = lse
            return self._pass.run(block, share, keep_alive)
        partial = self._new_partial()
        words[OUT] = quick_address_of(partial.out)
        words[LSE] = place = quick_address_of(partial.lse)
        if not self._pass.run(block, share, (keep_alive, partial)):
            return False
        self._sinks(words[OUT], place, 0, out, lse or place, partial)
        return True

    def _take_block(self) -> ArgumentBlock:
        try:
            return self._blocks.pop()
        except IndexError:
            return self._new_block()

    def _write_arrays(
        self,
        words: memoryview,
        arrays: Sequence[tuple[int, Sequence[int], Sequence[int]]],
        kv_len: int,
    ) -> bool:
        """Whether the arrays are like those that were prepared for."""
        return len(arrays) == len(self._read) and all(
            place.write(words, *array, kv_len)
            for place, array in zip(self._read, arrays, strict=True)
        )

    def _new_partial(self) -> Partial:
        """Arrays for what the kernel leaves before the sinks have taken their share."""
        return Partial(np.empty(*self._partial_out), np.empty(*self._lse))

    def _sinks_dtypes(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """The dtypes of what the kernel leaves, and of the output."""
        return self._partial_out[1], self._out[1]

    def _new_block(self) -> ArgumentBlock:
        """A block whose expressions read the shift from one of its own words."""
        block = ArgumentBlock(self._template.copy())
        for word in self._shifts:
            block.words[word] = block.address + WORD * _Q_SHIFT
        return block


class RepeatedDecode:
    """Steps whose sizes and strides compiled code reads; see `qkv.backends.RepeatedStep`."""

    def __init__(
        self, decode: AnyLengthDecode, operands: Sequence[Operand], between_products: bool
    ) -> None:
        self._decode, self._operands = decode, operands
        self._between_products = between_products
        self._words = {**RESULT_WORDS, **STEP_WORDS, "arrays": len(operands) - 3}
        self._free: list[FilledBlock] = []
        job = decode._pass.brief_job() if has_gil() else None
        self.brief_keys = 0 if job is None else job.most_keys
        if job is not None:
            self._brief = brief_block(job, decode._new_block(), operands, self._words)

    def __call__(
        self,
        kv_len: int,
        out: int,
        lse: int,
        q_shift: int,
        operands: tuple[Any, ...],
        keep_alive: Any,
    ) -> bool:
        """See `qkv.backends.RepeatedStep`."""
        decode = self._decode
        if decode._sinks is None:
            if kv_len <= self.brief_keys:
                done: bool = self._brief.step(out, lse, q_shift, *operands) < 0
                return done
            return self._run(kv_len, (out, lse, q_shift, *operands), keep_alive)
        partial = decode._new_partial()
        at_out, at_lse = quick_address_of(partial.out), quick_address_of(partial.lse)
        arguments = at_out, at_lse, q_shift, *operands
        if kv_len <= self.brief_keys:
            done = self._brief.step(*arguments) < 0
        else:
            done = self._run(kv_len, arguments, (keep_alive, partial))
        if done:
            decode._sinks(at_out, at_lse, 0, out, lse or at_lse, partial)
        return done

    def _run(self, kv_len: int, arguments: tuple[Any, ...], keep_alive: Any) -> bool:
        """A step that is not brief."""
        decode = self._decode
        try:
            own = self._free.pop()
        except IndexError:
            made = FilledBlock.later(decode._new_block(), self._operands, self._words)
            if made is None:
                return False
            own = made
        share = decode._pass.share(kv_len, between_products=self._between_products)
        done = own.step(*arguments) > 0 and decode._pass.run(own.block, share, keep_alive)
        self._free.append(own)
        return done


def any_length_decode(problem: Problem, arrays: tuple[Array, ...]) -> AnyLengthDecode | None:
    """Steps like this problem; None if something depends on how many keys there are."""
    form = any_length_form(problem, arrays)
    return None if form is None else AnyLengthDecode(problem, form.int_bits, arrays, form.words)
