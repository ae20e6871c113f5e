"""Which paths are files that can be read from their beginning, and again."""

from __future__ import annotations

import os
import stat

from qkv.errors import FileError

__all__ = ["require_regular", "unreadable"]


def require_regular(path: str | os.PathLike[str], pass_this: str) -> None:
    """Refuse what is no regular file before it is opened: opening a pipe waits for a writer.

    Raises
    ------
    FileError
        The path is a folder, a pipe or a device, or cannot be read.
    """
    name = repr(os.fspath(path))
    try:
        mode = os.stat(path).st_mode
    except ValueError as error:
        raise FileError(f"{name} is not a path.", action="Pass the path of a file.") from error
    except OSError as error:
        raise unreadable(name, error) from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise FileError(f"{name} is {kind}.", action=pass_this)


def unreadable(name: str, error: OSError) -> FileError:
    """The error for what the system does not let anybody read."""
    return FileError(
        f"{name} cannot be read: {error.strerror or error}.",
        action="Check the path and its permissions.",
    )
