"""The memory of a cache: NumPy arrays for NumPy and JAX, tensors for torch.

JAX arrays cannot be written to, so the rows of a JAX cache lie in NumPy arrays, which
`qkv.attention` reads in place beside a JAX query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, Protocol, TypeAlias

import numpy as np

from qkv.arrays import library_of
from qkv.backends.cpu.rows.int8 import int8_rows
from qkv.errors import ArgumentError, KernelBuildError, UnsupportedError

__all__ = ["Memory", "RowsOfAlike", "Views", "memory_with"]


RowsOfAlike: TypeAlias = Callable[[Any, Any], tuple[Any, Any] | None]
"""The rows of a key and a value, None if they are unlike those that it was made of."""


class Views:
    """NumPy views of the tensors of one cache, which take longer to make than a row to write."""

    def __init__(self) -> None:
        self.latest: tuple[list[int], list[Any]] = [], []
        """Addresses of the tensors, and the views."""

    def __reduce__(self) -> tuple[type[Views], tuple[()]]:
        """A copy of the tensors has views of its own."""
        return Views, ()


class Memory(Protocol):
    """The few operations on arrays that caches need, in one library."""

    def rows_of(self, array: Any, role: str) -> Any:
        """Rows to be written: a NumPy view where they lie in main memory, else the array.

        Raises
        ------
        DTypeError, UnsupportedError
            It is no array, or its own library differentiates or traces it.
        """
        ...

    def rows_of_alike(self, key: Any, value: Any) -> RowsOfAlike | None:
        """What `rows_of` gives for arrays that are like these two; None if torch or JAX has no
        quick way to tell."""
        ...

    def restored(self, rows: Any) -> Any:
        """Rows of this memory as an array of the library."""
        ...

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """Memory of the dtype and on the device of `like`."""
        ...

    def written(self, arrays: Sequence[Any], known: Views) -> Sequence[Any]:
        """The arrays of one cache, or views of them, that rows can be assigned to.

        `known` keeps the views for the next time.
        """
        ...

    def int8_with_scales(self, rows: Sequence[Any], offset: Any = None) -> list[tuple[Any, Any]]:
        """`(values, scales)` of `qkv.cache.quantize` for each of these arrays of rows.

        The first of them less an offset (heads, dim).
        """
        ...

    def mean_of_rows(self, rows: Any, counts: Any, fewest: int) -> Any:
        """The float32 mean (heads, dim) of the first `counts` rows of each sequence, restored.

        None if they are fewer than `fewest` in all, or one of them is not finite.

        Raises
        ------
        UnsupportedError
            They have no values, as tensors on meta.
        """
        ...


def too_large(shape: tuple[int, ...], itemsize: int) -> ArgumentError:
    """The error for rows that there is no memory for."""
    return ArgumentError(
        f"there is no memory for rows of shape {shape}, {prod(shape) * itemsize / 2**30:.3g} GiB.",
        action="Make the cache with a smaller capacity, or fewer pages.",
    )


class HostMemory:
    """NumPy arrays."""

    def rows_of(self, array: Any, role: str) -> Any:
        """A view of an array of NumPy or JAX."""
        return library_of(array, role).view(array, role)

    def rows_of_alike(self, key: Any, value: Any) -> RowsOfAlike | None:
        """See `Memory`."""
        if not type(key) is type(value) is np.ndarray:
            return None
        shape, of_value, dtype = key.shape, value.shape, key.dtype

        def rows(key: Any, value: Any) -> tuple[Any, Any] | None:
            is_alike = (
                type(key) is type(value) is np.ndarray
                and key.shape == shape
                and value.shape == of_value
                and key.dtype is value.dtype is dtype
            )
            return (key, value) if is_alike else None

        return rows

    def restored(self, rows: Any) -> Any:
        """The array itself."""
        return rows

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """An array that is not initialised."""
        try:
            return np.empty(shape, like.dtype)
        except (MemoryError, ValueError) as error:
            raise too_large(shape, like.dtype.itemsize) from error

    def written(self, arrays: Sequence[Any], known: Views) -> Sequence[Any]:
        """The arrays themselves."""
        return arrays

    def mean_of_rows(self, rows: Any, counts: Any, fewest: int) -> Any:
        """See `Memory`."""
        real = np.arange(rows.shape[-2]) < np.asarray(counts)[..., None]
        total = int(real.sum())
        if total < fewest:
            return None
        with np.errstate(all="ignore"):
            kept = np.where(real[..., None, :, None], rows.astype(np.float64), 0.0)
            mean = kept.sum((*range(kept.ndim - 3), -2)) / total
            offset = mean.astype(np.float32)
        return offset if np.isfinite(offset).all() else None

    def int8_with_scales(self, rows: Sequence[Any], offset: Any = None) -> list[tuple[Any, Any]]:
        """See `Memory`; without compiled code, arrays of one shape are rounded together."""
        compiled = _compiled(rows, offset)
        if compiled is not None:
            return compiled
        dtype = np.float64 if rows[0].dtype == np.float64 else np.float32
        alike = all(each.shape == rows[0].shape for each in rows)
        groups = [rows] if alike else [[each] for each in rows]
        pairs: list[tuple[Any, Any]] = []
        for n, group in enumerate(groups):
            wide = np.empty((len(group), *group[0].shape), dtype)
            for target, each in zip(wide, group, strict=True):
                target[...] = each
            if offset is not None and n == 0:
                wide[0] -= _beside(group[0], offset)
            pairs += zip(*_rounded(wide), strict=True)
        return pairs


def _compiled(rows: Sequence[Any], offset: Any) -> list[tuple[Any, Any]] | None:
    """Values and scales by the kernel of the CPU backend, where it can be made."""
    with suppress(KernelBuildError, MemoryError):
        return int8_rows(rows, offset)
    return None


def _beside(rows: Any, offset: Any) -> Any:
    """An offset (heads, dim) with a dimension for the rows; two dimensions of rows are one head."""
    return offset[:, None] if rows.ndim > 2 else offset


def _rounded(wide: Any) -> tuple[Any, Any]:
    """See `qkv.cache.quantize`; `wide` is written to.

    For one token, calling NumPy takes longer than computing: these are its quickest calls.
    """
    # A row with NaN or infinity gets a scale that is not finite, so that it is read as NaN.
    with np.errstate(all="ignore"):
        scales = (np.maximum.reduce(np.abs(wide), axis=-1, initial=0) / 127).astype(np.float32)
        wide /= (scales + (scales == 0))[..., None]
        np.rint(wide, out=wide)
        np.maximum(np.minimum(wide, 127, out=wide), -127, out=wide)
        if not np.isfinite(np.add.reduce(scales, axis=None)):
            wide[~np.isfinite(wide)] = 0
    return wide.astype(np.int8), scales


class TorchMemory:
    """torch tensors, on any device.

    NumPy reads and writes those in main memory: a few rows take torch two to ten times as long.
    """

    def __init__(self) -> None:
        import torch

        from qkv.arrays.torch_arrays import check_dense, check_values
        from qkv.bridges.torch.observers import follows
        from qkv.bridges.torch.repeated.guards import gradient_guard

        self.follows, self.gradient_guard = follows, gradient_guard
        self.torch, self.check_dense, self.check_values = torch, check_dense, check_values
        self.plain = torch.Tensor, torch.nn.Parameter
        self.library = library_of(torch.empty(0), "rows")
        self.on_host = HostMemory()

    def rows_of(self, array: Any, role: str) -> Any:
        """See `Memory`; an error if the tensor is not dense, or torch would differentiate it."""
        is_on_host = self._is_on_host(array)
        if not is_on_host:  # For tensors on the host, the view below does this.
            self.check_dense(array, role)
        if self.library.is_tracked(array):
            raise UnsupportedError(
                f"torch differentiates {role}, and rows in a cache have no gradient.",
                [(role, f"{array.dtype} {tuple(array.shape)} on {array.device}")],
                "Call it under torch.no_grad(), or train without a cache.",
            )
        return self.library.view(array, role) if is_on_host else array.detach()

    def rows_of_alike(self, key: Any, value: Any) -> RowsOfAlike | None:
        """See `Memory`."""
        if key is value or key.requires_grad or value.requires_grad or not self._is_on_host(key):
            return None
        if not type(key) is type(value) is self.torch.Tensor or key.is_neg() or value.is_neg():
            return None
        are_alike, follows = self.gradient_guard(key, value), self.follows
        view: Callable[[Any], Any] = self.torch.Tensor.numpy
        if key.dtype is self.torch.bfloat16:
            view = partial(self.library.view, role="rows")

        def rows(key: Any, value: Any) -> tuple[Any, Any] | None:
            if follows() or not are_alike(key, value):
                return None
            # Memory that has been freed is refused where tokens are checked.
            return (view(key), view(value)) if key.data_ptr() and value.data_ptr() else None

        return rows

    def restored(self, rows: Any) -> Any:
        """A tensor."""
        return self.library.restore(rows) if type(rows) is np.ndarray else rows

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """A tensor that is not initialised."""
        dtype, device = like.dtype, "cpu"
        if type(like) is np.ndarray:
            dtype = self.library.restore(np.empty(0, dtype)).dtype
        else:
            device = like.device
        # torch does not allow writing to inference-mode tensors outside of inference mode.
        with self.torch.inference_mode(False):
            try:
                return self.torch.empty(shape, dtype=dtype, device=device)
            except (RuntimeError, TypeError) as error:
                raise too_large(shape, like.dtype.itemsize) from error

    def _is_on_host(self, array: Any) -> bool:
        """Whether NumPy can have a view; a tensor that stands for one in a trace has none."""
        return type(array) in self.plain and array.is_cpu

    def written(self, arrays: Sequence[Any], known: Views) -> Sequence[Any]:
        """Views of tensors in main memory; torch is told that their derivatives may be stale."""
        if not self._is_on_host(arrays[0]):
            return arrays
        self.torch.autograd.graph.increment_version(arrays)
        addresses = [array.data_ptr() for array in arrays]
        # `share_memory_` moves tensors, and views then point at freed memory.
        seen, views = known.latest
        if seen != addresses:
            views = [self.library.view(array, "rows") for array in arrays]
            known.latest = addresses, views
        return views

    def mean_of_rows(self, rows: Any, counts: Any, fewest: int) -> Any:
        """See `Memory`."""
        if type(rows) is np.ndarray:
            mean = self.on_host.mean_of_rows(rows, counts, fewest)
            return None if mean is None else self.library.restore(mean)
        torch = self.torch
        self.check_values(rows, "key")
        counts = torch.as_tensor(np.asarray(counts), device=rows.device)
        real = torch.arange(rows.shape[-2], device=rows.device) < counts[..., None]
        total = int(real.sum())
        if total < fewest:
            return None
        kept = torch.where(real[..., None, :, None], rows.double(), 0.0)
        mean = kept.sum((*range(kept.ndim - 3), -2)) / total
        offset = mean.float()
        return offset if bool(offset.isfinite().all()) else None

    def int8_with_scales(self, rows: Sequence[Any], offset: Any = None) -> list[tuple[Any, Any]]:
        """See `Memory`."""
        if type(rows[0]) is np.ndarray:
            seen = None if offset is None else self.library.view(offset, "offset")
            return self.on_host.int8_with_scales(rows, seen)
        return [self._rounded(each, None if n else offset) for n, each in enumerate(rows)]

    def _rounded(self, rows: Any, offset: Any) -> tuple[Any, Any]:
        """The same on another device."""
        torch = self.torch
        wide = rows if rows.dtype is torch.float64 else rows.float()
        if offset is not None:
            wide = wide - _beside(rows, offset)
        largest = wide.abs().amax(-1) if wide.shape[-1] else wide.new_zeros(wide.shape[:-1])
        scales = (largest / 127).float()
        steps = (wide / (scales + (scales == 0))[..., None]).round().clamp(-127, 127)
        return torch.where(steps.isfinite(), steps, 0.0).to(torch.int8), scales


_MEMORIES: dict[str, Memory] = {}


def memory_with(library: str) -> Memory:
    """The memory for arrays of the library of this name."""
    kind = "torch" if library == "torch" else "host"
    if kind not in _MEMORIES:
        _MEMORIES[kind] = TorchMemory() if kind == "torch" else HostMemory()
    return _MEMORIES[kind]
