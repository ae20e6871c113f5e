"""Arrays of any library as NumPy views, and results as arrays of that library again.

A library is recognised by the name of the module that defines the array's type, so that none is
imported because it happens to be installed.

numpy_arrays, torch_arrays, jax_arrays
            the operations of each library
views       NumPy views of arrays, beside a query of another library too
copies      copies for what is computed later
addresses   where arrays lie in memory
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.array_errors import no_array_error
from qkv.arrays.numpy_arrays import NumpyArrays
from qkv.errors import ArgumentError
from qkv.process.forks import importing

__all__ = [
    "ArrayLibrary", "has_shape", "is_array", "kind_of", "library_named", "library_of",
    "library_of_type", "namespace",
]  # fmt: skip


class ArrayLibrary(Protocol):
    """The operations that qkv needs of one array library."""

    name: str

    def view(self, array: Any, role: str) -> NDArray[Any]:
        """A NumPy view of the array's memory."""
        ...

    def restore(self, array: NDArray[Any]) -> Any:
        """The result as an array of this library."""
        ...

    def described(self, array: Any) -> NDArray[Any]:
        """A NumPy array of the same type and shape; its values are not read."""
        ...

    def on_host(self, array: Any, role: str, *, by_value: bool) -> NDArray[Any]:
        """The values in main memory.

        While torch traces or transforms a call, values cannot be read. Then an array of the right
        type and shape is returned, unless `by_value` asks for the values themselves.
        """
        ...

    def is_tracked(self, array: Any) -> bool:
        """Whether the library differentiates or traces computations on the array."""
        ...

    def in_words(self, advice: str) -> str:
        """Advice about NumPy arrays, in the functions that this library has."""
        ...


def _torch() -> ArrayLibrary:
    # Without the lock, because Dynamo may trace this.
    from qkv.arrays.torch_arrays import TorchArrays

    return TorchArrays()


def _jax() -> ArrayLibrary:
    with importing():
        from qkv.arrays.jax_arrays import JaxArrays

    return JaxArrays()


NAMES = ("numpy", "torch", "jax")
"""Names of the supported libraries; a constant, because torch's compiler reads it while tracing."""

_BASES = ("Tensor", "ndarray", "generic")
"""Names of the classes that all arrays of torch and NumPy inherit."""

_LIBRARIES: dict[str, ArrayLibrary] = {"numpy": NumpyArrays()}
_LAZY_LIBRARIES: dict[str, Callable[[], ArrayLibrary]] = {"torch": _torch, "jax": _jax}


def kind_of(array: Any) -> str | None:
    """The name of the library that an array's type is of, None for any other type."""
    return library_of_type(type(array))


def library_of_type(type_of_array: type) -> str | None:
    """The name of the library that has this type of arrays, None for any other type.

    Modules, generators and types of these libraries are not arrays.
    """
    if type_of_array is np.ndarray:
        return "numpy"
    for base in type_of_array.__mro__:  # A class may be of no module.
        name = str(base.__module__).partition(".")[0]
        if name in NAMES and (name == "jax" or base.__name__ in _BASES):
            return name
    return None


def library_named(name: str) -> ArrayLibrary:
    """The library of one of `NAMES`.

    Raises
    ------
    ImportError
        It is not installed.
    KeyError
        The name is another.
    """
    if name not in _LIBRARIES:
        _LIBRARIES[name] = _LAZY_LIBRARIES[name]()
    return _LIBRARIES[name]


def library_of(array: Any, role: str, query: ArrayLibrary | None = None) -> ArrayLibrary:
    """The library of an array; for anything else an error, in the words of the query's library."""
    kind = kind_of(array)
    if kind in _LIBRARIES:
        return _LIBRARIES[kind]
    if kind is not None:
        return library_named(kind)
    if type(array).__module__ in ("qkv.problem.language.symbols", "qkv.problem.language.reading"):
        raise ArgumentError(
            f"qkv is called inside a score mod, where arrays and positions are symbols; {role} is "
            "one of them.",
            action="Call it before, outside of the score mod, and index its result in there.",
        )
    error = no_array_error(array, role)
    raise error if query is None else error.with_action(query.in_words(error.action))


def namespace(array: Any, role: str) -> Any:
    """The module of the functions of an array's library: numpy, torch or jax.numpy."""
    name = library_of(array, role).name
    return importlib.import_module("jax.numpy" if name == "jax" else name)


def is_array(value: Any) -> bool:
    """Whether a value is an array of a library that is known here."""
    # Two checks, because torch's compiler cannot trace isinstance with a union of types.
    if isinstance(value, np.ndarray):
        return True
    if isinstance(value, np.generic):
        return False
    return kind_of(value) is not None and hasattr(value, "dtype") and has_shape(value)


def has_shape(value: Any) -> bool:
    """Whether a value says that it has a shape, as arrays do.

    Tensors that cannot tell it, as torch's nested ones, are arrays too; they are refused by name
    where they are read.
    """
    try:
        return hasattr(value, "shape")
    except RuntimeError:
        return True
