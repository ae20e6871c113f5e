"""Names of arrays in messages and in code, and the error for an object that is no array."""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.errors import DTypeError

__all__ = ["no_array_error", "variable"]


def variable(role: str) -> str:
    """A name for an array in code: `query` for itself, `array` for "an array of Bias".

    Examples
    --------
    >>> variable("query"), variable("an array of Bias"), variable("the tangent of key")
    ('query', 'array', 'tangent')
    """
    return role.split()[1] if " " in role else role


def no_array_error(given: Any, role: str) -> DTypeError:
    """The error for what is an array of no library."""
    if given is None:
        return DTypeError(f"{role} is None, not an array.", action=f"Pass an array as {role}.")
    kind = type(given)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.").removeprefix("None.")
    if isinstance(given, list | tuple):
        try:
            np.asarray(given)
        except ValueError as error:
            if "inhomogeneous" in str(error):
                return DTypeError(
                    f"{role} is a {name} whose rows differ in length, not an array.",
                    action="Pad the rows to one length; qkv.KeyLengths says how many are real.",
                )
        except (RuntimeError, TypeError):
            pass  # A list of arrays that NumPy may not read.
    if isinstance(given, list | tuple | int | float | memoryview):
        return DTypeError(
            f"{role} is a {name}, not an array.",
            action=f"Pass numpy.asarray({variable(role)}, dtype='float32').",
        )
    if hasattr(kind, "__jax_array__"):  # A parameter of Flax.
        action = f"Pass its array, as in jax.numpy.asarray({variable(role)})."
        return DTypeError(f"{role} is a {name}, not an array.", action=action)
    return DTypeError(
        f"{role} is a {name}, not an array.", action="Pass an array of NumPy, torch or JAX."
    )
