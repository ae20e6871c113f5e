"""The functions of the decode kernel that are the same for every mask and score function.

They are modules of their own, with which kernels are linked: a kernel for another mask is compiled
in a third of the time, because most of its code is here.
"""

from __future__ import annotations

from qkv.backends.cpu.decode.block_products import BlockProducts, block_signature
from qkv.backends.cpu.decode.layout import STRETCH_KV, DecodeKey
from qkv.backends.cpu.decode.merge import MERGE, RecordMerge
from qkv.backends.cpu.decode.rows import DecodeFrame, scales_signature
from qkv.backends.cpu.decode.tile_blocks import TileBlocks, tiles_signature
from qkv.backends.cpu.emit import storage
from qkv.backends.cpu.emit.emitter import FLOAT, Value
from qkv.backends.cpu.emit.packing import (
    all_finite_function,
    copy_rows_function,
    copy_rows_signature,
    move_rows_function,
    move_rows_signature,
)
from qkv.backends.cpu.products.dim_lanes import RowProducts, values_signature
from qkv.backends.cpu.products.int8_tiles import SPLIT_QUERY


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
        signatures = {
            "copy query": copy_rows_signature(self.frame.dtypes["query"]),
            "key": block_signature("key"),
            "value": block_signature("value"),
            "merge": MERGE,
        }
        for name in self._quantised:
            signatures[f"{name} scales"] = scales_signature(name)
            if self.tiles:
                signatures[f"{name} tiles"] = tiles_signature(name)
        if self.tiles:
            signatures["split query"] = SPLIT_QUERY
        return {name: self.e.declare(signature) for name, signature in signatures.items()}

    def emit(self) -> str:
        """The module of all of them but that for a block of values."""
        e, products = self.e, self.products
        types = self.frame.dtypes["query"], products.query_dtype
        functions = {"copy query": copy_rows_function(e, *types)}
        for rows in products.tiles:
            functions[f"scores {rows}"] = products.scores_function(rows)
            functions[f"values {rows}"] = products.values_function(rows)
        for name in ("key", "value"):
            item = storage.ITEM_BYTES[self.frame.dtypes[name]]
            functions[f"move {name}"] = move_rows_function(e, name, item)
        functions["key"] = self.blocks.function("key", functions)
        for name in self._quantised:
            functions[f"{name} scales"] = self.frame.copy_scales_function(name)
        if self.tiles:
            self.tiles.emit_functions(functions)
        functions["merge"] = RecordMerge(self.frame, self.key).function()
        return e.sharing(list(functions.values()))

    def emit_values(self, *, may_forbid: bool) -> str:
        """The module of the function for a block of values; pairs may be forbidden, or not."""
        e = self.e
        functions = {
            f"values {rows}": e.declare(values_signature(rows)) for rows in self.products.tiles
        }
        functions["move value"] = e.declare(move_rows_signature("value"))
        if may_forbid and "value" not in self._quantised:
            functions["all_finite"] = all_finite_function(e, self.frame.dtypes["value"])
            functions["selected"] = self.products.selected_values_function()
        return e.sharing([self.blocks.function("value", functions)])


def emit_shared(key: DecodeKey) -> str:
    """The module of the functions that do not depend on whether pairs may be forbidden."""
    return SharedFunctions(key).emit()


def emit_values(key: DecodeKey, may_forbid: bool) -> str:
    """The module of the function for blocks of values."""
    return SharedFunctions(key).emit_values(may_forbid=may_forbid)
