"""Blocks on the boundary of a mask: each vector of queries computes only the keys that it may see.

Where the boundary of a mask, such as a causal one, crosses a block, some vectors of queries see
keys that others do not. Which they see is found by evaluating the mask, before anything is
multiplied. The keys that are left out would have had a weight of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.expressions.vector_code import Expressions
from qkv.backends.cpu.emit.forbidden_pairs import FORBIDDEN_WEIGHT
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.query_block import QueryBlock
from qkv.backends.cpu.products.query_lanes import SumOrder, dot_rows, store_vectors
from qkv.problem.language.expressions import Node

STEP = 16
"""Ranges of keys are rounded to multiples of this number, which is how many weights are added in
one chain."""
_NARROW = 7, 8
"""Vectors are computed separately only if this saves more than 1/8 of the products."""

Range = tuple[Value, Value]


def write_range(
    e: Emitter, places: Expressions, mask: Node, kv_start: Value, count: Value, key_range: Value
) -> None:
    """Write the range of keys of a block that one vector of queries may see, in whole steps.

    The mask is evaluated from both ends of the block until it allows a pair.
    """
    b = e.builder
    places.hoist(mask)

    def is_seen(k: Value) -> Value:
        inner = places.at_key(e.add(kv_start, k), e.const(0.0))
        return e.any_lane(inner.condition(mask))

    last = e.sub(count, 1)
    unseen_before = e.find(count, is_seen)
    unseen_after = e.find(e.sub(count, unseen_before), lambda k: is_seen(e.sub(last, k)))
    stop = e.round_down(e.add(e.sub(count, unseen_after), STEP - 1), STEP)
    bounds = e.round_down(unseen_before, STEP), e.least(stop, count)
    is_empty = b.icmp_signed("==", unseen_before, count)
    for i, (bound, empty_bound) in enumerate(zip(bounds, (count, e.index(0)), strict=True)):
        e.store(b.select(is_empty, empty_bound, bound), e.at(key_range, WORD * i), WORD)


def read_range(e: Emitter, key_range: Value) -> Range:
    start, stop = (e.load(e.at(key_range, WORD * i), INT64, WORD) for i in range(2))
    return start, stop


def are_narrow(e: Emitter, ranges: Sequence[Range], keys: Value) -> Value:
    """Whether vectors see so few of a block's keys that each is computed with its own range."""
    own = [e.larger_of(e.sub(stop, start), 0) for start, stop in ranges]
    part, whole = _NARROW
    return e.below(e.mul(e.add(*own), whole), e.mul(keys, part * len(ranges)))


def for_each_step(
    e: Emitter,
    ranges: Sequence[Range],
    count: Value,
    body: Callable[[Value, Value, Value, Value], None],
) -> None:
    """`body(first, stop, k, keys)` for each step of `keys` keys from k on.

    The vectors from `first` to `stop` are all between the first and the last one that may see any
    key of the step. If none does, `stop` is not above `first`.
    """
    b = e.builder

    def visit_step(k: Value, _: list[Value]) -> None:
        first, last = e.index(len(ranges)), e.index(0)
        for j, (start, stop) in enumerate(ranges):
            seen = b.and_(b.icmp_signed("<=", start, k), e.below(k, stop))
            first = b.select(seen, e.least(first, j), first)
            last = b.select(seen, e.index(j + 1), last)
        body(first, last, k, e.least(STEP, e.sub(count, k)))

    e.loop(0, count, STEP, [], visit_step)


class BoundaryBlocks:
    """Writes the functions for boundary blocks of one kernel, and calls to them."""

    def __init__(self, frame: ForwardFrame, functions: dict[str, Value]) -> None:
        self.e, vectors = frame.e, frame.shape.vectors
        self.range_function = _range_function(frame)
        self.scores = [functions[f"steps_of_{n}"] for n in range(1, vectors + 1)]
        self.values = functions["values_1"]

    def attend(self, block: QueryBlock, kv_start: Value, count: Value) -> None:
        """Attend to the keys of a block that its queries may see."""
        e, b = self.e, self.e.builder
        places = e.stack_words(2 * block.vectors)

        def place_of(j: Value | int) -> Value:
            return e.at(places, e.mul(j, 2 * WORD))

        def find_range(j: Value, _: list[Value]) -> None:
            row = e.add(block.first_row, e.mul(j, e.lanes))
            where = block.arguments, block.batch, block.head, row, kv_start, count, place_of(j)
            b.call(self.range_function, where)

        e.loop(0, block.vectors, 1, [], find_range)
        ranges = [read_range(e, place_of(j)) for j in range(block.vectors)]
        starts, stops = zip(*ranges, strict=True)
        start, stop = reduce(e.least, starts), reduce(e.larger_of, stops)
        keys, first = e.sub(stop, start), e.add(kv_start, start)

        def attend_together() -> None:
            block.attend_together("partial", first, keys)

        def attend_to_range() -> None:
            if block.vectors == 1:
                attend_together()
                return

            def within_keys(own: Range) -> Range:
                return e.sub(own[0], start), e.sub(own[1], start)

            def range_of(j: Value) -> Range:
                return within_keys(read_range(e, place_of(j)))

            inside = list(map(within_keys, ranges))
            e.choose(
                are_narrow(e, ranges, keys),
                lambda: self._attend_apart(block, first, keys, inside, range_of),
                attend_together,
            )

        with b.if_then(e.below(0, keys)):
            attend_to_range()

    def _attend_apart(
        self,
        block: QueryBlock,
        kv_start: Value,
        count: Value,
        ranges: list[Range],
        range_of: Callable[[Value], Range],
    ) -> None:
        """Attend to each vector's own range of keys, which `range_of` reads again."""
        e, b, area, width = self.e, self.e.builder, block.area, block.width
        key, key_row, value, value_row = block.key_and_value_rows(kv_start, count)

        def compute_scores(first: Value, last: Value, k: Value, keys: Value) -> None:
            offset, number = e.mul(first, e.vector_bytes), e.sub(last, first)
            out = e.at(area.weights, offset, e.mul(k, width))
            places = e.at(key, e.mul(k, key_row)), e.at(area.packed, offset), out
            for vectors, function in enumerate(self.scores, start=1):
                with b.if_then(b.icmp_signed("==", number, e.index(vectors))):
                    b.call(function, [*places, key_row, block.head_dim, keys])

        finite = block.call("all_finite", value, value_row, count, block.v_head_dim)

        def mark_forbidden(weights: Value, first: Value, last: Value) -> None:
            mark = e.const(FORBIDDEN_WEIGHT)
            e.loop(
                first, last, 1, [],
                lambda k, _: e.store_vector(mark, e.at(weights, e.mul(k, width))),
            )  # fmt: skip

        def attend_vector(j: Value, _: list[Value]) -> None:
            start, stop = range_of(j)
            offset, keys = e.mul(j, e.vector_bytes), e.sub(stop, start)
            all_weights, rescale = e.at(area.weights, offset), e.at(block.rescale, offset)
            weights, some = e.at(all_weights, e.mul(start, width)), e.below(0, keys)
            with b.if_then(some):
                first = e.add(kv_start, start)
                block.call_softmax("partial", j, weights, first, keys, b.not_(finite))
            with b.if_then(b.and_(some, finite)):
                rows, total = e.at(value, e.mul(start, value_row)), e.at(area.total, offset)
                sizes = value_row, block.v_head_dim, keys, width
                b.call(self.values, [rows, weights, rescale, total, *sizes])
            with b.if_then(b.not_(finite)):
                with b.if_then(b.not_(some)):
                    e.store_vector(e.const(1.0), rescale)
                mark_forbidden(all_weights, e.index(0), b.select(some, start, count))
                mark_forbidden(all_weights, b.select(some, stop, count), count)

        for_each_step(e, ranges, count, compute_scores)
        e.loop(0, block.vectors, 1, [], attend_vector)
        with b.if_then(b.not_(finite)):
            block.add_values("selected_values", value, value_row, count)


def _range_function(frame: ForwardFrame) -> Value:
    """A function `(arguments, batch, head, first_row, kv_start, count, range)`: `write_range`."""
    e = frame.e
    with e.function("seen", [POINTER, *[INT64] * 5, POINTER]) as (function, args):
        arguments, batch, head, first_row, kv_start, count, key_range = args
        places = frame.places(arguments, batch, head, first_row)
        write_range(e, places, frame.mask, kv_start, count, key_range)
    return function


def steps_function(frame: ForwardFrame, vectors: int) -> Value:
    """S[k, :] = K[k, :] . packed Q for `vectors` neighbouring vectors of queries."""
    e, width = frame.e, frame.shape.vectors * frame.e.vector_bytes
    with e.function(f"steps_of_{vectors}", [*[POINTER] * 3, *[INT64] * 3]) as (function, args):
        key, packed, out, key_row, head_dim, count = args

        def store_scores(k: Value, products: list[Value], _: list[Value]) -> list[Value]:
            first = e.at(out, e.mul(k, width))
            for i in range(len(products) // vectors):
                own = products[i * vectors : (i + 1) * vectors]
                store_vectors(e, e.at(first, i * width), own)
            return []

        keys = frame.shape.keys_of(vectors)
        sums = SumOrder(wide=frame.shape.wide, width=width)
        dot_rows(e, key, key_row, count, packed, vectors, head_dim, keys, [], store_scores, sums)
    return function
