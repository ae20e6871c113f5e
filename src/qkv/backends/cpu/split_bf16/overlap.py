"""Steps of two blocks of queries beside each other: tiles are multiplied for one while vectors are
computed for the other.

The block that is met before another *waits*: its scores are finished, but not yet weighed. It waits
across blocks of keys too: K of the next one is split before, V after its values have been added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import WORD, Rows
from qkv.backends.cpu.emit.storage import ITEM_BYTES
from qkv.backends.cpu.forward.kernel import STATS
from qkv.backends.cpu.forward.score_blocks import Keys, Meeting, Met, ScoreKernel, Together, Values
from qkv.backends.cpu.products.bfloat16 import CHUNK
from qkv.backends.cpu.products.prefetch import RowsAhead, Stretch
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.scores import PartScores
from qkv.problem.spec import Spec


class OverlapKernel(ScoreKernel, Protocol):
    """What the overlapped steps ask of their kernel beside that."""

    spec: Spec
    dtypes: dict[str, str]
    factors: PartScores

    def field(self, arguments: Value, name: str) -> Value:
        """An integer of the argument block."""

    def real_field(self, arguments: Value, name: str) -> Value:
        """A number of the argument block."""

    def record(self, pointer: Value, names: tuple[str, ...]) -> list[Value]:
        """A row of a table of words."""


class PartMeeting(Meeting):
    """Scores of what has no parts are mended; of each step, what it may stand beside is said."""

    kernel: OverlapKernel

    def __init__(self, kernel: OverlapKernel, task: Together) -> None:
        super().__init__(kernel, task)
        self._waiting, self._values = (
            kernel.e.words(len(Met._fields)),
            kernel.e.words(len(Values._fields)),
        )
        self._ahead = RowsAhead.none(kernel.e, kernel.block_kv)
        self._nobody_waits()

    def begin(self) -> None:
        """Values that were left out are looked up among the rows, which are overwritten."""
        with self.e.builder.if_then(self._saved_values().sifted, likely=False):
            self.end()

    def meet(self, keys: Keys, values: Callable[[], Values]) -> None:
        e, b = self.e, self.e.builder
        is_split = e.words()
        e.store(e.index(0), is_split, WORD)
        self._look_ahead(keys)

        def one(met: Met) -> None:
            before = self._who_waits()
            some = b.icmp_signed(">=", before.block, e.index(0))
            saved = self._saved_values()

            def weigh_and_score() -> None:
                with b.if_then(some):
                    self.weigh(before, saved.sifted)
                self.score(keys, met)

            def add_and_finish() -> None:
                with b.if_then(some):
                    self.add(before, saved)
                self.finish(met)

            if self.kernel.spec.dropout:
                weigh_and_score()
            else:
                can = b.and_(some, self._can_weigh_beside(before, saved.sifted))
                e.choose(can, lambda: self._weigh_beside(before, keys, met), weigh_and_score)
            can = b.and_(some, self._can_add_beside())
            e.choose(can, lambda: self._add_beside(before, saved, met), add_and_finish)
            with b.if_then(b.icmp_signed("==", e.load(is_split, INT64, WORD), e.index(0))):
                self._save(self._values, values())
                e.store(e.index(1), is_split, WORD)
            self._save(self._waiting, met)

        self.each(keys, one)

    def _look_ahead(self, keys: Keys) -> None:
        """To the next block of keys."""
        e, task, kernel = self.e, self.task, self.kernel
        first, stretches = e.add(keys.start, keys.count), []
        for name, rows, dim in (
            ("key", task.key, task.head_dim), ("value", task.value, task.v_head_dim)
        ):  # fmt: skip
            start = e.at(rows.pointer, e.mul(first, rows.row))
            stretches.append(Stretch(start, rows.row, e.mul(dim, ITEM_BYTES[kernel.dtypes[name]])))
        kv_len = kernel.field(task.arguments, "kv_len")
        self._ahead.plan(stretches, e.below(first, kv_len))

    def end(self) -> None:
        e, before, values = self.e, self._who_waits(), self._saved_values()
        with e.builder.if_then(e.builder.icmp_signed(">=", before.block, e.index(0))):
            self.weigh(before, values.sifted)
            self.add(before, values)
            self._nobody_waits()

    def score(self, keys: Keys, met: Met) -> None:
        super().score(keys, met)
        self._mend(met)

    def _can_weigh_beside(self, before: Met, sifted: Value) -> Value:
        """Whether there are steps enough, and no weight is marked."""
        b = self.e.builder
        enough = self.e.below(CHUNK, self.task.head_dim)
        return b.and_(enough, b.not_(b.and_(sifted, self.is_finished(before))))

    def _weigh_beside(self, before: Met, keys: Keys, met: Met) -> None:
        e, b, task = self.e, self.e.builder, self.task
        scale = self.kernel.real_field(task.arguments, "scale")
        scale = b.select(self.is_finished(before), ir.Constant(e.real, 1.0), scale)
        rows, packed = self.kernel.from_key(keys, met.start), task.block(met.block).packed
        args = [rows, packed, self.scores, task.block(before.block).stats, scale]
        args += [keys.row, before.count, met.count, self.pairs, self._ahead.place]
        b.call(self.parts["weigh_beside"], args)
        self._mend(met)

    def _can_add_beside(self) -> Value:
        """Whether there are steps enough."""
        return self.e.below(CHUNK, self.task.v_head_dim)

    def _add_beside(self, before: Met, values: Values, met: Met) -> None:
        task, block = self.task, self.task.block(met.block)
        args = [*self.adding(before), task.arguments, self.scores, block.stats, task.turned]
        args += [task.batch, task.head, block.row, met.first, met.count]

        def call(name: str) -> None:
            self.e.builder.call(self.parts[name], args)

        self.by_kind(
            met,
            full=lambda: call("add_beside_full"),
            partial=lambda: call("add_beside_partial"),
        )
        self.add_sifted(before, values)

    def _mend(self, met: Met) -> None:
        """Scores of rows without parts."""
        e, task, kernel = self.e, self.task, self.kernel
        block, (pointer, row, element) = task.block(met.block), task.key
        odd = e.at(self.scores, -non_finite.ODD_BYTES)
        lanes = e.at(block.stats, STATS * kernel.width)
        first = e.sub(met.first, met.start)
        key = Rows(e.at(pointer, e.mul(first, row)), row, element)
        scores = e.at(self.scores, e.sub(e.index(0), e.mul(met.start, kernel.width)))
        where = (block.row, met.start, e.add(met.start, met.count), odd, lanes, scores)
        kernel.factors.mend(task.arguments, self.parts, key, task.query, *where)

    # What is known from one block of keys to the next

    def _nobody_waits(self) -> None:
        e = self.e
        e.store(e.index(-1), self._waiting, WORD)
        e.store(e.index(0), e.at(self._values, WORD * Values._fields.index("sifted")), WORD)

    def _save(self, place: Value, values: Met | Values) -> None:
        e, b = self.e, self.e.builder
        for n, value in enumerate(values):
            word = value
            if value.type == POINTER:
                word = b.ptrtoint(value, INT64)
            elif value.type == BIT:
                word = b.zext(value, INT64)
            e.store(word, e.at(place, WORD * n), WORD)

    def _who_waits(self) -> Met:
        e, b = self.e, self.e.builder
        block, partial, *keys = self.kernel.record(self._waiting, Met._fields)
        return Met(block, b.icmp_signed("!=", partial, e.index(0)), *keys)

    def _saved_values(self) -> Values:
        e, b = self.e, self.e.builder
        rows, row, sifted = self.kernel.record(self._values, Values._fields)
        return Values(e.pointer(rows), row, b.icmp_signed("!=", sifted, e.index(0)))
