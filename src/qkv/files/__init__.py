"""Arrays read from untrusted files: safetensors and npz.

Nothing that a file says is believed before it is compared with the bytes that are there. A file is
opened once, headers are parsed within fixed limits, and memory is taken only for arrays whose size
is covered by real bytes. Pickles are never loaded. Whatever is wrong is a `FileError`.

safetensors_format, npz_format
                the readers; contents: the types that they share
regular         what is a file that can be read; writing: arrays into one
described       files of qkv's own, which say in JSON what their arrays are
json_numbers    numbers as JSON, which has no NaN and no infinity
"""

from __future__ import annotations

import io
import os

from qkv.arguments.declarations import checked
from qkv.files.contents import MAX_INFLATED, Arrays, Source
from qkv.files.npz_format import read_npz
from qkv.files.regular import require_regular, unreadable
from qkv.files.safetensors_format import read_safetensors
from qkv.files.writing import write_arrays

__all__ = ["Arrays", "read_array_bytes", "read_arrays", "write_arrays"]


@checked
def read_arrays(path: str | os.PathLike[str]) -> Arrays:
    """Read query, key and value from a safetensors or npz file, recognised by its content.

    Parameters
    ----------
    path : path
        A file with arrays `q`, `k`, `v` (or `query`, `key`, `value`) of float16, bfloat16, float32
        or float64. Tokens are optional: in safetensors a JSON list of strings under the metadata
        key `tokens`, in npz an array `tokens` of str or bytes.

    Returns
    -------
    Arrays
        They own their memory and have the machine's byte order.

    Raises
    ------
    FileError
        The file is missing, unreadable, broken, hostile, or of another kind.

    Notes
    -----
    Takes the bytes of the arrays that it returns, and reads no others.

    Examples
    --------
    >>> import numpy as np, qkv.files, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     x = np.eye(2, dtype="float32")
    ...     np.savez(folder + "/a.npz", q=x, k=x, v=x, tokens=["to", "be"])
    ...     qkv.files.read_arrays(folder + "/a.npz").tokens
    ('to', 'be')
    """
    name = repr(os.fspath(path))
    require_regular(path, "Pass a safetensors or npz file.")
    try:
        with open(path, "rb") as file:
            return _read(Source(file, os.fstat(file.fileno()).st_size, name))
    except OSError as error:
        raise unreadable(name, error) from error


@checked
def read_array_bytes(data: bytes, name: str, most_inflated: int = MAX_INFLATED) -> Arrays:
    """Read query, key and value from the bytes of a safetensors or npz file.

    Parameters
    ----------
    data : bytes
        The whole file.
    name : str
        What to call it in errors.
    most_inflated : int
        Bytes that one compressed array may unpack to.

    Returns
    -------
    Arrays

    Raises
    ------
    FileError
        As for `read_arrays`.

    Examples
    --------
    >>> import io, numpy as np, qkv.files
    >>> x, file = np.eye(2, dtype="float32"), io.BytesIO()
    >>> np.savez(file, q=x, k=x, v=x, tokens=["to", "be"])
    >>> qkv.files.read_array_bytes(file.getvalue(), "a.npz").tokens
    ('to', 'be')
    """
    return _read(Source(io.BytesIO(data), len(data), name, most_inflated))


def _read(source: Source) -> Arrays:
    if source.size == 0:
        raise source.error("is empty")
    start = source.at(0, min(source.size, 10))
    if start[8:9] == b"{":
        return read_safetensors(source)
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return read_npz(source)
    seen = "neither safetensors nor npz"
    if start[:6] == b"\x93NUMPY":
        seen = "a single array"
    elif start[:1] == b"\x80":
        seen = "a pickle, which could run code when loaded"
    raise source.error(f"is {seen}", "Save q, k and v with safetensors or numpy.savez.")
