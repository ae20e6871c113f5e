"""Pages and int8 rows in the place of the tensors that models hand to attention."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

import qkv
from qkv.cache import Part
from qkv.errors import UnsupportedError

__all__ = ["StoredTensor", "as_tensors", "layer_rows", "over_rows", "plain_tensor", "state_of"]


class StoredTensor(torch.Tensor):
    """Keys or values (batch, num_kv_heads, kv_len, dim) that lie in pages, or as int8.

    To a model it is a tensor: it has shape, dtype and device and can be passed on, and whoever
    computes with it gets the dense tensor, gathered at that moment, with zeros where no token is.
    The attention of "qkv" takes it as what it is, `rows`, and reads them in place.

    Attributes
    ----------
    rows : Paged or Quantized
    kv_lens : KeyLengths or None
        How many of the rows are tokens; None if all are.

    Raises
    ------
    UnsupportedError
        When it is written to, since that would change a copy.
    """

    rows: qkv.Paged | qkv.Quantized
    kv_lens: qkv.KeyLengths | None

    # torch documents this assignment for subclasses; its type stubs declare a method.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, rows: Any, kv_lens: qkv.KeyLengths | None, dtype: torch.dtype) -> StoredTensor:
        """A tensor without storage of its own."""
        values = _values(rows)
        shape = tuple(values.shape)
        if isinstance(rows, qkv.Paged):
            _, heads, page_size, dim = shape
            batch, slots = rows.page_table.shape
            shape = (batch, heads, slots * page_size, dim)
        made: StoredTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=values.device
        )
        made.rows, made.kv_lens = rows, kv_lens
        return made

    # torch passes `tensor_contents` by name, which its type stubs do not declare.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = type(self.rows).__name__
        return f"StoredTensor({kind}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def dense(self) -> torch.Tensor:
        """The tensor that the rows stand for."""
        rows, table = self.rows, None
        if isinstance(rows, qkv.Paged):
            rows, table = rows.pages, torch.as_tensor(rows.page_table, device=self.device)
        if isinstance(rows, qkv.Quantized):
            # The product is computed in a wide type, so that it is rounded once.
            wide = _gathered(rows.values, table).to(torch.promote_types(self.dtype, torch.float32))
            wide *= _gathered(rows.scales, table)[..., None]
            if rows.offset is not None:
                wide += rows.offset[:, None]
            gathered = wide.to(self.dtype)
        else:
            gathered = _gathered(rows, table).to(self.dtype)
        if self.kv_lens is not None:
            lens = torch.as_tensor(self.kv_lens.kv_lens, device=self.device).view(-1, 1, 1, 1)
            real = torch.arange(gathered.shape[2], device=self.device)[:, None] < lens
            gathered = torch.where(
                real, gathered, torch.zeros((), dtype=self.dtype, device=self.device)
            )
        return gathered

    # torch calls this on the class, which its type stubs do not declare.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, StoredTensor):
                raise UnsupportedError(
                    f"a model writes to keys or values of its cache with {func}.",
                    [("written to", repr(value))],
                    "Use qkv.hf.Cache without pages and int8 for this model.",
                )
        args, kwargs = tree_map_only(StoredTensor, StoredTensor.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def as_tensors(part: Part, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value as tensors: themselves where they are, else stored ones."""
    lens = next((m for m in part.masks if isinstance(m, qkv.KeyLengths)), None)
    key, value = (
        rows if isinstance(rows, torch.Tensor) else StoredTensor(rows, lens, dtype)
        for rows in (part.key, part.value)
    )
    return key, value


def layer_rows(
    key: torch.Tensor, value: torch.Tensor
) -> tuple[Any, Any, tuple[qkv.KeyLengths, ...]]:
    """Key and value of a layer as `qkv.attention` takes them, and a mask of what is real.

    One of them may be a plain tensor: some models change the values that a cache hands out.
    """
    if type(key) is type(value) is torch.Tensor:
        return key, value, ()
    stored = (rows for rows in (key, value) if isinstance(rows, StoredTensor) and rows.is_cpu)
    lens = next((rows.kv_lens for rows in stored if rows.kv_lens is not None), None)
    return _rows(key), _rows(value), () if lens is None else (lens,)


def _rows(given: torch.Tensor) -> Any:
    """Stored rows where they lie; a dense tensor on devices without them."""
    if not isinstance(given, StoredTensor):
        return given
    return given.rows if given.is_cpu else given.dense()


def over_rows(mask: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask or bias with a column for each token, over all rows of the pages that hold them.

    The last page may have room for more; what it adds is forbidden.
    """
    missing = key.shape[2] - mask.shape[-1]
    lens = key.kv_lens if isinstance(key, StoredTensor) else None
    if missing <= 0 or lens is None or np.max(np.asarray(lens.kv_lens)) > mask.shape[-1]:
        return mask
    fill = False if mask.dtype is torch.bool else float("-inf")
    return torch.nn.functional.pad(mask, (0, missing), value=fill)


def plain_tensor(given: torch.Tensor) -> torch.Tensor:
    """A tensor itself, or the one that stored rows stand for."""
    return given.dense() if isinstance(given, StoredTensor) else given


def state_of(given: torch.Tensor) -> int:
    """A number that changes when somebody writes to a tensor, or to rows that it stands for.

    Tensors of `torch.inference_mode` count no versions; for them it is a checksum.
    """
    read = _values(given.rows) if isinstance(given, StoredTensor) else given
    if not isinstance(read, torch.Tensor) or not read.is_inference():
        return int(getattr(read, "_version", 0))
    contents: Any = read.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()
    return crc32(contents)


def _values(rows: Any) -> torch.Tensor:
    """The tensor that rows are read from."""
    if isinstance(rows, qkv.Paged):
        return _values(rows.pages)
    values: torch.Tensor = rows.values if isinstance(rows, qkv.Quantized) else rows
    return values


def _gathered(array: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
    """Pages (num_pages, heads, page_size, ...) as (batch, heads, kv_len, ...)."""
    return array if table is None else array[table].transpose(1, 2).flatten(2, 3)
