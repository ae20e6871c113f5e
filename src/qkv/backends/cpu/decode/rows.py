"""Where the decode kernel finds its rows: its argument block, strides, pages and scales."""

from __future__ import annotations

from collections.abc import Callable

from qkv.backends.cpu.decode.layout import BLOCK_KV, FIELDS, RECORD_ALIGNMENT, STATE, page_fields
from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import Frame, RowView
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.problem.spec import Spec

_KEYS_AHEAD = 64
"""The least number of keys by which prefetching runs ahead in pages."""
_SCALE_BYTES = storage.ITEM_BYTES["float32"]


class DecodeFrame(Frame):
    """What all functions of the kernel know; keys and values are arrays or lie in pages.

    `dtypes` are those of query, key and value as they are read, `paged` is of key and value.
    """

    def __init__(
        self,
        spec: Spec,
        shape: TileShape,
        int_bits: int,
        dtypes: tuple[str, str, str],
        paged: tuple[bool, bool],
    ) -> None:
        super().__init__("qkv_decode", spec, shape, int_bits, FIELDS)
        self.dtypes = dict(zip(("query", "key", "value"), dtypes, strict=True))
        self.paged = dict(zip(("key", "value"), paged, strict=True))

    def is_quantised(self, name: str) -> bool:
        return self.dtypes[name] == "int8"

    def _offset_of_batch(self, arguments: Value, name: str, batches: Value, batch: Value) -> Value:
        e, b = self.e, self.e.builder
        # One load reads either the offset of this batch row, or the byte stride of batch rows.
        has_table = b.icmp_signed("!=", batches, e.index(0))
        stride_word = self._word(arguments, f"{name}_batch")
        place = b.select(has_table, e.at(e.pointer(batches), e.mul(batch, WORD)), stride_word)
        offset_or_stride = e.load(place, INT64, WORD)
        return b.select(has_table, offset_or_stride, e.mul(offset_or_stride, batch))

    def for_each_segment(
        self,
        name: str,
        place: RowView,
        pages: list[Value],
        kv_start: Value,
        count: Value,
        body: Callable[[Value, Value, Value], None],
    ) -> None:
        """`body(pointer, done, keys)` for the segments of `count` rows from `kv_start` on.

        A segment has `keys` rows, and `done` rows come before it.
        """
        e, b = self.e, self.e.builder
        if not self.paged[name.removesuffix("_scales")]:
            body(e.at(place.pointer, e.mul(kv_start, place.row)), e.index(0), count)
            return
        page_bytes, page_size, table = pages
        stop = e.add(kv_start, count)

        def visit_page(number: Value, _: list[Value]) -> None:
            start = e.mul(number, page_size)
            first = e.larger_of(start, kv_start)
            keys = e.sub(e.least(e.add(start, page_size), stop), first)
            page_number = e.load(e.at(table, e.mul(number, WORD)), INT64, WORD)
            row = e.mul(e.sub(first, start), place.row)
            body(
                e.at(place.pointer, e.mul(page_number, page_bytes), row),
                e.sub(first, kv_start),
                keys,
            )

        first_page = b.sdiv(kv_start, page_size)
        last_page = e.add(b.sdiv(e.sub(stop, 1), page_size), 1)
        e.loop(first_page, last_page, 1, [], visit_page)

    def pages(self, arguments: Value, name: str, batch: Value) -> list[Value]:
        """Bytes of a page, keys of a page, and the page table of one batch row."""
        if not self.paged[name.removesuffix("_scales")]:
            return []
        e = self.e
        page, page_size, table, slots = (self.field(arguments, f) for f in page_fields(name))
        return [page, page_size, e.at(e.pointer(table), e.mul(batch, slots, WORD))]

    def bytes_of(self, arguments: Value, name: str) -> Value:
        """Bytes of all keys, or of all values, without their scales."""
        dim = "head_dim" if name == "key" else "v_head_dim"
        names = "batch_size", "num_kv_heads", "kv_len", dim
        numbers = [self.field(arguments, each) for each in names]
        return self.e.mul(*numbers, storage.ITEM_BYTES[self.dtypes[name]])

    def page_ahead(
        self, name: str, where: list[Value], pointer: Value, first: Value, keys: Value
    ) -> Value | None:
        """Bytes from `keys` rows in one page, at `pointer`, to rows that are read a little later.

        `where` is the argument block, the batch row and the kv head, `first` the number of the
        first of the keys. As many keys lie in between as some such segments have.
        None if the rows are not in pages.
        """
        if not self.paged[name]:
            return None
        e, b = self.e, self.e.builder
        place = self.operand(where[0], name, *where[1:])
        page_bytes, page_size, table = self.pages(where[0], name, where[1])
        span = e.mul(keys, b.sdiv(e.add(keys, _KEYS_AHEAD - 1), keys))
        later = e.least(e.add(first, span), e.sub(self.field(where[0], "kv_len"), 1))
        page = e.load(e.at(table, e.mul(b.sdiv(later, page_size), WORD)), INT64, WORD)
        offset = e.add(e.mul(page, page_bytes), e.mul(b.srem(later, page_size), place.row))
        start = b.ptrtoint(e.at(place.pointer, offset), INT64)
        return e.sub(start, b.ptrtoint(pointer, INT64))

    def copy_scales_function(self, name: str) -> Value:
        """A function that copies the scales of a block side by side."""
        e, scales = self.e, f"{name}_scales"
        with e.function(scales, [POINTER, *[INT64] * 4, POINTER]) as (function, args):
            arguments, batch, kv_head, kv_start, count, target = args
            b = e.builder
            place = self.operand(arguments, scales, batch, kv_head)

            def copy_segment(pointer: Value, done: Value, keys: Value) -> None:
                to = e.at(target, e.mul(done, e.real_bytes))

                def copy_scales(k: Value, lanes: int) -> None:
                    source = e.at(pointer, e.mul(k, place.row))
                    x = storage.load(e, source, "float32", lanes)
                    e.store(x, e.at(to, e.mul(k, e.real_bytes)), e.real_bytes)
                    if lanes:
                        later = e.at(source, BLOCK_KV * _SCALE_BYTES)
                        e.prefetch(later, soon=self.shape.nearest)

                adjacent = b.icmp_signed("==", place.row, e.index(_SCALE_BYTES))
                whole = b.select(adjacent, e.round_down(keys, e.lanes), e.index(0))
                e.loop(0, whole, e.lanes, [], lambda k, _: copy_scales(k, e.lanes))
                e.loop(whole, keys, 1, [], lambda k, _: copy_scales(k, 0))

            pages = self.pages(arguments, scales, batch)
            self.for_each_segment(scales, place, pages, kv_start, count, copy_segment)
        return function

    def block_row_bytes(self, v_head_dim: Value) -> Value:
        """Bytes of a row of O in whole vectors."""
        e = self.e
        return e.mul(e.round_down(e.add(v_head_dim, e.lanes - 1), e.lanes), e.real_bytes)

    def record_row_bytes(self, block_row: Value) -> Value:
        """Bytes of one row of a record: a row of O and its state."""
        e = self.e
        size = e.add(block_row, STATE * e.vector_bytes + RECORD_ALIGNMENT - 1)
        return e.round_down(size, RECORD_ALIGNMENT)

    def state_address(self, record: Value, row: Value, block_row: Value) -> Value:
        """Where the state of a row lies, behind its row of O."""
        return self.e.at(record, self.e.mul(row, self.record_row_bytes(block_row)), block_row)
