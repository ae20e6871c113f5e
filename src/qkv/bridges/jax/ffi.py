"""XLA's foreign function interface from Python: a handler that no compiler has seen.

XLA calls a C function with one `XLA_FFI_CallFrame`. Here that function is a ctypes callback, and
the frame is read through the structures below, which are those of `xla/ffi/api/c_api.h` field for
field (version 0.x; a test compares them with the header that jaxlib ships). The callback takes
Python's lock itself, XLA has let go of it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qkv.errors import DTypeError, QkvError

__all__ = ["ANSWER_PATH", "DTYPES", "STRUCTURES", "Compute", "cancelled", "handler"]

Array = NDArray[Any]
Compute = Callable[[str, Sequence[Array], Sequence[Array]], None]
"""The function of a handler: its attribute (a string), inputs and results."""

_SIZE, _POINTER = ctypes.c_size_t, ctypes.c_void_p
_INT, _INT64, _UINT32 = ctypes.c_int, ctypes.c_int64, ctypes.c_uint32

API_VERSION = (0, 3)
"""XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR of the header that the structures were compared with."""
OLDEST_MINOR = 1
"""An XLA that asks without an `XLA_FFI_Api` is of this version."""
EXTENSION_METADATA = 1
CODE_CANCELLED, CODE_INVALID_ARGUMENT, CODE_RESOURCE_EXHAUSTED, CODE_INTERNAL = 1, 3, 8, 13

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.bool_),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    6: np.dtype(np.uint8),
    7: np.dtype(np.uint16),
    8: np.dtype(np.uint32),
    9: np.dtype(np.uint64),
    10: np.dtype(np.float16),
    11: np.dtype(np.float32),
    12: np.dtype(np.float64),
    16: np.dtype(ml_dtypes.bfloat16),
}
"""XLA_FFI_DataType."""


_HEAD = (("struct_size", _SIZE), ("extension_start", _POINTER))
"""How most structures begin."""


class Extension(ctypes.Structure):
    _fields_ = (("struct_size", _SIZE), ("type", _INT), ("next", _POINTER))


class ApiVersion(ctypes.Structure):
    _fields_ = (*_HEAD, ("major_version", _INT), ("minor_version", _INT))


class Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", _SIZE), ("api_version", ApiVersion), ("traits", _UINT32),
        ("state_type_id", _INT64),
    )  # fmt: skip


class MetadataExtension(ctypes.Structure):
    _fields_ = (("extension_base", Extension), ("metadata", ctypes.POINTER(Metadata)))


class ErrorCreateArgs(ctypes.Structure):
    _fields_ = (*_HEAD, ("message", ctypes.c_char_p), ("errc", _INT))


class Api(ctypes.Structure):
    """The beginning of it: as far as it is used."""

    _fields_ = (
        *_HEAD, ("api_version", ApiVersion), ("internal_api", _POINTER),
        ("XLA_FFI_Error_Create", _POINTER),
    )  # fmt: skip


class Buffer(ctypes.Structure):
    _fields_ = (*_HEAD, ("dtype", _INT), ("data", _POINTER), ("rank", _INT64), ("dims", _POINTER))


class ByteSpan(ctypes.Structure):
    _fields_ = (("ptr", _POINTER), ("len", _SIZE))


class Args(ctypes.Structure):
    _fields_ = (*_HEAD, ("size", _INT64), ("types", _POINTER), ("args", _POINTER))


class Rets(ctypes.Structure):
    _fields_ = (*_HEAD, ("size", _INT64), ("types", _POINTER), ("rets", _POINTER))


class Attrs(ctypes.Structure):
    _fields_ = (
        *_HEAD, ("size", _INT64), ("types", _POINTER), ("names", _POINTER), ("attrs", _POINTER),
    )  # fmt: skip


class CallFrame(ctypes.Structure):
    _fields_ = (
        *_HEAD, ("api", ctypes.POINTER(Api)), ("ctx", _POINTER), ("stage", _INT), ("args", Args),
        ("rets", Rets), ("attrs", Attrs), ("future", _POINTER),
    )  # fmt: skip


STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "XLA_FFI_InternalExtension": Extension,
    "XLA_FFI_Api_Version": ApiVersion,
    "XLA_FFI_Metadata": Metadata,
    "XLA_FFI_Metadata_Extension": MetadataExtension,
    "XLA_FFI_Error_Create_Args": ErrorCreateArgs,
    "XLA_FFI_Api": Api,
    "XLA_FFI_Buffer": Buffer,
    "XLA_FFI_ByteSpan": ByteSpan,
    "XLA_FFI_Args": Args,
    "XLA_FFI_Rets": Rets,
    "XLA_FFI_Attrs": Attrs,
    "XLA_FFI_CallFrame": CallFrame,
}

ANSWER_PATH = (CallFrame.api.offset, Api.XLA_FFI_Error_Create.offset)
"""The offset of the error-making function in a call frame."""

_Handler = ctypes.CFUNCTYPE(_POINTER, _POINTER)
_ErrorCreate = ctypes.CFUNCTYPE(_POINTER, _POINTER)


def handler(compute: Compute) -> Any:
    """A C function for XLA that runs `compute`. It has to be kept as long as XLA may call it."""

    def handle(address: int) -> int | None:
        frame = CallFrame.from_address(address)
        extension = frame.extension_start
        if extension and Extension.from_address(extension).type == EXTENSION_METADATA:
            metadata = MetadataExtension.from_address(extension).metadata.contents
            _say_what_this_is(metadata, frame.api)
            return None
        try:
            inputs = _arrays(frame.args.args, frame.args.size)
            results = _arrays(frame.rets.rets, frame.rets.size)
            for array in inputs:
                array.flags.writeable = False
            compute(_only_attribute(frame.attrs), inputs, results)
        except BaseException as error:  # No Python exception may reach C++ code.
            return _failure(frame.api.contents, error)
        return None

    return _Handler(handle)


def cancelled(message: str) -> ctypes.Structure:
    """The arguments of XLA's error function."""
    size = ctypes.sizeof(ErrorCreateArgs)
    return ErrorCreateArgs(size, None, message.encode(errors="replace"), CODE_CANCELLED)


def _say_what_this_is(metadata: Metadata, api: Any) -> None:
    """Which version of the interface this is written for, or XLA's if that is older: what is read
    here has been the same in all."""
    theirs = api.contents.api_version.minor_version if api else OLDEST_MINOR
    if theirs >= API_VERSION[1]:
        metadata.state_type_id = 0  # The structure of earlier versions has no such field.
    major, minor = API_VERSION[0], min(API_VERSION[1], theirs)
    metadata.api_version = ApiVersion(ctypes.sizeof(ApiVersion), None, major, minor)
    metadata.traits = 0


def _arrays(pointers: int | None, count: int) -> list[Array]:
    """Buffers as NumPy arrays over the same memory; XLA's are dense, the last index fastest."""
    if not pointers or not count:
        return []
    places: Any = (_POINTER * count).from_address(pointers)
    return [_array(Buffer.from_address(at)) for at in places]


def _array(buffer: Buffer) -> Array:
    rank = buffer.rank
    shape = tuple((_INT64 * rank).from_address(buffer.dims)) if rank else ()
    try:
        dtype = DTYPES[buffer.dtype]
    except KeyError:
        raise DTypeError(
            f"XLA passed an array {shape} of its type {buffer.dtype}, which qkv cannot read.",
            action="Convert it to a boolean, integer or floating array of 8 to 64 bits.",
        ) from None
    if 0 in shape:
        return np.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    return np.ndarray(shape, dtype, (ctypes.c_char * size).from_address(buffer.data))


def _only_attribute(attrs: Attrs) -> str:
    (at,) = (_POINTER * attrs.size).from_address(attrs.attrs)
    span = ByteSpan.from_address(at)
    return ctypes.string_at(span.ptr, span.len).decode()


def _failure(api: Api, error: BaseException) -> int | None:
    """The exception as an XLA error, which XLA then owns."""
    try:
        said = str(error)
    except BaseException:  # Of a class whose messages fail.
        said = "an error whose message cannot be read"
    if isinstance(error, QkvError):
        code, text = CODE_INVALID_ARGUMENT, said
    elif isinstance(error, KeyboardInterrupt):
        code, text = CODE_CANCELLED, "interrupted"
    else:
        code = CODE_RESOURCE_EXHAUSTED if isinstance(error, MemoryError) else CODE_INTERNAL
        text = f"{type(error).__name__}: {said}"
    # What is not a character, as half of a surrogate pair, is no reason to fail here.
    message = f"qkv: {text}".replace("\0", " ").encode(errors="replace")
    arguments = ErrorCreateArgs(ctypes.sizeof(ErrorCreateArgs), None, message, code)
    made: int | None = _ErrorCreate(api.XLA_FFI_Error_Create)(ctypes.addressof(arguments))
    return made
