"""NumPy views of arrays: what may read their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays import ArrayLibrary, library_of
from qkv.errors import UnsupportedError

__all__ = ["view", "view_beside"]


def view(array: Any, role: str) -> NDArray[Any]:
    """A NumPy view of an array of any library."""
    return np.asarray(library_of(array, role).view(array, role))


def view_beside(query: ArrayLibrary, array: Any, role: str) -> NDArray[Any]:
    """A NumPy view of an array that stands beside a query of the library given.

    The output is an array of the query's library. An array that another library differentiates or
    traces is refused, because that library would lose the gradient without an error.
    """
    library = library_of(array, role, query)
    if library.name != query.name and library.is_tracked(array):
        raise UnsupportedError(
            f"{library.name} differentiates or traces {role}, and the output, like query, would be "
            f"an array of {query.name}, which {library.name} cannot follow.",
            action=f"Pass query as an array of {library.name}.",
        )
    return np.asarray(library.view(array, role))
