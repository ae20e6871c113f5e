"""The kernel of rotary embedding; `rotation` has the formula.

It computes in float64 and rounds once to the type of computation.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import DOUBLE, FLOAT, INT64, POINTER, Emitter, Value
from qkv.backends.cpu.rows.head_job import emit_head_job
from qkv.backends.cpu.rows.layout import ROTATION_FIELDS, ROW_FIELDS, SHARED_FIELDS, RotationKey


def emit_rotation(key: RotationKey) -> str:
    """The module of one kernel; each task of `job(arguments, worker)` rotates rows of one head."""
    e = Emitter("rotation", key.lanes, DOUBLE, halves=key.halves, fused=False)
    rotate = _row_function(e, key)

    def rotate_head(number: Value, words: dict[str, Value]) -> None:
        b = e.builder
        is_first = e.below(number, words["first_count"])
        fields = {n: b.select(is_first, words[f"{n}_0"], words[f"{n}_1"]) for n in ROW_FIELDS}
        fields |= {name: words[name] for name in SHARED_FIELDS}
        number = e.sub(number, b.select(is_first, e.index(0), words["first_count"]))
        batch, head = b.sdiv(number, fields["heads"]), b.srem(number, fields["heads"])
        offset = e.load(e.at(e.pointer(fields["batches"]), e.mul(batch, WORD)), INT64, WORD)
        source = e.at(e.pointer(fields["rows"]), offset, e.mul(head, fields["head_stride"]))
        size = e.mul(fields["dim"], storage.ITEM_BYTES[key.out_dtype])
        target = e.at(e.pointer(fields["out"]), e.mul(number, fields["length"], size))
        angles = e.mul(batch, fields["table_bytes"])

        def rotate_row(r: Value, _: list[Value]) -> None:
            place = e.add(angles, e.mul(r, fields["pairs"], 8))
            e.builder.call(
                rotate,
                [
                    e.at(source, e.mul(r, fields["row_stride"])),
                    e.at(target, e.mul(r, size)),
                    e.at(e.pointer(fields["cosines"]), place),
                    e.at(e.pointer(fields["sines"]), place),
                    fields["element_stride"],
                    fields["dim"],
                    fields["pairs"],
                ],
            )

        e.loop(0, fields["length"], 1, [], rotate_row)

    emit_head_job(e, ROTATION_FIELDS, rotate_head)
    return str(e.module)


def _row_function(e: Emitter, key: RotationKey) -> Value:
    """A function that rotates one row: `(from, to, cosines, sines, element, dim, pairs)`."""
    item, out_item = storage.ITEM_BYTES[key.dtype], storage.ITEM_BYTES[key.out_dtype]
    with e.function("row", [*[POINTER] * 4, *[INT64] * 3]) as (function, args):
        source, target, cosines, sines, element, dim, pairs = args
        b = e.builder

        def store(value: Value, place: Value) -> None:
            if key.out_dtype == "float32":
                count = value.type.count if isinstance(value.type, ir.VectorType) else 0
                value = b.fptrunc(value, ir.VectorType(FLOAT, count) if count else FLOAT)
            e.store(value, place, out_item)

        def rotated(first: Value, second: Value, at: Value, lanes: int) -> tuple[Value, Value]:
            cos, sin = (storage.load(e, e.at(t, at), "float64", lanes) for t in (cosines, sines))
            return (
                b.fsub(b.fmul(first, cos), b.fmul(second, sin)),
                b.fadd(b.fmul(first, sin), b.fmul(second, cos)),
            )

        def rotate_halves(d: Value, _: list[Value]) -> None:
            d = e.least(d, e.sub(pairs, e.lanes))
            ends = d, e.add(d, pairs)
            entries = [
                storage.load(e, e.at(source, e.mul(i, item)), key.dtype, e.lanes) for i in ends
            ]
            for i, value in zip(
                ends, rotated(entries[0], entries[1], e.mul(d, 8), e.lanes), strict=True
            ):
                store(value, e.at(target, e.mul(i, out_item)))

        def rotate_neighbours(d: Value, _: list[Value]) -> None:
            d = e.least(d, e.sub(pairs, e.lanes))
            first = e.mul(d, 2)
            low, high = (
                storage.load(e, e.at(source, e.mul(e.add(first, n), item)), key.dtype, e.lanes)
                for n in (0, e.lanes)
            )
            evens, odds = (
                b.shuffle_vector(low, high, e.shuffle_mask(range(n, 2 * e.lanes, 2)))
                for n in (0, 1)
            )
            a, c = rotated(evens, odds, e.mul(d, 8), e.lanes)
            order = [half * e.lanes + lane for lane in range(e.lanes) for half in (0, 1)]
            for n, picks in ((0, order[: e.lanes]), (e.lanes, order[e.lanes :])):
                value = b.shuffle_vector(a, c, e.shuffle_mask(picks))
                store(value, e.at(target, e.mul(e.add(first, n), out_item)))

        def rotate_pair(d: Value, _: list[Value]) -> None:
            ends = (e.mul(d, 2), e.add(e.mul(d, 2), 1)) if key.interleaved else (d, e.add(d, pairs))
            entries = [storage.load(e, e.at(source, e.mul(i, element)), key.dtype) for i in ends]
            for i, value in zip(ends, rotated(entries[0], entries[1], e.mul(d, 8), 0), strict=True):
                store(value, e.at(target, e.mul(i, out_item)))

        def copying(load_lanes: int) -> Callable[[Value, list[Value]], None]:
            def copy_entries(d: Value, _: list[Value]) -> None:
                d = e.least(d, e.sub(dim, max(load_lanes, 1)))
                step = item if load_lanes else element
                value = storage.load(e, e.at(source, e.mul(d, step)), key.dtype, load_lanes)
                store(value, e.at(target, e.mul(d, out_item)))

            return copy_entries

        is_adjacent = b.icmp_signed("==", element, e.index(item))
        enough = b.icmp_signed(">=", pairs, e.index(e.lanes))
        stop = b.select(b.and_(is_adjacent, enough), pairs, e.index(0))
        e.loop(0, stop, e.lanes, [], rotate_neighbours if key.interleaved else rotate_halves)
        e.loop(stop, pairs, 1, [], rotate_pair)
        rest = e.mul(pairs, 2)
        enough = b.icmp_signed(">=", e.sub(dim, rest), e.index(e.lanes))
        stop = b.select(b.and_(is_adjacent, enough), dim, rest)
        e.loop(rest, stop, e.lanes, [], copying(e.lanes))
        e.loop(stop, dim, 1, [], copying(0))
    return function
