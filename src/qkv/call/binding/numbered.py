"""Objects that compiled code of another library names: each has a number of this process."""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

from qkv.errors import ArgumentError
from qkv.variants.base import Opaque

__all__ = ["hold_object", "number_of", "numbered"]

_numbers = count()
_by_number: WeakValueDictionary[int, Opaque] = WeakValueDictionary()
_process_lifetime: dict[Opaque, Opaque] = {}
"""Objects that compiled code names, which are kept alive as long as the process."""


def hold_object(opaque: Opaque, held: Opaque) -> None:
    """Keep an object as long as the process lives, as `held`, which has no arrays."""
    if opaque not in _process_lifetime:
        _process_lifetime[held] = held


def number_of(opaque: Opaque) -> int:
    opaque = _process_lifetime.get(opaque, opaque)
    if opaque.number is None:
        opaque.number = next(_numbers)
        _by_number[opaque.number] = opaque
    return opaque.number


def numbered(number: int) -> Opaque:
    entry = _by_number.get(number)
    if entry is None:
        raise ArgumentError(
            f"a variant of this call is gone (number {number}).",
            action="Keep variants of your own, and score mods, as long as what was compiled from "
            "them; they cannot be saved with it.",
        )
    return entry
