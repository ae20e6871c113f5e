"""Two blocks of queries at a time: tiles multiply for one while vector units work for the other.

The first of two blocks waits: its scores are finished, but its weights are not yet computed. It
also waits from one block of keys to the next. K of the next block of keys is split before the
weights of the waiting block are computed, and V of the next block is split after the values of the
last were added.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import WORD, RowView
from qkv.backends.cpu.emit.storage import ITEM_BYTES
from qkv.backends.cpu.forward.frame import STATS
from qkv.backends.cpu.forward.score_blocks import (
    KeyBlock,
    PairOperands,
    QueryBlocks,
    ScoreBlock,
    ScoreBlocks,
    ValueBlock,
)
from qkv.backends.cpu.products.bfloat16 import CHUNK
from qkv.backends.cpu.products.prefetch import Prefetcher, RowRange
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.scores import SplitScores


class OverlappedScoreBlocks(ScoreBlocks):
    """The overlapped steps of `ScoreBlocks`. Scores of rows that cannot be split are recomputed."""

    def __init__(
        self, operands: PairOperands, split_scores: SplitScores, task: QueryBlocks
    ) -> None:
        super().__init__(operands, task)
        self.split_scores = split_scores
        self._waiting, self._values = (
            self.e.stack_words(len(fields)) for fields in (ScoreBlock._fields, ValueBlock._fields)
        )
        self._ahead = Prefetcher.idle(self.e, self.frame.block_kv)
        self._clear_waiting()

    def begin(self) -> None:
        """Finish a waiting block whose values were not all split: it reads the rows of V again."""
        with self.e.builder.if_then(self._saved_values().has_non_finite, likely=False):
            self.end()

    def add_keys(self, keys: KeyBlock, values: Callable[[], ValueBlock]) -> None:
        e, b = self.e, self.e.builder
        is_split = e.stack_words()
        e.store(e.index(0), is_split, WORD)
        self._prefetch_next_block(keys)

        def take_block(at: ScoreBlock) -> None:
            waiting = self._waiting_block()
            has_waiting = b.icmp_signed(">=", waiting.block, e.index(0))
            saved = self._saved_values()

            def weigh_and_score() -> None:
                with b.if_then(has_waiting):
                    self.compute_weights(waiting, saved.has_non_finite)
                self.compute_scores(keys, at)

            def add_and_finish() -> None:
                with b.if_then(has_waiting):
                    self.add_values(waiting, saved)
                self.finish_scores(at)

            if self.frame.spec.dropout:
                weigh_and_score()
            else:
                can = b.and_(has_waiting, self._can_overlap_weights(waiting, saved.has_non_finite))
                e.choose(can, lambda: self._overlap_weights(waiting, keys, at), weigh_and_score)
            can = b.and_(has_waiting, self._can_overlap_values())
            e.choose(can, lambda: self._overlap_values(waiting, saved, at), add_and_finish)
            with b.if_then(b.icmp_signed("==", e.load(is_split, INT64, WORD), e.index(0))):
                self._save(self._values, values())
                e.store(e.index(1), is_split, WORD)
            self._save(self._waiting, at)

        self.for_each_query_block(keys, take_block)

    def _prefetch_next_block(self, keys: KeyBlock) -> None:
        """Prefetch rows of the next block of keys."""
        e, task, frame = self.e, self.task, self.frame
        first, row_ranges = e.add(keys.start, keys.count), []
        for name, rows, dim in (
            ("key", task.key, task.head_dim), ("value", task.value, task.v_head_dim)
        ):  # fmt: skip
            start = e.at(rows.pointer, e.mul(first, rows.row))
            row_ranges.append(RowRange(start, rows.row, e.mul(dim, ITEM_BYTES[frame.dtypes[name]])))
        kv_len = frame.field(task.arguments, "kv_len")
        self._ahead.plan(row_ranges, e.below(first, kv_len))

    def end(self) -> None:
        e, waiting, values = self.e, self._waiting_block(), self._saved_values()
        with e.builder.if_then(e.builder.icmp_signed(">=", waiting.block, e.index(0))):
            self.compute_weights(waiting, values.has_non_finite)
            self.add_values(waiting, values)
            self._clear_waiting()

    def compute_scores(self, keys: KeyBlock, at: ScoreBlock) -> None:
        super().compute_scores(keys, at)
        self._recompute(at)

    def _can_overlap_weights(self, waiting: ScoreBlock, has_non_finite: Value) -> Value:
        """Whether the product has steps enough, and no forbidden weight must be marked by -0.0."""
        b = self.e.builder
        enough = self.e.below(CHUNK, self.task.head_dim)
        return b.and_(enough, b.not_(b.and_(has_non_finite, self.is_finished(waiting))))

    def _overlap_weights(self, waiting: ScoreBlock, keys: KeyBlock, at: ScoreBlock) -> None:
        e, b, task = self.e, self.e.builder, self.task
        scale = self.frame.real_field(task.arguments, "scale")
        scale = b.select(self.is_finished(waiting), ir.Constant(e.real, 1.0), scale)
        rows, packed = self.operands.keys_from(keys, at.start), task.block(at.block).packed
        args = [rows, packed, self.scores, task.block(waiting.block).stats, scale]
        args += [keys.row, waiting.count, at.count, self.pairs, self._ahead.place]
        b.call(self.functions["weights_overlapped"], args)
        self._recompute(at)

    def _can_overlap_values(self) -> Value:
        """Whether the product has steps enough."""
        return self.e.below(CHUNK, self.task.v_head_dim)

    def _overlap_values(self, waiting: ScoreBlock, values: ValueBlock, at: ScoreBlock) -> None:
        task, block = self.task, self.task.block(at.block)
        args = [
            *self.add_values_arguments(waiting),
            task.arguments,
            self.scores,
            block.stats,
            task.transposed,
        ]
        args += [task.batch, task.head, block.row, at.first, at.count]

        def call(name: str) -> None:
            self.e.builder.call(self.functions[name], args)

        self.choose_by_kind(
            at,
            full=lambda: call("add_overlapped_full"),
            partial=lambda: call("add_overlapped_partial"),
        )
        self.add_non_finite(waiting, values)

    def _recompute(self, at: ScoreBlock) -> None:
        """Recompute the scores of rows that cannot be split."""
        e, task = self.e, self.task
        block, (pointer, row, element) = task.block(at.block), task.key
        non_finite_rows = e.at(self.scores, -non_finite.NON_FINITE_BYTES)
        lanes = e.at(block.stats, STATS * self.operands.width)
        first = e.sub(at.first, at.start)
        key = RowView(e.at(pointer, e.mul(first, row)), row, element)
        scores = e.at(self.scores, e.sub(e.index(0), e.mul(at.start, self.operands.width)))
        keys = at.start, e.add(at.start, at.count)
        where = (block.row, keys, non_finite_rows, lanes, scores)
        self.split_scores.recompute(task.arguments, key, task.query, *where)

    # What is remembered from one block of keys to the next

    def _clear_waiting(self) -> None:
        e = self.e
        e.store(e.index(-1), self._waiting, WORD)
        e.store(
            e.index(0), e.at(self._values, WORD * ValueBlock._fields.index("has_non_finite")), WORD
        )

    def _save(self, place: Value, values: ScoreBlock | ValueBlock) -> None:
        e, b = self.e, self.e.builder
        for n, value in enumerate(values):
            word = value
            if value.type == POINTER:
                word = b.ptrtoint(value, INT64)
            elif value.type == BIT:
                word = b.zext(value, INT64)
            e.store(word, e.at(place, WORD * n), WORD)

    def _waiting_block(self) -> ScoreBlock:
        e, b = self.e, self.e.builder
        block, partial, *keys = self.frame.record(self._waiting, ScoreBlock._fields)
        return ScoreBlock(block, b.icmp_signed("!=", partial, e.index(0)), *keys)

    def _saved_values(self) -> ValueBlock:
        e, b = self.e, self.e.builder
        rows, row, has_non_finite = self.frame.record(self._values, ValueBlock._fields)
        return ValueBlock(e.pointer(rows), row, b.icmp_signed("!=", has_non_finite, e.index(0)))
