"""The passes of a prepared call over arrays of one form, each of which takes addresses.

    rotate      query and key, if they have a rotary embedding, into scratch memory
    attend      the kernel, whose argument block compiled code fills
    sinks       take their share of what the kernel has left

The kernel alone makes most calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.addresses import quick_address_of
from qkv.backends import Prepared, ResultForm
from qkv.backends.cpu.emit.argument_block import ArgumentBlock
from qkv.backends.cpu.passes.arguments import batch_stride
from qkv.backends.cpu.passes.scratch import Pool, Scratch, return_scratch, take_scratch
from qkv.backends.cpu.prepared.kernel import Attend, Kernel, expected_of
from qkv.backends.cpu.prepared.stages import Rotate, RotateSteps, ShareWithSinks
from qkv.backends.cpu.python_calls.filled_block import FilledBlock, Operand
from qkv.problem.spec import Problem

Array = NDArray[Any]

__all__ = ["PassesOfCall"]

_MOST_KEPT = 2**20
"""The most bytes of rotated rows and the like that a prepared call keeps for the next one. Larger
memory is given back for other calls to use."""
_NO_SCRATCH = Scratch(0)
_ADDRESSES = 1
"""The first word of addresses in a block that serves to ask for them."""


class PassesOfCall:
    """All passes of calls like one problem.

    Parameters
    ----------
    problem : Problem
        As it was checked.
    kernel : Kernel
        Of what is left once query and key have been rotated.
    results : sequence of ResultForm
    keeps : bool
        Whether the results have lse_rest, and the output before it is rounded.
    """

    def __init__(
        self, problem: Problem, kernel: Kernel, results: Sequence[ResultForm], *, keeps: bool
    ) -> None:
        spec, operands = problem.spec, problem.operands
        self._kernel, self._keeps = kernel, keeps
        self._asked = _asked_operands(problem, kernel)
        self._results = list(results)
        self._out, self._lse, *_ = [form[:2] for form in results]
        of_kernel = self._results
        if operands.sinks is not None:  # They read an output that is not rounded.
            of_kernel = [ResultForm(*self._out[:1], self._lse[1]), *self._results[1:]]
        self._attend = Attend(kernel, of_kernel)
        self._rotate: Rotate | None = None
        self._rotate_steps: RotateSteps | None = None
        if spec.rotation and kernel.is_step:
            self._rotate_steps = RotateSteps(problem)
        elif spec.rotation:
            self._rotate = Rotate.of(problem)
        self._sinks = None if operands.sinks is None else ShareWithSinks(problem, keeps=keeps)
        self._folds = kernel.is_step and operands.query.ndim > 4
        self._pool = Pool(self._new_memory)

    def prepared(self) -> Prepared:
        """The same as a record."""
        rotates, attend = bool(self._rotate or self._rotate_steps), self._attend
        is_alone = not (rotates or self._sinks or self._folds)
        if_alike: Callable[..., Any] | None = attend.if_alike
        if rotates:
            if_alike = self._if_alike_rotated
        elif self._sinks is not None:
            if_alike = self._if_alike_with_sinks
        return Prepared(
            attend.run if is_alone else self._run,
            self._results,
            attend.brief_keys if is_alone else 0,
            None if self._folds or len(self._results) > 2 else if_alike,
        )

    def _run(
        self,
        addresses: Sequence[int],
        keep_alive: Any = (),
        layouts: Sequence[Any] = (),
        q_shift: int | Array = 0,
        in_elements: bool = False,
        between_products: bool = False,
    ) -> bool:
        """See `qkv.backends.Prepared`."""
        if in_elements and self._rotate_steps is not None:
            layouts, in_elements = self._in_bytes(layouts), False
        if self._folds:
            folded = self._folded(layouts)
            if folded is None:
                return False
            layouts = folded
        own = self._pool.take()
        done = self._run_passes(
            own, addresses, keep_alive, layouts, q_shift, in_elements, between_products
        )
        self._give_back(own)
        return done

    def _run_passes(
        self,
        own: _Memory,
        addresses: Sequence[int],
        keep_alive: Any,
        layouts: Sequence[Any],
        q_shift: int | Array,
        in_elements: bool = False,
        between_products: bool = False,
    ) -> bool:
        rotate, sinks = self._rotate, self._sinks
        query, key, value, out, lse, *more = addresses
        if self._rotate_steps is not None:
            rotate = self._rotate_steps(layouts, q_shift)
            layouts = (*rotate.layouts, *layouts[4:])
        if not isinstance(q_shift, int):
            q_shift = 0  # The kernel reads positions of batch rows in an array, if it needs them.
        rotated_bytes = 0 if rotate is None else rotate.bytes
        at = own.room(rotated_bytes + (0 if sinks is None else sinks.bytes))
        if rotate is not None:
            query, key = rotate(query, key, at, keep_alive)
        rest = unrounded = 0
        keys_out, keys_lse = out, lse
        if sinks is not None:
            if self._keeps:
                rest = more[0]
                if len(self._results) > 3:  # The kernel itself does not round.
                    unrounded = more.pop(1)
            keys_out, keys_lse = sinks.places(out, lse, unrounded, at + rotated_bytes)
        done = self._attend.run(
            (query, key, value, keys_out, keys_lse, *more), (keep_alive, own.scratch),
            layouts, q_shift, in_elements, between_products,
        )  # fmt: skip
        if done and sinks is not None:
            sinks(keys_out, keys_lse, rest, out, (keep_alive, own.scratch))
        return done

    def _if_alike_with_sinks(
        self,
        query: Array,
        key: Array,
        value: Array,
        rows: bool,
        arrays: Sequence[Array] = (),
        q_shift: int | None = None,
    ) -> Sequence[Any] | None:
        """See `qkv.backends.Prepared`; sinks take their share of what the kernel leaves."""
        results = self._attend.if_alike(query, key, value, True, arrays, q_shift)
        if results is None:
            return None
        sinks, at = self._sinks, quick_address_of
        assert sinks is not None
        keys_out, lse = results
        out = keys_out if self._out[1] == self._lse[1] else np.empty(*self._out)
        sinks(at(keys_out), at(lse), 0, at(out), (results, out))
        return out, lse

    def _if_alike_rotated(
        self,
        query: Array,
        key: Array,
        value: Array,
        rows: bool,
        arrays: Sequence[Array] = (),
        q_shift: int | None = None,
    ) -> Sequence[Array | None] | None:
        """See `qkv.backends.Prepared`; query and key are rotated first."""
        results = np.empty(*self._out), np.empty(*self._lse) if rows else None
        read = query, key, value, *results, *arrays
        own = self._pool.take()
        if own.asks is None or not own.asks(q_shift, *read):
            self._give_back(own)
            return None
        count = len(read)
        addresses = own.words[_ADDRESSES : _ADDRESSES + count].tolist()
        layouts: list[Any] = []
        if self._kernel.is_step:
            for array in (query, key, value, *arrays):
                layouts += array.shape, array.strides
        position = own.words[_ADDRESSES + count + 1]
        done = self._run_passes(own, addresses, read, layouts, position)
        self._give_back(own)
        return results if done else None

    def _in_bytes(self, layouts: Sequence[Any]) -> list[Any]:
        """The layouts with strides in bytes, given those in elements."""
        expected = [*self._asked, *self._kernel.arrays]
        found: list[Any] = []
        for n, operand in enumerate(expected):
            assert operand.dtype is not None
            sizes, strides = layouts[2 * n : 2 * n + 2]
            found += sizes, tuple([operand.dtype.itemsize * stride for stride in strides])
        return found

    def _folded(self, layouts: Sequence[Any]) -> list[Any] | None:
        """The layouts with one axis in the place of all batch axes, None if there is no stride."""
        found = list(layouts)
        for n in range(0, 6, 2):
            (*lead, heads, length, dim), (*steps, head, row, element) = found[n : n + 2]
            batch = batch_stride(tuple(lead), steps)
            if batch is None:
                return None
            found[n : n + 2] = (math.prod(lead), heads, length, dim), (batch, head, row, element)
        return found

    def _give_back(self, own: _Memory) -> None:
        if own.scratch.size > _MOST_KEPT:
            return_scratch(own.scratch)
            own.scratch = _NO_SCRATCH
        self._pool.give_back(own)

    def _new_memory(self) -> _Memory:
        return _Memory(*self._asking_block())

    def _asking_block(self) -> tuple[memoryview, Callable[..., int] | None]:
        """A block for addresses, and a function that writes them if arrays are as expected."""
        kernel, count = self._kernel, 3 + len(self._results)
        asked = list(self._asked)
        asked += [Operand(_ADDRESSES + n) for n in range(3, count)]
        for n, operand in enumerate(kernel.arrays, start=count):
            asked.append(operand._replace(place=_ADDRESSES + n))
        kv_len = _ADDRESSES + len(asked)
        # Sizes and strides are written too, and read by nobody.
        unread = kv_len + 3
        for n, operand in enumerate(asked):
            axes = [axis._replace(place=unread if axis.place else 0) for axis in operand.axes]
            asked[n] = operand._replace(axes=axes)
        words = {**kernel.words, "not_finite": 0}
        words |= {"results": len(self._results), "arrays": len(kernel.arrays)}
        if kernel.is_step:
            words |= {"kv_len": kv_len, "q_shift": kv_len + 1}
        block = ArgumentBlock(np.zeros(unread + 1, np.int64))
        asking = FilledBlock.if_possible(block, asked, words, is_step=kernel.is_step)
        return block.words, asking and asking.read


class _Memory:
    """What one run of several passes needs.

    Attributes
    ----------
    words : memoryview
        Where `asks` writes addresses, the number of keys and the position of the first query.
    asks : callable or None
        Whether arrays are as expected.
    """

    def __init__(self, words: memoryview, asks: Callable[..., int] | None) -> None:
        self.words, self.asks = words, asks
        self.scratch = _NO_SCRATCH

    def room(self, size: int) -> int:
        """The address of so many bytes, for what one pass leaves to the next."""
        if self.scratch.size < size:
            # Steps of a few keys more find room in the same memory.
            self.scratch = take_scratch(size, size // 4)
        return self.scratch.address


def _asked_operands(problem: Problem, kernel: Kernel) -> list[Operand]:
    """Query, key and value before they are rotated, in the first words of addresses."""
    places = range(_ADDRESSES, _ADDRESSES + 3)
    if not kernel.is_step:
        return expected_of(problem, places)
    operands = problem.operands
    given = operands.query, operands.key, operands.value
    return [
        Operand(place, array.dtype, of_kernel.axes)
        for place, array, of_kernel in zip(places, given, kernel.operands, strict=True)
    ]
