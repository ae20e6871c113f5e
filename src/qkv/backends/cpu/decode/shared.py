"""The functions of the decode kernel that are the same for every mask and score function.

They are modules of their own, with which kernels are linked: a kernel for another mask is compiled
in a third of the time, because most of its code is here.
"""

from __future__ import annotations

from qkv.backends.cpu.decode.block_products import BlockProducts
from qkv.backends.cpu.decode.layout import STRETCH_KV, DecodeKey
from qkv.backends.cpu.decode.merge import RecordMerge
from qkv.backends.cpu.decode.rows import DecodeFrame
from qkv.backends.cpu.decode.tile_blocks import TileBlocks
from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import FLOAT, Value
from qkv.backends.cpu.emit.packing import (
    all_finite_function,
    copy_rows_function,
    move_rows_function,
)
from qkv.backends.cpu.emit.structured_code import Maker, written
from qkv.backends.cpu.products.dim_lanes import RowProducts


class SharedFunctions:
    """Writes the functions, or declares them in the module of a kernel."""

    def __init__(self, key: DecodeKey) -> None:
        self.key = key
        self.frame = DecodeFrame(key.spec, key.shape, key.int_bits, key.dtypes, key.paged)
        self.e = self.frame.e
        self.score_row = (STRETCH_KV + key.shape.products_at_once) * self.e.real_bytes
        """Bytes of a row of S, with room behind it for the products of one more step."""
        self.products = RowProducts(self.e, key.dtypes, self.score_row, key.shape)
        self.blocks = BlockProducts(self.frame, self.products)
        has_tiles = key.shape.byte_tiles and self.e.real == FLOAT and "int8" in key.dtypes
        self.tiles = TileBlocks(self.frame, self.products) if has_tiles else None
        self._quantised = [name for name in ("key", "value") if self.frame.is_quantised(name)]

    def declared(self) -> dict[str, Value]:
        """The functions that a kernel calls itself."""
        e = self.e
        functions = self._of_kernels(e.declared, {})
        functions["value"] = e.declared(self.blocks.function, "value", {})
        return functions

    def emit(self) -> str:
        """The module of all of them but that for a block of values."""
        functions = self._of_products(written)
        return self.e.sharing([*functions.values(), *self._of_kernels(written, functions).values()])

    def emit_values(self, *, may_forbid: bool) -> str:
        """The module of the function for a block of values; pairs may be forbidden, or not."""
        e = self.e
        functions = self._of_products(e.declared)
        if may_forbid and "value" not in self._quantised:
            functions["all_finite"] = all_finite_function(e, self.frame.dtypes["value"])
            functions["selected"] = self.products.selected_values_function()
        return e.sharing([self.blocks.function("value", functions)])

    def _of_products(self, make: Maker) -> dict[str, Value]:
        """What the functions for blocks of keys and values call."""
        functions = {}
        for rows in self.products.tiles:
            functions[f"scores {rows}"] = make(self.products.scores_function, rows)
            functions[f"values {rows}"] = make(self.products.values_function, rows)
        for name in ("key", "value"):
            item = storage.ITEM_BYTES[self.frame.dtypes[name]]
            functions[f"move {name}"] = make(move_rows_function, self.e, name, item)
        return functions

    def _of_kernels(self, make: Maker, functions: dict[str, Value]) -> dict[str, Value]:
        """What kernels call."""
        dtype, to = self.frame.dtypes["query"], self.products.query_dtype
        shared = {
            "copy query": make(copy_rows_function, self.e, dtype, to=to),
            "key": make(self.blocks.function, "key", functions),
            "merge": make(RecordMerge(self.frame, self.key).function),
        }
        for name in self._quantised:
            shared[f"{name} scales"] = make(self.frame.copy_scales_function, name)
        if self.tiles:
            shared |= self.tiles.functions(make, functions)
        return shared


def emit_shared(key: DecodeKey) -> str:
    """The module of the functions that do not depend on whether pairs may be forbidden."""
    return SharedFunctions(key).emit()


def emit_values(key: DecodeKey, may_forbid: bool) -> str:
    """The module of the function for blocks of values."""
    return SharedFunctions(key).emit_values(may_forbid=may_forbid)
