"""Decoding steps of any length: prepared once for any number of keys.

Nothing about a step is worked out in Python. A call writes addresses, strides and lengths into an
argument block, and the kernel finds out which keys it reads. What code depends on, above all how
wide integers are, is found once for all lengths and shifts up to `LONGEST`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Prepared, PreparedSteps
from qkv.backends.cpu.decode.rows import FIELDS
from qkv.backends.cpu.emit.argument_block import ArgumentBlock
from qkv.backends.cpu.emit.frame import WORD
from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.passes.arguments import word_index
from qkv.backends.cpu.passes.decode import DecodeArguments, DecodePass
from qkv.backends.cpu.passes.scratch import (
    NO_RESULTS,
    Pool,
    return_scratch,
    take_scratch,
)
from qkv.backends.cpu.prepared.any_length import LONGEST, AnyLengthForm, shift_tables
from qkv.backends.cpu.prepared.call import Attend, Kernel
from qkv.backends.cpu.prepared.decode import KEY, LSE, OUT, QUERY, RESULT_WORDS, VALUE
from qkv.backends.cpu.prepared.placeholders import without_values
from qkv.backends.cpu.prepared.stages import RotateSteps, ShareWithSinks
from qkv.backends.cpu.python_calls.filled_block import Axis, FilledBlock, Operand
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import plain

Array = NDArray[Any]
IfAlike: TypeAlias = Callable[[Array, Array, Array, bool], Any]

_KV_LEN, _Q_SHIFT = (word_index(name, FIELDS) for name in ("kv_len", "q_shift"))
STEP_WORDS = {"kv_len": _KV_LEN, "q_shift": _Q_SHIFT, "longest": LONGEST}
"""What compiled code is told of steps."""


class StepsOfAnyLength:
    """The passes of few queries for any number of keys and any position of the queries.

    A block of words is prepared once. A step writes into it where its operands lie, how many keys
    there are and the position of the queries; all steps cost the same. `rotate` is told arrays.
    """

    def __init__(
        self,
        problem: Problem,
        form: AnyLengthForm,
        arrays: tuple[Array, ...],
        rotate: RotateSteps | None,
    ) -> None:
        shifts = shift_tables(problem)
        self._at_end = problem.operands.positions.align == "end"
        self._sinks = None if problem.operands.sinks is None else ShareWithSinks(problem)
        problem, _ = without_values(problem, arrays)
        spec = problem.spec
        self._pass = DecodePass(problem, int_bits=form.int_bits)
        self._template = template = DecodeArguments(problem, NO_RESULTS)
        self._batch_shape = spec.batch_shape
        self._problem, self._rotate, self._read = problem, rotate, form.words
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        self._out = shape, np.dtype(spec.dtype)
        self._lse = shape[:-1], spec.compute_dtype
        self._ndim = problem.operands.query.ndim
        self._shifts = [template.word_of_table(name) for name in shifts]
        self._blocks = Pool(self._new_block)

    def prepared(self) -> Prepared:
        """The ways to run them; arrays of more than four dimensions are told with strides alone."""
        if self._ndim > 4:
            return Prepared(self.call)
        if self._rotate is not None:
            reads = None if self._read else self._if_alike_rotated(self._rotate)
            return Prepared(self.call, if_alike=reads)
        operands, words = self._any_operands(), {**RESULT_WORDS, **STEP_WORDS}
        # Sinks read an output that is not rounded.
        out = self._out if self._sinks is None else (self._out[0], self._lse[1])
        job = self._pass.brief_job()

        def attend(**own: int) -> Attend:
            kernel = Kernel(self._new_block, self._run, operands, {**words, **own}, job=job)
            return Attend(kernel, out, self._lse)

        self._told = attend(arrays=len(self._read))
        steps = PreparedSteps(self._told.brief_keys, self.step, self.of_length)
        if self._read:
            return Prepared(self.call, steps=steps)
        if_alike: IfAlike = attend(**self._alignment()).if_alike
        if self._sinks is not None:
            if_alike = self._if_alike_with_sinks(self._sinks, if_alike)
        return Prepared(self.call, if_alike=if_alike, steps=steps)

    def _if_alike_rotated(self, rotate: RotateSteps) -> IfAlike:
        """`Prepared.if_alike` of arrays that are rotated first."""
        operands = [*self._any_operands(rotate.arrays), Operand(OUT), Operand(LSE)]
        words = {**STEP_WORDS, **self._alignment()}
        pool = Pool(lambda: FilledBlock.if_possible(self._new_block(), operands, words))

        def if_alike(query: Array, key: Array, value: Array, rows: bool) -> Any:
            own = pool.take()
            if own is None or own.read is None:
                return None
            kv_len, q_shift = own.read(query, key, value, query), own.block.words[_Q_SHIFT]
            pool.give_back(own)
            return self.call(query, key, value, rows, (), q_shift) if kv_len > 0 else None

        return if_alike

    def _if_alike_with_sinks(self, sinks: ShareWithSinks, over_keys: IfAlike) -> IfAlike:
        """`Prepared.if_alike`, given that over the keys alone."""
        at, is_rounded = quick_address_of, self._out[1] != self._lse[1]

        def if_alike(query: Array, key: Array, value: Array, rows: bool) -> Any:
            results = over_keys(query, key, value, True)
            if results is None:
                return None
            keys_out, lse, _, _ = results
            out = np.empty(*self._out) if is_rounded else keys_out
            sinks(at(keys_out), at(lse), 0, at(out), results)
            return out, lse, None, None

        return if_alike

    def _alignment(self) -> dict[str, int]:
        """What compiled code is told of where queries stand."""
        return {"q_len": self._problem.spec.q_len, "at_end": int(self._at_end)}

    def call(
        self,
        query: Array,
        key: Array,
        value: Array,
        rows: bool,
        arrays: Sequence[Array] = (),
        q_shift: int = 0,
    ) -> tuple[Array, Array | None, None, None] | None:
        """See `qkv.backends.Prepared`."""
        scratch = None
        if self._rotate is not None:
            query, key, scratch = self._rotate(query, key, q_shift)
        at, out = quick_address_of, np.empty(*self._out)
        lse, kv_len = np.empty(*self._lse) if rows else None, key.shape[-2]
        block = self._blocks.take()
        words = block.words
        strides = query.strides, key.strides, value.strides
        tables = self._fill_words(words, kv_len, q_shift, strides, arrays)
        words[QUERY.address], words[KEY.address], words[VALUE.address] = map(
            at, (query, key, value)
        )
        held = query, key, value, out, lse, arrays, tables

        def attend(keys_out: int, keys_lse: int) -> bool:
            words[OUT], words[LSE] = keys_out, keys_lse
            return self._run(block, kv_len, held)

        at_lse = 0 if lse is None else at(lse)
        done = tables is not None and self._with_sinks(attend, at(out), at_lse, held)
        self._blocks.give_back(block)
        if scratch is not None:
            return_scratch(scratch)
        return (out, lse, None, None) if done else None

    def step(
        self,
        kv_len: int,
        out: int,
        lse: int,
        q_shift: int,
        operands: tuple[Any, ...],
        keep_alive: Any,
        between_products: bool = False,
    ) -> bool:
        """See `qkv.backends.PreparedSteps`."""
        no_sinks = self._sinks is None
        if no_sinks and kv_len <= self._told.brief_keys:
            return self._told.brief_step(out, lse, q_shift, *operands)

        def run(block: ArgumentBlock) -> bool:
            share = self._pass.share(kv_len, between_products=between_products)
            return self._pass.run(block, share, keep_alive)

        if no_sinks:
            return self._told.step(kv_len, (out, lse, q_shift, *operands), run)

        def attend(keys_out: int, keys_lse: int) -> bool:
            return self._told.step(kv_len, (keys_out, keys_lse, q_shift, *operands), run)

        return self._with_sinks(attend, out, lse, keep_alive)

    def of_length(
        self, kv_len: int, q_shift: int, strides: Sequence[Sequence[int]]
    ) -> Prepared | None:
        """See `qkv.backends.PreparedSteps`."""
        if self._read or self._sinks is not None:
            return None

        def new_block() -> ArgumentBlock:
            block = self._new_block()
            self._fill_words(block.words, kv_len, q_shift, strides, ())
            return block

        def run(block: ArgumentBlock, _: int, keep_alive: Any) -> bool:
            return self._run(block, kv_len, keep_alive)

        job = self._pass.brief_job(kv_len)
        kernel = Kernel(new_block, run, self._any_operands(), RESULT_WORDS, job=job)
        attend = Attend(kernel, self._out, self._lse)
        return Prepared(self.call, run=attend, brief=attend.brief if attend.is_brief else None)

    def _run(self, block: ArgumentBlock, kv_len: int, keep_alive: Any) -> bool:
        """Run a block that was filled; whether the output is finite."""
        return self._pass.run(block, self._pass.share(kv_len), keep_alive)

    def _with_sinks(
        self, attend: Callable[[int, int], bool], out: int, lse: int, keep_alive: Any
    ) -> bool:
        sinks = self._sinks
        if sinks is None:
            return attend(out, lse)
        scratch = take_scratch(sinks.bytes)
        keys_out, keys_lse = sinks.places(out, lse, 0, scratch.address)
        done = attend(keys_out, keys_lse)
        if done:
            sinks(keys_out, keys_lse, 0, out, (keep_alive, scratch))
        return_scratch(scratch)
        return done

    def _any_operands(self, unrotated: Sequence[Array] | None = None) -> list[Operand]:
        """Operands and arrays of any number of keys and any strides."""
        operands = self._problem.operands
        query, key = unrotated or (operands.query, plain(operands.key))
        given = query, key, plain(operands.value)
        expected = []
        for words, array in zip((QUERY, KEY, VALUE), given, strict=True):
            strides = [words.batch, words.head, words.row, words.element][-array.ndim :]
            sizes = list(array.shape)
            if words is not QUERY:
                sizes[-2] = -1
            axes = [Axis(size, 0, word) for size, word in zip(sizes, strides, strict=True)]
            expected.append(Operand(words.address, array.dtype, axes))
        return expected + [words.operand for words in self._read]

    def _fill_words(
        self,
        words: memoryview,
        kv_len: int,
        q_shift: int,
        strides: Sequence[Sequence[int]],
        arrays: Sequence[Array],
    ) -> tuple[Array | None, ...] | None:
        """Write everything of a step but the addresses of its operands.

        The result must be kept alive; None if something is not as it was prepared for.
        """
        of_query, of_key, of_value = strides
        if (
            not 0 < kv_len <= LONGEST
            or not -LONGEST <= q_shift <= LONGEST
            or not self._ndim == len(of_query) == len(of_key) == len(of_value)
            or len(arrays) != len(self._read)
        ):
            return None
        for place, array in zip(self._read, arrays, strict=True):
            if not place.write(words, array, kv_len):
                return None
        words[_KV_LEN] = kv_len
        words[_Q_SHIFT] = q_shift
        batch_shape = self._batch_shape
        return (
            QUERY.write(words, batch_shape, of_query),
            KEY.write(words, batch_shape, of_key),
            VALUE.write(words, batch_shape, of_value),
        )

    def _new_block(self) -> ArgumentBlock:
        """A block whose expressions read the shift from one of its own words."""
        block = ArgumentBlock(self._template.copy())
        for word in self._shifts:
            block.words[word] = block.address + WORD * _Q_SHIFT
        return block
