"""The array API namespace of an array, so that one formula serves NumPy, torch and JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

from qkv._dynamo import is_reading
from qkv.arguments.array_errors import no_array_error
from qkv.arrays import kind_of, library_of
from qkv.arrays.views import view
from qkv.errors import DTypeError, UnsupportedError
from qkv.extras import install_command

__all__ = [
    "array_namespace",
    "as_numpy",
    "certainly_all",
    "host_views",
    "like",
    "recomputed",
    "values",
    "widened",
    "with_axis_moved",
]


def array_namespace(x: Any) -> Any:
    """Return the functions of the array API standard for the library of `x`.

    NumPy and JAX arrays bring their namespace with them (`__array_namespace__`). torch tensors do
    not; theirs comes from the package array-api-compat, which only torch users need.

    Parameters
    ----------
    x : NumPy array, torch.Tensor or JAX array

    Raises
    ------
    DTypeError
        `x` is not an array of a library that qkv knows.
    UnsupportedError
        `x` is a torch tensor and array-api-compat is not installed.

    Notes
    -----
    Source: Python array API standard, https://data-apis.org/array-api/latest.

    Examples
    --------
    >>> import numpy as np
    >>> array_namespace(np.zeros(2)).__name__
    'numpy'
    """
    kind = kind_of(x)
    if kind is None:
        raise no_array_error(x, "x")
    if kind != "torch":
        return x.__array_namespace__()
    try:
        from array_api_compat import torch as namespace
    except ImportError as error:
        raise UnsupportedError(
            "mechanisms read torch tensors through array-api-compat, which is not installed.",
            action=f"Run {install_command('mechanisms')}.",
        ) from error
    return namespace


def like(array: Any, x: Any, name: str = "array") -> Any:
    """Return `array` in the library, dtype and device of `x`.

    A tensor or JAX array beside an `x` of its own library keeps its gradient.

    Raises
    ------
    DTypeError
        `x` is not of a floating type.
    UnsupportedError
        Another library follows the gradient of `array`, which would be lost.
    """
    namespace = array_namespace(x)
    if not str(x.dtype).removeprefix("torch.").startswith(("float", "bfloat")):
        raise DTypeError(
            f"x has dtype {x.dtype}, not a floating type.",
            action="Convert it, to float32 for example.",
        )
    if is_reading() and kind_of(x) == "torch" and kind_of(array) == "numpy":
        array = namespace.asarray(array)  # Dynamo has it as a tensor.
    elif kind_of(array) != kind_of(x):
        plain = as_numpy(array, name)
        array = library_of(x, "x").restore(plain) if kind_of(x) == "torch" else plain
        array = namespace.asarray(array)
    if kind_of(x) == "torch":
        array = array.to(x.device)
    return namespace.astype(array, x.dtype, copy=False)


def widened(x: Any) -> Any:
    """`x` in float32 if its type has 16 bits, else `x` itself; for sums of products.

    Examples
    --------
    >>> import numpy as np
    >>> widened(np.ones(2, np.float16)).dtype
    dtype('float32')
    """
    if str(x.dtype).removeprefix("torch.") not in ("float16", "bfloat16"):
        return x
    namespace = array_namespace(x)
    return namespace.astype(x, namespace.float32)


def with_axis_moved(x: Any, source: int, destination: int) -> Any:
    """`x` with one axis at another place.

    torch.func.vmap has a rule for `torch.moveaxis` of tuples alone.

    Examples
    --------
    >>> import numpy as np
    >>> with_axis_moved(np.zeros((2, 3, 4)), 0, -1).shape
    (3, 4, 2)
    """
    return array_namespace(x).moveaxis(x, (source,), (destination,))


def as_numpy(array: Any, name: str = "array") -> Any:
    """Return the values of an array of any library as a NumPy array.

    Raises
    ------
    UnsupportedError
        The library of `array` would follow its gradient, which would be lost.
    """
    library = library_of(array, name)
    if library.is_tracked(array):
        raise UnsupportedError(
            f"{library.name} differentiates or traces {name}, and NumPy cannot follow it.",
            action=f"Pass x as an array of {library.name}, or {name} without its gradient.",
        )
    return view(array, name)


def values(array: Any, name: str = "array") -> Any:
    """Return the values of an array as a NumPy array on the CPU, without its gradient.

    For looking at numbers: weights to show, calculations to print.

    Examples
    --------
    >>> import numpy as np
    >>> values(np.ones(2))
    array([1., 1.])
    """
    if kind_of(array) == "torch" and not array.is_meta:
        array = array.detach().cpu()
    return view(array, name)


def host_views(*arrays: Any) -> tuple[Any, ...] | None:
    """NumPy views of arrays that are neither differentiated nor traced, if they lie in main memory.

    None otherwise, and for JAX arrays, whose libraries allow no formula that writes in place.

    Parameters
    ----------
    *arrays : arrays of one library

    Examples
    --------
    >>> import numpy as np
    >>> x = np.zeros(2)
    >>> np.shares_memory(host_views(x)[0], x)
    True
    """
    if is_reading():
        return None
    for array in arrays:
        kind, library = kind_of(array), library_of(array, "array")
        if kind not in ("numpy", "torch") or library.is_tracked(array):
            return None
        if kind == "torch" and array.device.type != "cpu":
            return None
    return tuple(view(array, "array") for array in arrays)


def certainly_all(condition: Any) -> bool:
    """Whether all of a boolean array is true; False where that is not known while the code runs.

    It is not while a library traces the code, and on a device it would have to be waited for. So it
    may choose a faster formula with the same result, and nothing else.

    Examples
    --------
    >>> import numpy as np
    >>> certainly_all(np.array([True, False])), certainly_all(np.array([True, True]))
    (False, True)
    """
    if is_reading() or library_of(condition, "condition").is_tracked(condition):
        return False
    if kind_of(condition) == "torch":
        import torch

        if torch.compiler.is_compiling() or type(condition) is not torch.Tensor:
            return False
        if condition.device.type != "cpu":
            return False
    return bool(condition.all())


def recomputed(function: Any, x: Any) -> Any:
    """Return `function` so that torch's backward pass computes it again instead of storing it.

    What lies between its arguments and its result then takes no memory between the passes. For
    other libraries, and inside the transforms of torch.func, it is `function` itself.

    Parameters
    ----------
    function : callable of arrays
    x : array
        Says which library.
    """
    if kind_of(x) != "torch":
        return function
    import torch
    from torch.utils.checkpoint import checkpoint

    # A checkpoint needs hooks of saved tensors, which torch.func does not support.
    transformed = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if transformed or not torch.is_grad_enabled():
        return function
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
