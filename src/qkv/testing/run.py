"""One call of one case by one backend, and what is required of its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv._api import attention
from qkv.arrays.views import view
from qkv.backends import Backend, DeviceBackend, Refusal, backends, refusals
from qkv.errors import UnsupportedError
from qkv.problem.building.check import check
from qkv.problem.spec import Spec
from qkv.testing.case import DTYPES, Case, Inputs
from qkv.testing.tolerances import largest
from qkv.variants import Bias, Mask

Array = NDArray[Any]

__all__ = ["CaseRun"]


class CaseRun:
    """One backend, case and dtype, and what is required of them.

    A backend of a device is given torch tensors there, all others NumPy arrays.
    """

    def __init__(self, backend: str, case: Case, dtype: str, device: str = "cpu") -> None:
        self.backend, self.case, self.dtype, self.device = backend, case, dtype, device

    @property
    def backend_object(self) -> Backend:
        """The backend itself."""
        return next(b for b in backends() if b.name == self.backend)

    @property
    def is_device(self) -> bool:
        """Whether the backend takes tensors."""
        return isinstance(self.backend_object, DeviceBackend)

    def spec(self, inputs: Inputs) -> Spec:
        """The specification of the case's problem."""
        variants = [
            (Mask(v) if v.dtype == bool else Bias(v)) if isinstance(v, np.ndarray) else v
            for v in inputs.variants
        ]
        spec = check(*inputs.arrays, variants, **inputs.keywords).spec
        return replace(spec, library="torch", device=self.device) if self.is_device else spec

    def refusals(self, inputs: Inputs, *, backward: bool = False) -> tuple[Refusal, ...]:
        """Why the backend does not run the case."""
        return refusals(self.backend_object, self.spec(inputs), backward=backward)

    def require(self, condition: Any, fact: str) -> None:
        """Raise AssertionError with the fact unless the condition holds."""
        if not condition:
            raise AssertionError(f"{self.backend} on {self.case.name!r} in {self.dtype}: {fact}.")

    def attention(self, inputs: Inputs, *, tensors: bool = False) -> tuple[Array, Array]:
        """Output and lse as NumPy arrays."""
        arrays: Any = inputs.arrays
        if tensors or self.is_device:
            arrays = [self.tensor(a) for a in arrays]
        keywords = {**inputs.keywords, "backend": self.backend, "return_lse": True}
        out, lse = attention(*arrays, *inputs.variants, **keywords)
        return self.array(out, "out"), self.array(lse, "lse")

    def tensor(self, array: Array) -> Any:
        """A torch tensor with a copy of the array's values, on the device of the backend."""
        from qkv.arrays.torch_arrays import TorchArrays

        copied = TorchArrays().restore(np.array(array, order="C"))
        return copied.to(self.device) if self.is_device else copied

    def array(self, result: Any, role: str) -> Array:
        """A result as an array in main memory."""
        return view(result.cpu() if self.is_device and hasattr(result, "cpu") else result, role)

    def same(self, one: Any, other: Any, fact: str) -> None:
        """Require the same bits in two sequences of arrays."""
        pairs = zip(one, other, strict=True)
        self.require(all(a.tobytes() == b.tobytes() for a, b in pairs), fact)

    def refuses(self, inputs: Inputs, reasons: tuple[Refusal, ...]) -> None:
        """Require that the call raises, and gives these reasons."""
        try:
            self.attention(inputs)
        except UnsupportedError as error:
            expected = (self.backend, "; ".join(map(str, reasons)))
            self.require(expected in error.seen, f"the error does not give its reasons {expected}")
        else:
            self.require(False, "it ran although it refuses")

    def form(self, out: Array, lse: Array) -> None:
        """Require the dtypes and shapes that the case asks for."""
        shape = self.case.shape
        lead = (*shape.batch_shape, shape.num_heads, shape.q_len)
        full = self.case.arrange(np.empty((*lead, shape.v_head_dim), bool)).shape
        rows = lead if self.case.head_axis else lead[-1:]
        compute = np.float64 if self.dtype == "float64" else np.float32
        self.require(out.dtype == DTYPES[self.dtype], f"output has dtype {out.dtype}")
        self.require(out.shape == full, f"output has shape {out.shape}, not {full}")
        self.require(lse.dtype == compute, f"lse has dtype {lse.dtype}")
        self.require(lse.shape == rows, f"lse has shape {lse.shape}, not {rows}")

    def values(self, out: Array, lse: Array) -> None:
        """Require output and lse of the call to be within the bounds of the truth."""
        truth = self.case.truth(self.dtype)
        out = self.case.plain_order(out)
        lse = lse if self.case.head_axis else lse[None]
        empty = ~truth.allowed.any(axis=-1)
        self.require((out[empty] == 0).all(), "a row that sees no key is not 0")
        nothing = np.isneginf(truth.lse)
        self.require((np.isneginf(lse) == nothing).all(), "lse is -inf in the wrong rows")
        errors = (
            ("output", largest(out - truth.out)),
            ("lse", largest(lse[~nothing] - truth.lse[~nothing])),
        )
        for orders in self.case.orders:  # The first, tighter bound is usually enough.
            bounds = self.case.bounds(self.dtype, orders)
            limits = bounds.out, bounds.lse
            if all(error <= limit for (_, error), limit in zip(errors, limits, strict=True)):
                return
        for (what, error), limit in zip(errors, limits, strict=True):
            self.require(error <= limit, f"{what} is {error:.3g} off, allowed is {limit:.3g}")
