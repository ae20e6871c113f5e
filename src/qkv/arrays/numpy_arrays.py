"""NumPy arrays: strided and read-only ones are used in place."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.array_errors import variable
from qkv.errors import DTypeError


class NumpyArrays:
    """NumPy, with bfloat16 through ml_dtypes."""

    name = "numpy"

    def view(self, array: Any, role: str) -> NDArray[Any]:
        """The array itself."""
        if not isinstance(array, np.ndarray):
            raise DTypeError(
                f"{role} is a {type(array).__name__}, not an array.",
                action=f"Pass numpy.asarray({variable(role)}).",
            )
        # numpy.ma is slow to import, and a masked array exists only if it has been imported.
        # Another thread may be importing it right now.
        masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
        if masked is not None and isinstance(array, masked):
            raise DTypeError(
                f"{role} is a masked array; its mask would be ignored.",
                action=f"Pass {variable(role)}.data, and the mask as a boolean array "
                "(True = attend).",
            )
        return array.view(np.ndarray)

    def restore(self, array: NDArray[Any]) -> Any:
        """The array itself."""
        return array

    def described(self, array: Any) -> NDArray[Any]:
        """The array itself."""
        return self.view(array, "an array")

    def on_host(self, array: Any, role: str, *, by_value: bool) -> NDArray[Any]:
        """The array itself."""
        return self.view(array, role)

    def is_tracked(self, array: Any) -> bool:
        """False, because NumPy neither differentiates nor traces."""
        return False

    def in_words(self, advice: str) -> str:
        """Return the advice unchanged: it is already in NumPy's words."""
        return advice
