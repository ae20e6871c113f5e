"""A prepared call: compiled passes over arrays of one form, each of which is told addresses.

    rotate      query and key, if they have a rotary embedding, into scratch memory
    attend      the kernel, whose argument block compiled code fills
    sinks       take their share of what the kernel has left

The kernel alone makes most calls; a short one is run by the code that fills its block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv.backends import Passes, Prepared
from qkv.backends.cpu.emit.argument_block import ArgumentBlock
from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.passes.scratch import (
    BriefJob,
    Pool,
    Scratch,
    scratch_of_brief_jobs,
)
from qkv.backends.cpu.prepared.stages import Rotate, ShareWithSinks
from qkv.backends.cpu.python_calls.filled_block import FilledBlock, Operand, operand_of
from qkv.backends.cpu.python_calls.function import has_gil
from qkv.partial import RowStatistics, share_with_sinks
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import plain

Array = NDArray[Any]
ArrayForm: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and dtype of an array to be made."""

__all__ = ["Attend", "Kernel", "PreparedCall", "expected_of"]

_ASKED = 1, 2, 3, 4, 5
"""Words of a block that serves to ask for addresses: of query, key, value, out and lse."""
_ASKED_WORDS = {"out": _ASKED[3], "lse": _ASKED[4]}
_MOST_KEPT = 2**20
"""The most bytes of rotated rows and the like that a prepared call keeps for the next one."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """The kernel of a prepared call.

    Attributes
    ----------
    new_block : callable
        Makes an argument block, complete but for the addresses that a call brings.
    run : callable (block, kv_len, keep_alive) -> bool
        Runs a block that was filled; whether the output is finite.
    operands : sequence of Operand
        What is expected of query, key and value.
    words : mapping of str to int
        Where the block has the results, and what else compiled code is told of the call.
    more : sequence of int
        The words of further addresses: of lse_rest, unrounded or statistics, then of arrays.
    job : BriefJob or None
        The same work as one job, if it is brief.
    """

    new_block: Callable[[], ArgumentBlock]
    run: Callable[[ArgumentBlock, int, Any], bool]
    operands: Sequence[Operand]
    words: Mapping[str, int]
    more: Sequence[int] = ()
    job: BriefJob | None = None


class Attend:
    """A kernel whose blocks compiled code fills; `out` and `lse` are shapes and dtypes."""

    def __init__(self, kernel: Kernel, out: ArrayForm, lse: ArrayForm) -> None:
        self._kernel, self._out, self._lse = kernel, out, lse
        written = [kernel.words["out"], kernel.words["lse"], *kernel.more]
        self._expected = [*kernel.operands, *map(Operand, written)]
        self._pool = Pool(self._new_filled_block)
        self._brief = self._brief_block() if kernel.job is not None and has_gil() else None
        self.is_brief = self._brief is not None
        self.brief_keys = 0 if kernel.job is None or not self.is_brief else kernel.job.most_keys
        """The most keys of a brief step, if their number is free."""

    def __call__(self, addresses: Sequence[int], keep_alive: Any) -> bool:
        """Compute at these addresses."""
        if self._brief is not None:
            return self._brief.write(*addresses) < 0
        own = self._pool.take()
        if own is None:
            return False
        done = own.write(*addresses) > 0 and self._kernel.run(own.block, 0, keep_alive)
        self._pool.give_back(own)
        return done

    def brief(self, query: int, key: int, value: int, out: int, lse: int) -> bool:
        """See `qkv.backends.Prepared`."""
        brief: Any = self._brief
        done: bool = brief.write(query, key, value, out, lse) < 0
        return done

    def if_alike(
        self, query: Array, key: Array, value: Array, rows: bool
    ) -> tuple[Array, Array | None, None, None] | None:
        """See `qkv.backends.Prepared`."""
        out = np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        arrays = (query, key, value, out) if lse is None else (query, key, value, out, lse)
        brief = self._brief
        if brief is not None and brief.read is not None:
            done = brief.read(*arrays)
            if done <= 0:  # A step over many keys is not brief.
                return (out, lse, None, None) if done else None
        own = self._pool.take()
        if own is None or own.read is None:
            return None
        kv_len = own.read(*arrays)
        is_done = kv_len > 0 and self._kernel.run(own.block, kv_len, arrays)
        self._pool.give_back(own)
        return (out, lse, None, None) if is_done else None

    def brief_step(self, *arguments: Any) -> bool:
        """A step over `brief_keys` keys or fewer."""
        brief: Any = self._brief
        is_done: bool = brief.step(*arguments) < 0
        return is_done

    def step(
        self, kv_len: int, arguments: Sequence[Any], run: Callable[[ArgumentBlock], bool]
    ) -> bool:
        """A step that is told addresses, sizes and strides; `run` if it is not brief."""
        if kv_len <= self.brief_keys:
            return self.brief_step(*arguments)
        own = self._pool.take()
        if own is None:
            return False
        done = own.step(*arguments) > 0 and run(own.block)
        self._pool.give_back(own)
        return bool(done)

    def _new_filled_block(self) -> FilledBlock | None:
        kernel = self._kernel
        return FilledBlock.if_possible(kernel.new_block(), self._expected, kernel.words)

    def _brief_block(self) -> FilledBlock:
        """A block whose functions run the job. One is enough, because the job holds the GIL."""
        job, block = self._kernel.job, self._kernel.new_block()
        assert job is not None
        scratch = scratch_of_brief_jobs(job.scratch_bytes)
        for word, offset in job.scratch:
            block.words[word] = scratch.address + offset
        block.keep_alive = (scratch,)
        of_job = {"job": job.address, "job_argument": job.argument, "job_keys": job.most_keys}
        return FilledBlock.of(block, self._expected, {**self._kernel.words, **of_job})


class _Memory(NamedTuple):
    """What one run of several passes needs.

    Attributes
    ----------
    scratch : Scratch
        For what one pass leaves to the next.
    addresses : memoryview
        Where query, key, value, out and lse lie.
    asks : callable or None
        Writes these addresses if query, key and value are as expected.
    """

    scratch: Scratch
    addresses: memoryview
    asks: Callable[..., int] | None


class PreparedCall:
    """All passes of a call of arrays like those of one problem."""

    def __init__(self, problem: Problem, passes: Passes, kernel: Kernel, has_rest: bool) -> None:
        spec, operands = problem.spec, problem.operands
        self._rotate = Rotate(problem) if spec.rotation else None
        self._sinks = None
        self._sinks_of_heads = None if operands.sinks is None else np.array(operands.sinks)
        if operands.sinks is not None:
            self._sinks = ShareWithSinks(problem, keeps=passes == "residuals")
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        self._out = shape, np.dtype(spec.dtype)
        self._lse = shape[:-1], spec.compute_dtype
        self._attend = Attend(kernel, self._out, self._lse)
        self._has_rest = has_rest
        self._more: list[ArrayForm] = []
        if passes == "statistics":
            self._more = [self._lse] * 3
        elif has_rest:
            self._more = [self._lse]
            if self._out[1] != self._lse[1]:
                self._more.append((shape, self._lse[1]))
        self._is_alone = self._rotate is None and self._sinks is None
        self._expected = expected_of(problem, _ASKED[:3])
        self._sinks_at = 0 if self._rotate is None else self._rotate.bytes
        self._bytes = self._sinks_at + (0 if self._sinks is None else self._sinks.bytes)
        self._pool = Pool(self._new_memory)

    def prepared(self, *, brings_arrays: bool) -> Prepared:
        """The ways to run it."""
        is_brief = self._is_alone and self._attend.is_brief and not brings_arrays
        if_alike = self._attend.if_alike if self._is_alone else self.if_alike
        return Prepared(
            self.call,
            run=None if self._more else self.run,
            brief=self._attend.brief if is_brief else None,
            if_alike=None if self._more or brings_arrays else if_alike,
        )

    def call(
        self,
        query: Array,
        key: Array,
        value: Array,
        rows: bool,
        arrays: Sequence[Array] = (),
        q_shift: int = 0,
    ) -> tuple[Array, Array | None, Any, Array | None] | None:
        """See `qkv.backends.Prepared`."""
        at, out = quick_address_of, np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        more = [np.empty(*form) for form in self._more]
        at_lse = 0 if lse is None else at(lse)
        addresses = (at(query), at(key), at(value), at(out), at_lse, *map(at, (*more, *arrays)))
        if not self.run(addresses, (query, key, value, out, lse, more, arrays)):
            return None
        if self._has_rest:
            return out, lse, more[0], more[1] if len(more) > 1 else None
        if more:
            statistics = RowStatistics(*more)
            return out, lse, share_with_sinks(statistics, self._sinks_of_heads), None
        return out, lse, None, None

    def run(self, addresses: Sequence[int], keep_alive: Any) -> bool:
        """See `qkv.backends.Prepared`; lse is followed by lse_rest, unrounded or statistics."""
        if self._is_alone:
            return self._attend(addresses, keep_alive)
        own = self._pool.take()
        done = self._run_passes(own, addresses, keep_alive)
        self._give_back(own)
        return done

    def _run_passes(self, own: _Memory, addresses: Sequence[int], keep_alive: Any) -> bool:
        rotate, sinks, at = self._rotate, self._sinks, own.scratch.address
        query, key, value, out, lse, *more = addresses
        if rotate is not None:
            query, key = rotate(query, key, at, keep_alive)
        if sinks is None:
            return self._attend((query, key, value, out, lse, *more), keep_alive)
        rest = unrounded = 0
        if self._has_rest:
            rest = more[0]
            if len(self._more) > 1:  # The kernel itself does not round.
                unrounded = more.pop(1)
        keys_out, keys_lse = sinks.places(out, lse, unrounded, at + self._sinks_at)
        if not self._attend((query, key, value, keys_out, keys_lse, *more), keep_alive):
            return False
        sinks(keys_out, keys_lse, rest, out, keep_alive)
        return True

    def _give_back(self, own: _Memory) -> None:
        if own.scratch.size <= _MOST_KEPT:
            self._pool.give_back(own)

    def _new_memory(self) -> _Memory:
        block = ArgumentBlock(np.zeros(_ASKED[-1] + 1, np.int64))
        asking = FilledBlock.if_possible(block, self._expected, _ASKED_WORDS)
        return _Memory(Scratch(self._bytes), block.words[_ASKED[0] :], asking and asking.read)

    def if_alike(
        self, query: Array, key: Array, value: Array, rows: bool
    ) -> tuple[Array, Array | None, None, None] | None:
        """See `qkv.backends.Prepared`; there is more than one pass."""
        out = np.empty(*self._out)
        lse = np.empty(*self._lse) if rows else None
        arrays = (query, key, value, out) if lse is None else (query, key, value, out, lse)
        own = self._pool.take()
        if own.asks is None or not own.asks(*arrays):
            return None
        done = self._run_passes(own, own.addresses.tolist(), arrays)
        self._give_back(own)
        return (out, lse, None, None) if done else None


def expected_of(problem: Problem, places: Sequence[int]) -> list[Operand]:
    """Query, key and value of exactly these dtypes, shapes and strides, in these words."""
    operands = problem.operands
    given = operands.query, plain(operands.key), plain(operands.value)
    return list(map(operand_of, places, given))
