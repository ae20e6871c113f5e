"""The replay kernels: the forward pass up to its scores, once more, to see what the weights were.

What the forward pass leaves of a row i is lse[i]. One more pass over the scores, with the same
blocks and the same products but no values, answers one *question* about the weights

    w[i, j] = exp((s[i, j] - a[i]) - b[i])          a = lse and b = 0, or a = m and b = log(l)

- sums: m[i] and log(l[i]), the maximum of a row and the logarithm of its sum over that, for rows
  whose lse is so large that its rounding would show in the weights;
- top: the k best scores of each row and their keys. Each lane has a sorted list of k scores. The
  keys of a block are looked at one by one only if its best score enters some list, and a score is
  inserted only if it is above the last of some list. Keys come in rising order, so that of equal
  scores the one of the lower key stays;
- received: sum_i w[i, j] of each key j. A task is a range of keys, with the blocks of queries
  in rising order; each lane has a compensated sum for each key, and the lanes are added at the
  end, so that the bits depend on the number of queries alone.

Scores are in base e here, with mods or without. Sources: as `forward`; Kahan, "Further remarks on
reducing truncation errors" (1965).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import INT64, Value
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import STATS, StatsRow
from qkv.backends.cpu.forward.softmax import finish_scores, softmax_function
from qkv.backends.cpu.products.query_lanes import vectors_at
from qkv.backends.cpu.replay.layout import ReplayKey
from qkv.backends.cpu.replay.reduction import (
    QueryBlock,
    Reduction,
    areas_of,
    emit_range_tasks,
    emit_row_tasks,
    replay_frame,
)


def emit_replay(key: ReplayKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    frame = replay_frame(key)
    if key.question == "received":
        emit_range_tasks(ReceivedReduction(frame))
    else:
        emit_row_tasks((TopReduction if key.question == "top" else SumsReduction)(frame))
    return str(frame.e.module)


class SumsReduction(Reduction):
    """m and log(l) of each row, by the softmax of the forward pass; its weights are not used."""

    def keys_function(self, name: str, masked: bool) -> Value:
        return softmax_function(self.frame, name, masked)

    def state_bytes(self, arguments: Value, row: int) -> Value:
        return self.e.index(STATS * row)

    def begin(self, block: QueryBlock) -> None:
        e, width = self.e, block.vectors * self.e.vector_bytes
        for j in range(block.vectors):
            for row in StatsRow:
                first = e.const(-math.inf if row == StatsRow.ROW_MAX else 0.0)
                e.store_vector(first, e.at(self.state(block, j), row * width))

    def write_rows(self, arguments: Value, state: Value, width: Value, rows: list[Value]) -> None:
        e = self.e
        row_max, row_sum = (
            e.load_vector(e.at(state, e.mul(width, row)))
            for row in (StatsRow.ROW_MAX, StatsRow.ROW_SUM)
        )
        for name, vector in (("row_max", row_max), ("log_sum", vector_math.log(e, row_sum))):
            start = self.frame.pointer_field(arguments, name)
            for i, row in enumerate(rows):
                e.store(e.extract(vector, i), e.at(start, e.mul(row, e.real_bytes)), e.real_bytes)


class TopReduction(Reduction):
    """The k best scores of each row, falling, and their keys.

    The list of a vector of rows has k + 1 places: an infinite score that nothing passes, then the
    k best. Its keys follow in the same order.
    """

    def state_bytes(self, arguments: Value, row: int) -> Value:
        e = self.e
        return e.mul(e.add(self.frame.field(arguments, "k"), 1), 2 * row)

    def begin(self, block: QueryBlock) -> None:
        e = self.e
        places = e.add(self.frame.field(block.arguments, "k"), 1)
        width = block.vectors * e.vector_bytes

        def clear_entry(i: Value, _: list[Value]) -> None:
            for j in range(block.vectors):
                score = e.at(self.state(block, j), e.mul(i, width))
                e.store_vector(e.const(-math.inf), score)
                nothing = e.as_floats(e.const_bits(-1))
                e.store_vector(nothing, e.at(score, e.mul(places, width)))

        e.loop(0, places, 1, [], clear_entry)
        for j in range(block.vectors):
            e.store_vector(e.const(math.inf), self.state(block, j))

    def keys_function(self, name: str, masked: bool) -> Value:
        e = self.e
        with self.frame.vector_function(name) as (function, at):
            b = e.builder
            places = self.frame.places_at(at)
            scale = e.splat(self.frame.real_field(at.arguments, "scale"))
            largest = finish_scores(self.frame, at, places, scale, masked)
            k = self.frame.field(at.arguments, "k")
            last = e.at(at.stats, e.mul(k, at.width))

            def insert_key(n: Value, _: list[Value]) -> None:
                score = e.load_vector(e.at(at.scores, e.mul(n, at.width)))
                better = b.fcmp_ordered(">", score, e.load_vector(last))
                with b.if_then(e.any_lane(better), likely=False):
                    self._insert(at.stats, at.width, k, score, e.add(at.kv_start, n), better)

            with b.if_then(e.any_lane(b.fcmp_ordered(">", largest, e.load_vector(last)))):
                e.loop(0, at.count, 1, [], insert_key)
        return function

    def _insert(
        self, best: Value, width: Value, k: Value, score: Value, kv_index: Value, better: Value
    ) -> None:
        """Insert a key into the list of the best; of equal scores, earlier keys come first."""
        e, b = self.e, self.e.builder
        keys = e.mul(e.add(k, 1), width)
        own = e.splat(b.trunc(kv_index, e.real_bits) if e.real_bits != INT64 else kv_index)

        def entry_addresses(i: Value) -> tuple[Value, Value]:
            at = e.at(best, e.mul(i, width))
            return at, e.at(at, keys)

        def load_entry(i: Value) -> list[Value]:
            score_at, key_at = entry_addresses(i)
            return [e.load_vector(score_at), e.load(key_at, e.bits, e.vector_bytes)]

        def move_entry(n: Value, carried: list[Value]) -> list[Value]:
            better, *here = carried
            i = e.sub(k, n)
            before = load_entry(e.sub(i, 1))
            passes = b.fcmp_ordered(">", score, before[0])
            places = entry_addresses(i)
            for at, new, above, old in zip(places, (score, own), before, here, strict=True):
                moved = b.select(better, b.select(passes, above, new), old)
                e.store(moved, at, e.vector_bytes)
            return [passes, *before]

        e.loop(0, k, 1, [better, *load_entry(k)], move_entry)

    def write_rows(self, arguments: Value, state: Value, width: Value, rows: list[Value]) -> None:
        e, b = self.e, self.e.builder
        k, best, indices = self.frame.words(arguments, "k", "best", "indices")
        starts = [e.mul(row, k) for row in rows]

        def write_entry(n: Value, _: list[Value]) -> None:
            at = e.at(state, e.mul(e.add(n, 1), width))
            scores = e.load_vector(at)
            keys = e.load(e.at(at, e.mul(e.add(k, 1), width)), e.bits, e.vector_bytes)
            for i, start in enumerate(starts):
                to, key = e.add(start, n), e.extract(keys, i)
                key = key if e.real_bits == INT64 else b.sext(key, INT64)
                score_at = e.at(e.pointer(best), e.mul(to, e.real_bytes))
                e.store(e.extract(scores, i), score_at, e.real_bytes)
                e.store(key, e.at(e.pointer(indices), e.mul(to, WORD)), WORD)

        e.loop(0, k, 1, [], write_entry)


def shift_address(frame: ForwardFrame, block: QueryBlock, vector: int) -> Value:
    """The address of a and b (see above) for one vector of rows."""
    e = frame.e
    num_heads, padded = frame.words(block.arguments, "num_heads", "padded_rows")
    start = e.mul(e.add(e.mul(block.batch, num_heads), block.head), padded)
    row = e.add(start, block.first_row, vector * e.lanes)
    return e.at(frame.pointer_field(block.arguments, "shift"), e.mul(row, 2 * e.real_bytes))


def weights_function(frame: ForwardFrame, name: str, masked: bool) -> Value:
    """Scores become weights; b = inf in rows of padding, whose weights are therefore 0."""
    e = frame.e
    with frame.vector_function(name) as (function, at):
        b = e.builder
        places = frame.places_at(at)
        scale = e.splat(frame.real_field(at.arguments, "scale"))
        finish_scores(frame, at, places, scale, masked)
        lse, log_sum = (
            e.load_vector(e.at(at.stats, i * e.vector_bytes), aligned=False) for i in (0, 1)
        )

        def weigh_key(k: Value, _: list[Value]) -> None:
            place = e.at(at.scores, e.mul(k, at.width))
            score = e.load_vector(place)
            weight = vector_math.exp_flushed(e, b.fsub(b.fsub(score, lse), log_sum))
            is_forbidden = b.fcmp_ordered("==", score, e.const(-math.inf))
            e.store_vector(b.select(is_forbidden, e.const(0.0), weight), place)

        e.loop(0, at.count, 1, [], weigh_key)
    return function


class ReceivedReduction(Reduction):
    """sum_i w[i, j] of each key j of a range.

    `totals` has two vectors for each key: the sums of the lanes, and what rounding took from them.
    """

    def keys_function(self, name: str, masked: bool) -> Value:
        return weights_function(self.frame, name, masked)

    def state(self, block: QueryBlock, vector: int) -> Value:
        return shift_address(self.frame, block, vector)

    def finish_key_block(self, block: QueryBlock, kv_start: Value, count: Value) -> None:
        """Add the weights of all vectors to the sums of their keys."""
        e, b = self.e, self.e.builder
        first = e.sub(kv_start, block.first_key)
        totals = e.at(block.areas.totals, e.mul(first, 2 * e.vector_bytes))

        def add_key(k: Value, _: list[Value]) -> None:
            weights = vectors_at(e, block.areas.scores, block.vectors, k)
            more = weights[0]
            for weight in weights[1:]:
                more = b.fadd(more, weight)
            at = e.at(totals, e.mul(k, 2 * e.vector_bytes))
            lost_at = e.at(at, e.vector_bytes)
            old = e.load_vector(at)
            more = b.fsub(more, e.load_vector(lost_at))
            new = b.fadd(old, more)
            e.store_vector(new, at)
            e.store_vector(b.fsub(b.fsub(new, old), more), lost_at)

        e.loop(0, count, 1, [], add_key)

    @contextmanager
    def range_context(self, arguments: Value, scratch: Value, keys: list[Value]) -> Iterator[None]:
        e = self.e
        batch, head, first_key, last_key, _, _ = keys
        count = e.sub(last_key, first_key)
        totals = areas_of(self, arguments, scratch).totals
        e.clear(totals, 0, e.mul(count, 2 * e.vector_bytes))
        yield
        num_heads, kv_len = self.frame.words(arguments, "num_heads", "kv_len")
        start = e.add(e.mul(e.add(e.mul(batch, num_heads), head), kv_len), first_key)
        received = self.frame.pointer_field(arguments, "received")

        def write_key(k: Value, _: list[Value]) -> None:
            at = e.at(totals, e.mul(k, 2 * e.vector_bytes))
            lost = e.load_vector(e.at(at, e.vector_bytes))
            lanes = e.builder.fsub(e.load_vector(at), lost)
            total = e.extract(e.reduce(lanes, e.builder.fadd), 0)
            e.store(total, e.at(received, e.mul(e.add(start, k), e.real_bytes)), e.real_bytes)

        e.loop(0, count, 1, [], write_key)
