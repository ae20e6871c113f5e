"""The conditions that prepared calls depend on: the backends that are registered, and `QKV_ISA`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

__all__ = ["Conditions", "backends_changed", "conditions"]

Conditions: TypeAlias = tuple[int, object]
"""Equal as long as what was prepared holds."""

_changes = 0


def conditions() -> Conditions:
    """The conditions under which a call prepared now stays valid."""
    return _changes, _isa()


def backends_changed() -> None:
    """Invalidate prepared calls, because a backend was registered or unregistered."""
    global _changes
    _changes += 1


def _quick_setting(name: str) -> Callable[[], object]:
    """A fast reader of an environment variable, to see whether it has changed.

    `os.environ.get` encodes the name and decodes the answer each time. This reads the dictionary
    behind it, in a thirtieth of the time, if the dictionary is as it was in every Python so far.
    """
    try:
        data, encoded = vars(os.environ)["_data"], os.environ.encodekey
        if {encoded(known) for known in os.environ} == set(data):
            return partial(data.get, encoded(name))
    except (AttributeError, KeyError, TypeError):
        pass
    return partial(os.environ.get, name)


_isa = _quick_setting("QKV_ISA")
