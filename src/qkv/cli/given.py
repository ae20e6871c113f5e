"""Which options somebody gave: a value of 0 or an empty one is given, too."""

from __future__ import annotations

from typing import Any

__all__ = ["is_given"]


def is_given(value: Any) -> bool:
    """Whether an option has a value: one that is not given is None, False if it is a flag, or ().

    Examples
    --------
    >>> is_given(0), is_given(""), is_given(None), is_given(False), is_given(())
    (True, True, False, False, False)
    """
    return value is not None and value is not False and value != ()
