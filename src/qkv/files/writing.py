"""Arrays into a file that `qkv inspect` and `qkv explain` read."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked
from qkv.arrays.views import view
from qkv.errors import ArgumentError, DTypeError, FileError
from qkv.files.contents import shown, writable

__all__ = ["replace_file", "write_arrays"]


_STORED = ("float64", "float32", "float16", "bfloat16")


@checked
def write_arrays(
    path: str | os.PathLike[str],
    query: Any,
    key: Any,
    value: Any,
    tokens: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write query, key, value and their tokens to a safetensors file.

    Parameters
    ----------
    path : path
        Written whole under another name first, then moved here: it is never seen half-written.
    query, key, value : array
        float64, float32, float16 or bfloat16, as `qkv.attention` takes them.
    tokens : sequence of str, optional
        One for each row.
    metadata : mapping of str to str, optional
        Anything else worth keeping, such as the model's name. Lone surrogates, which UTF-8 cannot
        encode, become U+FFFD.

    Raises
    ------
    ArgumentError
        If `metadata` is not such a mapping, or holds "tokens".
    DTypeError
        If an array is of another type.
    FileError
        If the file cannot be written.

    Examples
    --------
    >>> import numpy as np, qkv.files, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     x = np.eye(2, dtype="float32")
    ...     qkv.files.write_arrays(folder + "/a.safetensors", x, x, x, tokens=["to", "be"])
    ...     qkv.files.read_arrays(folder + "/a.safetensors").tokens
    ('to', 'be')
    """
    from safetensors.numpy import save

    arrays = {name: view(a, name) for name, a in (("q", query), ("k", key), ("v", value))}
    for name, array in arrays.items():
        if array.dtype.name not in _STORED:
            raise DTypeError(
                f"{name} has dtype {array.dtype}, not one of {', '.join(_STORED)}.",
                action="Convert it to one of them.",
            )
    header = dict(zip(writable(metadata or ()), writable((metadata or {}).values()), strict=True))
    if "tokens" in header:
        raise ArgumentError(
            "metadata holds 'tokens', which is the place of the tokens themselves.",
            action="Pass them as tokens=.",
        )
    if tokens is not None:
        header["tokens"] = json.dumps(list(tokens))
    dense = {name: _native(array) for name, array in arrays.items()}
    data = save(dense, header)
    replace_file(path, data)


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """Adjacent elements in the order of bytes that the format has, or swaps to it."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole under another name, then move it to `path`.

    It has the mode that `open` gives: that of the file it replaces, else what the umask leaves.
    A link stays, and the file that it leads to is replaced. What is not a regular file, such as
    /dev/stdout or a named pipe, is written to and stays.
    """
    name = os.fspath(path)
    if os.path.exists(name) and not os.path.isfile(name):
        try:
            with open(name, "wb") as device:
                device.write(data)
        except OSError as error:
            raise _not_written(name, error) from error
        return
    real = os.path.realpath(name)
    temporary = os.path.join(os.path.dirname(real), f".qkv-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            try:
                file.write(data)
                file.close()
                with suppress(OSError):
                    shutil.copymode(real, temporary)
                os.replace(temporary, real)
            except BaseException:
                os.unlink(temporary)
                raise
    except OSError as error:
        raise _not_written(name, error) from error


def _not_written(name: str, error: OSError) -> FileError:
    return FileError(
        f"{shown(name)} cannot be written: {error.strerror or error}.",
        action="Check the folder, its permissions and the space left.",
    )
