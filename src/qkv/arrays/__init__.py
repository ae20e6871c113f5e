"""Arrays of any library as NumPy views, and the way back.

A library is recognised by the name of the module that defines the array's type, so that none is
imported because it happens to be installed.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.numpy_arrays import NumpyArrays
from qkv.errors import DTypeError, UnsupportedError

__all__ = ["ArrayLibrary", "library_of"]


class ArrayLibrary(Protocol):
    """What one array library needs: a view without a copy, and an array like the query."""

    name: str

    def view(self, array: Any, role: str) -> NDArray[Any]:
        """A NumPy view of the array's memory."""
        ...

    def restore(self, array: NDArray[Any]) -> Any:
        """The result as an array of this library."""
        ...


_LIBRARIES: dict[str, ArrayLibrary] = {"numpy": NumpyArrays()}
_KNOWN = {"torch": ".detach().cpu().numpy()", "jax": ", through numpy.asarray", "jaxlib": ""}


def library_of(array: Any, role: str) -> ArrayLibrary:
    """The library of an array; an error for anything else."""
    kinds = [base.__module__.partition(".")[0] for base in type(array).__mro__]
    for kind in kinds:
        if kind in _LIBRARIES:
            return _LIBRARIES[kind]
    name = f"{type(array).__module__}.{type(array).__qualname__}"
    for kind in kinds:
        if kind in _KNOWN:
            raise UnsupportedError(
                f"{role} is a {name}; this version of qkv takes NumPy arrays.",
                action=f"Pass {role}{_KNOWN[kind]}.",
            )
    raise DTypeError(
        f"{role} is a {name}, not an array.", action=f"Pass numpy.asarray({role}, dtype='float32')."
    )


def view(array: Any, role: str) -> NDArray[Any]:
    """A NumPy view of an array of any library."""
    return np.asarray(library_of(array, role).view(array, role))
