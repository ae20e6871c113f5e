"""Compiled code as built-in functions of Python: calling them takes a tenth of ctypes' time."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["address_of_c_function", "has_gil", "python_function"]

_FASTCALL = 0x0080
"""METH_FASTCALL: the code gets its own object, an array of arguments, and their number."""


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_methods: dict[int, _Method] = {}
"""The definition of each compiled function for Python, to which the function refers."""


def python_function(address: int, own: object) -> Callable[..., Any]:
    """The function of compiled code `(own, arguments, count)`, which returns a new reference.

    It runs while Python is locked, if this one locks, and must not fail.
    """
    method = _methods.setdefault(address, _Method(b"qkv_compiled", address, _FASTCALL, None))
    made: Callable[..., Any] = _new_function(ctypes.byref(method), own, None)
    return made


_new_function = ctypes.pythonapi.PyCFunction_NewEx
_new_function.argtypes = ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p
_new_function.restype = ctypes.py_object


def address_of_c_function(name: str) -> int:
    """Where a function of Python's C interface lies."""
    address = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    assert address
    return address


def has_gil() -> bool:
    """Whether this Python has a global interpreter lock: one of its threads runs at a time."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()
