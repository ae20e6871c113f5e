"""The memory of a cache: NumPy arrays for NumPy and JAX, tensors for torch.

JAX arrays cannot be written to, so the rows of a JAX cache lie in NumPy arrays, which
`qkv.attention` reads in place beside a JAX query.
"""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import numpy as np

from qkv.arrays import library_of
from qkv.errors import ArgumentError, UnsupportedError

__all__ = ["Memory", "memory_of", "memory_with"]


class Memory(Protocol):
    """The few operations on arrays that caches need, in one library."""

    def own_array(self, array: Any, role: str) -> Any:
        """The array as one of this library, without a copy where that is possible.

        Raises
        ------
        DTypeError, UnsupportedError
            It is no array, or its own library differentiates or traces it.
        """
        ...

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """Memory of the dtype and on the device of `like`."""
        ...

    def written(self, array: Any) -> Any:
        """The array, or a view of it, to write a few rows into."""
        ...

    def as_read(self, array: Any) -> Any:
        """Rows as an array that can be assigned to one that is `written`."""
        ...

    def int8_with_scales(self, rows: Any, offset: Any = None) -> tuple[Any, Any]:
        """`(values, scales)` of `qkv.cache.quantize`, of rows less an offset (heads, dim)."""
        ...

    def mean_of_rows(self, rows: Any, counts: Any, fewest: int) -> Any:
        """The float32 mean (heads, dim) of the first `counts` rows of each sequence.

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

    def own_array(self, array: Any, role: str) -> Any:
        """A view of an array of NumPy or JAX."""
        return library_of(array, role).view(array, role)

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """An array that is not initialised."""
        try:
            return np.empty(shape, like.dtype)
        except (MemoryError, ValueError) as error:
            raise too_large(shape, like.dtype.itemsize) from error

    def written(self, array: Any) -> Any:
        """The array itself."""
        return array

    def as_read(self, array: Any) -> Any:
        """The array itself."""
        return array

    def mean_of_rows(self, rows: Any, counts: Any, fewest: int) -> Any:
        """See `Memory`."""
        real = np.arange(rows.shape[-2]) < np.asarray(counts)[..., None]
        total = int(real.sum())
        if total < fewest:
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            kept = np.where(real[..., None, :, None], rows.astype(np.float64), 0.0)
            mean = kept.sum((*range(kept.ndim - 3), -2)) / total
            offset = mean.astype(np.float32)
        return offset if np.isfinite(offset).all() else None

    def int8_with_scales(self, rows: Any, offset: Any = None) -> tuple[Any, Any]:
        """See `qkv.cache.quantize`."""
        wide = rows if rows.dtype == np.float64 else rows.astype(np.float32)
        if offset is not None:
            wide = wide - offset[:, None]
        # A row with NaN or infinity gets a scale that is not finite, so that it is read as NaN.
        with np.errstate(invalid="ignore", over="ignore"):
            scales = (np.abs(wide).max(-1, initial=0) / 127).astype(np.float32)
            divisor = np.where(scales > 0, scales, np.float32(1)).astype(wide.dtype)
            steps = np.clip(np.round(wide / divisor[..., None]), -127, 127)
        return np.where(np.isfinite(steps), steps, 0).astype(np.int8), scales


class TorchMemory:
    """torch tensors, on any device.

    NumPy reads and writes those in main memory: a few rows take torch two to ten times as long.
    """

    def __init__(self) -> None:
        import torch

        from qkv.arrays.torch_arrays import check_dense, check_values

        self.torch, self.check_dense, self.check_values = torch, check_dense, check_values
        self.library = library_of(torch.empty(0), "rows")
        self.on_host = HostMemory()

    def own_array(self, array: Any, role: str) -> Any:
        """The tensor, detached; an error if it is not dense, or torch would differentiate it."""
        self.check_dense(array, role)
        if self.library.is_tracked(array):
            raise UnsupportedError(
                f"torch differentiates {role}, and rows in a cache have no way back.",
                [(role, f"{array.dtype} {tuple(array.shape)} on {array.device}")],
                "Call it under torch.no_grad(), or train without a cache.",
            )
        return array.detach()

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """A tensor that is not initialised."""
        # torch does not allow writing to inference-mode tensors outside of inference mode.
        with self.torch.inference_mode(False):
            try:
                return self.torch.empty(shape, dtype=like.dtype, device=like.device)
            except (RuntimeError, TypeError) as error:
                raise too_large(shape, like.dtype.itemsize) from error

    def _is_on_host(self, array: Any) -> bool:
        """Whether NumPy can have a view; a tensor that stands for one in a trace has none."""
        return type(array) is self.torch.Tensor and array.device.type == "cpu"

    def written(self, array: Any) -> Any:
        """A view of a tensor in main memory; torch is told that its derivatives may be stale."""
        if not self._is_on_host(array):
            return array
        self.torch.autograd.graph.increment_version(array)
        return self.library.view(array, "rows")

    def as_read(self, array: Any) -> Any:
        """A view of a tensor in main memory."""
        return self.library.view(array, "rows") if self._is_on_host(array) else array

    def mean_of_rows(self, rows: Any, counts: Any, fewest: int) -> Any:
        """See `Memory`."""
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

    def int8_with_scales(self, rows: Any, offset: Any = None) -> tuple[Any, Any]:
        """See `qkv.cache.quantize`."""
        if not self._is_on_host(rows):
            return self.int8_with_scales_by_torch(rows, offset)
        read = None if offset is None else self.as_read(offset)
        values, scales = self.on_host.int8_with_scales(self.as_read(rows), read)
        return self.library.restore(values), self.library.restore(scales)

    def int8_with_scales_by_torch(self, rows: Any, offset: Any = None) -> tuple[Any, Any]:
        """The same on another device."""
        torch = self.torch
        wide = rows if rows.dtype is torch.float64 else rows.float()
        if offset is not None:
            wide = wide - offset[:, None]
        largest = wide.abs().amax(-1) if wide.shape[-1] else wide.new_zeros(wide.shape[:-1])
        scales = (largest / 127).float()
        divisor = torch.where(scales > 0, scales, 1.0).to(wide.dtype)
        steps = (wide / divisor[..., None]).round().clamp(-127, 127)
        return torch.where(steps.isfinite(), steps, 0.0).to(torch.int8), scales


_MEMORIES: dict[str, Memory] = {}


def memory_of(array: Any, role: str) -> Memory:
    """The memory that rows like this array are kept in."""
    return memory_with(library_of(array, role).name)


def memory_with(library: str) -> Memory:
    """The memory for arrays of the library of this name."""
    kind = "torch" if library == "torch" else "host"
    if kind not in _MEMORIES:
        _MEMORIES[kind] = TorchMemory() if kind == "torch" else HostMemory()
    return _MEMORIES[kind]
