"""Products of rows and elements that cannot be split, computed one by one.

These are rows with numbers that are not finite or are huge, and elements that tiles would take for
0. Each row and each element is tested by itself, so that the bits of a row never depend on keys
that it may not see.
"""

from __future__ import annotations

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import BIT, INT32, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.emit.forbidden_pairs import is_allowed
from qkv.backends.cpu.emit.frame import RowView
from qkv.backends.cpu.products.bfloat16 import split_pairs
from qkv.backends.cpu.products.query_lanes import store_vectors, vectors_at
from qkv.backends.cpu.split_bf16.layout import FLOAT_BYTES
from qkv.backends.cpu.split_bf16.terms import TermSplitter


def recompute(of: TermSplitter, name: str, left_dtype: str, right_dtype: str) -> Value:
    """A function `(*left, *right, first, last, dim, sign, start, stop, non_finite_rows,
    lanes, products)`.

    Computes the products of rows that cannot be split one by one. `left` and `right` are
    `RowView`: left rows from `start` to `stop`, right ones from row `first` on, none beyond `last`.
    `non_finite_rows` is what `TermSplitter.split_rows` gave, and `lanes` what
    `TermSplitter.pack_rows` gave for each vector, a vector apart.
    """
    e = of.e
    rows = [POINTER, INT64, INT64]
    arguments = [*rows, *rows, *[INT64] * 3, e.real, *[INT64] * 2, *[POINTER] * 3]
    with e.function(name, arguments) as (function, args):
        left, right = RowView(*args[:3]), RowView(*args[3:6])
        first, last, dim, sign, start, stop, non_finite_rows, lanes, products = args[6:]
        b, block_q = e.builder, of.vectors * e.lanes

        def recompute_product(k: Value, lane: Value) -> None:
            row = e.least(e.add(first, lane), last)
            x_row = e.at(right.pointer, e.mul(row, right.row))
            y_row = e.at(left.pointer, e.mul(k, left.row))

            def add_vector(d: Value, total: list[Value]) -> list[Value]:
                x = _vector(e, e.at(x_row, e.mul(d, right.element)), right.element, right_dtype)
                y = _vector(e, e.at(y_row, e.mul(d, left.element)), left.element, left_dtype)
                return [e.fma(b.fmul(e.splat(sign), x), y, total[0])]

            def add_element(d: Value, total: list[Value]) -> list[Value]:
                x = storage.load(e, e.at(x_row, e.mul(d, right.element)), right_dtype)
                y = storage.load(e, e.at(y_row, e.mul(d, left.element)), left_dtype)
                return [e.fma(b.fmul(sign, x), y, total[0])]

            whole = e.round_down(dim, e.lanes)
            (sums,) = e.loop(0, whole, e.lanes, [e.const(0.0)], add_vector)
            total = e.extract(e.reduce(sums, b.fadd), 0)
            (product,) = e.loop(whole, dim, 1, [total], add_element)
            place = e.at(products, e.mul(k, of.width), e.mul(lane, FLOAT_BYTES))
            e.store(product, place, FLOAT_BYTES)

        def recompute_left_row(n: Value, _: list[Value]) -> None:
            k = e.load(e.at(non_finite_rows, e.mul(n, WORD)), INT64, WORD)
            in_range = b.and_(b.not_(e.below(k, start)), e.below(k, stop))
            with b.if_then(in_range):
                e.loop(0, block_q, 1, [], lambda lane, _: recompute_product(k, lane))

        def recompute_right_row(lane: Value, _: list[Value]) -> None:
            vector = b.sdiv(lane, e.index(e.lanes))
            word = e.load(e.at(lanes, e.mul(vector, e.vector_bytes)), INT64, WORD)
            mark = b.and_(b.lshr(word, e.sub(lane, e.mul(vector, e.lanes))), e.index(1))
            end = b.select(_is_nonzero(e, mark), stop, start)
            e.loop(start, end, 1, [], lambda k, _: recompute_product(k, lane))

        e.loop(1, e.add(e.load(non_finite_rows, INT64, WORD), 1), 1, [], recompute_left_row)
        e.loop(0, block_q, 1, [], recompute_right_row)
    return function


def _vector(e: Emitter, place: Value, stride: Value, dtype: str) -> Value:
    """Elements of a row, one in each lane, that lie `stride` bytes apart.

    Adjacent ones are loaded at once. The lanes are the same either way, and so are the bits of a
    sum, wherever a row lies.
    """
    b = e.builder
    is_adjacent = b.icmp_signed("==", stride, e.index(storage.ITEM_BYTES[dtype]))
    with b.if_else(is_adjacent) as (then, otherwise):
        with then:
            at_once = storage.load(e, place, dtype, e.lanes)
            after_adjacent = b.block
        with otherwise:

            def load_element(n: Value, carried: list[Value]) -> list[Value]:
                x = storage.load(e, e.at(place, e.mul(stride, n)), dtype)
                return [b.insert_element(carried[0], x, b.trunc(n, INT32))]

            (each,) = e.loop(0, e.lanes, 1, [e.const(0.0)], load_element)
            after_strided = b.block
    elements = b.phi(e.vector)
    elements.add_incoming(at_once, after_adjacent)
    elements.add_incoming(each, after_strided)
    return elements


def any_non_finite(of: TermSplitter, non_finite_rows: Value, lanes: Value) -> Value:
    """Whether there is anything to recompute."""
    e = of.e
    words = [non_finite_rows, *(e.at(lanes, j * e.vector_bytes) for j in range(of.vectors))]
    marks = ir.Constant(INT64, 0)
    for word in words:
        marks = e.builder.or_(marks, e.load(word, INT64, WORD))
    return _is_nonzero(e, marks)


def _is_nonzero(e: Emitter, word: Value) -> Value:
    return e.builder.icmp_signed("!=", word, e.index(0))


def add_non_finite(of: TermSplitter) -> Value:
    """A function `(rows, row, weights, out, dim, count)` for what `split_columns` left out.

    A forbidden pair adds nothing: 0 * inf would be NaN. Its first term marks it.
    """
    e = of.e
    arguments = [POINTER, INT64, POINTER, POINTER, INT64, INT64]
    with e.function("add_non_finite", arguments) as (function, args):
        rows, row, weights, out, dim, count = args
        b = e.builder

        def add_key(k: Value, _: list[Value]) -> None:
            is_second = b.trunc(b.and_(k, e.index(1)), BIT)
            place = of.packed_row(weights, b.and_(k, e.index(-2)))
            weights_of_key: list[Value] = []
            for n in range(of.terms):
                pairs = vectors_at(e, e.at(place, n * of.term_bytes), of.vectors)
                halves = [split_pairs(e, pair) for pair in pairs]
                term = [b.select(is_second, second, first) for first, second in halves]
                weights_of_key = list(map(b.fadd, weights_of_key, term)) if weights_of_key else term
                if n == 0:
                    allowed = [is_allowed(e, x) for x in term]

            start_of_row = e.at(rows, e.mul(k, row))

            def add_element(d: Value, _: list[Value]) -> None:
                start = e.at(start_of_row, e.mul(d, FLOAT_BYTES))
                x = e.splat(e.load(start, e.real, FLOAT_BYTES))
                left_out = b.extract_element(of.cannot_be_split(x), ir.Constant(INT32, 0))
                with b.if_then(left_out, likely=False):
                    place = e.at(out, e.mul(d, of.width))
                    total = vectors_at(e, place, of.vectors)
                    store_vectors(e, place, [
                        b.select(may, e.fma(x, weight, old), old)
                        for may, weight, old in zip(allowed, weights_of_key, total, strict=True)
                    ])  # fmt: skip

            def add_elements(d: Value, _: list[Value]) -> None:
                """A vector of elements is tested at once: most have none that was left out."""
                left_out = of.cannot_be_split(of.load_elements(start_of_row, d, dim))
                with b.if_then(e.any_lane(left_out), likely=False):
                    e.loop(d, e.least(e.add(d, e.lanes), dim), 1, [], add_element)

            e.loop(0, dim, e.lanes, [], add_elements)

        e.loop(0, count, 1, [], add_key)
    return function
