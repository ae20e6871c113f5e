"""Every exception that qkv raises on purpose, and the one way they are written.

    QkvError
    |-- ShapeError(ValueError)                  lengths, heads and dimensions that do not fit
    |-- DTypeError(TypeError)                   an array of a kind that cannot be used here
    |-- AmbiguityError(ValueError)              two readings are possible and nothing chooses
    |-- ArgumentError(ValueError)               an argument outside what it may be
    |-- KeywordError(TypeError)                 a keyword that the function does not take
    |-- FileError(ValueError)                   a file that cannot be read safely
    |-- UnsupportedError(NotImplementedError)   no backend can do it; says why for each
    |-- KernelBuildError(RuntimeError)          compiled code could not be made
    `-- DistributedError(RuntimeError)          ranks differ, or one does not answer

`MaskLooksBooleanWarning` and `KernelCacheWarning` are the warnings, both `UserWarning`.

A message states the fact with numbers, then what was seen, then one thing to do. The parts are
kept as fields (`fact`, `seen`, `action`), so that programs and tests read data, not prose.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

__all__ = [
    "AmbiguityError",
    "ArgumentError",
    "DTypeError",
    "DistributedError",
    "FileError",
    "KernelBuildError",
    "KernelCacheWarning",
    "KeywordError",
    "MaskLooksBooleanWarning",
    "QkvError",
    "ShapeError",
    "UnsupportedError",
]


class QkvError(Exception):
    """Base of all errors of qkv.

    Parameters
    ----------
    fact : str
        What is wrong, in one sentence, with its numbers.
    seen : iterable of (label, text)
        What was passed, one row each.
    action : str
        One thing to do about it.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> try:
    ...     qkv.attention(np.zeros((2, 4)), np.zeros((2, 3)), np.zeros((2, 3)))
    ... except qkv.QkvError as error:
    ...     type(error).__name__
    'ShapeError'
    """

    def __init__(self, fact: str, seen: Iterable[tuple[str, str]] = (), action: str = "") -> None:
        self.fact = fact
        self.seen = tuple(seen)
        self.action = action
        # torch's compiler reads this, and cannot read the constructors of exceptions.
        self.args = (render(fact, self.seen, action),)

    def with_action(self, action: str) -> Self:
        """The same error with another thing to do."""
        return type(self)(self.fact, self.seen, action)

    def __reduce__(self) -> tuple[type[QkvError], tuple[object, ...]]:
        return type(self), (self.fact, self.seen, self.action)


class ShapeError(QkvError, ValueError):
    """Lengths, heads or dimensions do not fit together."""


class DTypeError(QkvError, TypeError):
    """An array or object of a kind that cannot be used here."""


class AmbiguityError(QkvError, ValueError):
    """The arguments can be read in two ways, and nothing chooses between them."""


class ArgumentError(QkvError, ValueError):
    """An argument is outside what it may be."""


class KeywordError(QkvError, TypeError):
    """A function does not take a keyword; the message has the call to write instead."""


class FileError(QkvError, ValueError):
    """A file is broken, hostile or not of a supported kind."""


class UnsupportedError(QkvError, NotImplementedError):
    """No backend can run the problem; `seen` holds each backend's reason."""


class KernelBuildError(QkvError, RuntimeError):
    """Compiled code could not be made for this machine."""


class DistributedError(QkvError, RuntimeError):
    """Ranks were called with different things, or one of them does not answer."""


class MaskLooksBooleanWarning(UserWarning):
    """A floating array of zeros and ones was added to the scores, where a mask was likely meant."""


class KernelCacheWarning(UserWarning):
    """Compiled kernels cannot be cached on disk; issued once in a process."""


def render(fact: str, seen: tuple[tuple[str, str], ...], action: str) -> str:
    parts = [fact]
    if seen:
        width = max(len(label) for label, _ in seen)
        parts.append("\n".join(f"  {label:<{width}}  {text}".rstrip() for label, text in seen))
    if action:
        parts.append(action)
    return "\n\n".join(parts)


# Tracebacks then show the public names, such as qkv.ShapeError.
for _error in (QkvError, *QkvError.__subclasses__(), MaskLooksBooleanWarning, KernelCacheWarning):
    _error.__module__ = "qkv"
