"""What messages call an array: in a sentence, and in the code that they advise."""

from __future__ import annotations

__all__ = ["variable"]


def variable(role: str) -> str:
    """A name for an array in code: `query` for itself, `array` for "an array of Bias".

    Examples
    --------
    >>> variable("query"), variable("an array of Bias"), variable("the tangent of key")
    ('query', 'array', 'tangent')
    """
    return role.split()[1] if " " in role else role
