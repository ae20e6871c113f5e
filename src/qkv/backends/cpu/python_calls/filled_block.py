"""What is expected of the operands of a prepared call, and the functions that fill its block.

The compiled code reads NumPy's array objects, so it is tried before it is relied on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.addresses import address_of
from qkv.backends.cpu.compiler.compile import Code, EmitFunction, build
from qkv.backends.cpu.emit.argument_block import WORD, ArgumentBlock
from qkv.backends.cpu.machine.host import host
from qkv.backends.cpu.python_calls.function import address_of_c_function, python_function
from qkv.backends.cpu.python_calls.layout import CALL_WORDS, PLACES
from qkv.errors import KernelBuildError

_EMIT = EmitFunction("qkv.backends.cpu.python_calls.code", "emit_calls")

Array = NDArray[Any]
Fill: TypeAlias = Callable[..., int]

__all__ = ["Axis", "Fill", "FilledBlock", "Operand", "operand_of"]


class Axis(NamedTuple):
    """What is expected of an axis.

    `size` is -1 for the number of keys. If any stride will do, it goes to the word `place`, which
    is else 0. The axis of an array has an entry for so many `keys`, unless this is 0.
    """

    size: int
    stride: int
    place: int = 0
    keys: int = 0


class Operand(NamedTuple):
    """What is expected of an operand, and the word of the block that its address goes to.

    Numbers that are only written have no dtype. An array of pages of `page_rows` keys, which is
    else 0, has one more axis than `axes`, the first, with a stride of `page` bytes.
    """

    place: int
    dtype: np.dtype[Any] | None = None
    axes: Sequence[Axis] = ()
    page: int = 0
    page_rows: int = 0


def operand_of(place: int, array: Array) -> Operand:
    """An operand of exactly this dtype, shape and strides."""
    return Operand(place, array.dtype, list(map(Axis, array.shape, array.strides)))


class FilledBlock(NamedTuple):
    """An argument block and the compiled functions that fill it; see `code.emit_calls`.

    Attributes
    ----------
    block : ArgumentBlock
    read : callable
        Takes the position of the first query, or None, and arrays; None where NumPy's array
        objects cannot be read.
    write : callable
        Takes addresses alone if the number of keys is fixed, else what `step` takes.
    """

    block: ArgumentBlock
    read: Fill | None
    write: Fill

    @classmethod
    def of(
        cls,
        block: ArgumentBlock,
        operands: Sequence[Operand],
        call: Mapping[str, int],
        *,
        is_step: bool = False,
    ) -> FilledBlock:
        """The block for query, key, value, results, and the arrays of variants, if there are any.

        `call` is of `CALL_WORDS`, but counts words, not bytes. `is_step` says that the number of
        keys is free.
        """
        made = cls._untried(block, operands, call, is_step)
        return made if _can_read() else made._replace(read=None)

    @classmethod
    def if_possible(
        cls,
        block: ArgumentBlock,
        operands: Sequence[Operand],
        call: Mapping[str, int],
        *,
        is_step: bool = False,
    ) -> FilledBlock | None:
        """The block of `of`; None if the process has given up making code since the first call."""
        with suppress(KernelBuildError):
            return cls.of(block, operands, call, is_step=is_step)
        return None

    @classmethod
    def _untried(
        cls,
        block: ArgumentBlock,
        operands: Sequence[Operand],
        call: Mapping[str, int],
        is_step: bool = False,
    ) -> FilledBlock:
        filled = {
            **dict.fromkeys(CALL_WORDS, 0),
            **call,
            **{name: WORD * call.get(name, 0) for name in PLACES},
            **{name: address_of_c_function(c_name) for name, c_name in _C_FUNCTIONS.items()},
            "none": id(None),
            "block": block.address,
        }
        words = [filled[name] for name in CALL_WORDS]
        for place, dtype, axes, page, page_rows in operands:
            item = 0 if dtype is None else dtype.itemsize
            words += [WORD * place, id(dtype), item, len(axes), page, page_rows]
            for size, stride, stride_place, keys in axes:
                words += [size, stride, WORD * stride_place, keys]
        own, code = np.array(words, np.int64).view(_Words), _code()
        # Threads that come at the same time may each have code of their own.
        own.keep_alive = block, code, [operand.dtype for operand in operands]
        read, write, step = [python_function(code.address(name), own) for name in _NAMES]
        return cls(block, read, step if is_step else write)


_NAMES = ("read", "write", "step")
_C_FUNCTIONS = {
    "from_long_long": "PyLong_FromLongLong",
    "as_long_long": "PyLong_AsLongLong",
    "tuple_size": "PyTuple_Size",
    "tuple_item": "PyTuple_GetItem",
}
"""Functions of Python's C interface that compiled code calls."""


class _Words(np.ndarray[Any, Any]):
    """Words that keep alive what they have the addresses of."""

    keep_alive: Any


@lru_cache(maxsize=1)
def _can_read() -> bool:
    """Whether NumPy's arrays are what the compiled code takes them for."""
    array = np.empty((3, 1, 2, 5), np.float32)[::2, :, :, ::2]
    block = ArgumentBlock(np.zeros(5, np.int64))
    operands = [*[operand_of(n, array) for n in range(3)], Operand(3), Operand(4)]
    read = FilledBlock._untried(block, operands, {"results": 2}).read
    assert read is not None
    if read(None, *[array] * 5) != 1:
        return False
    if list(block.words) != [address_of(array)] * 5:
        return False
    return not any(
        read(None, *[other if n == place else array for n in range(3)], array)
        for other in _unlike(array)
        for place in range(3)
    )


def _unlike(array: Array) -> Iterator[Array]:
    """Arrays that are unlike this one, each in one way."""
    yield array.view(np.int32)
    yield array[0]
    yield array[:1]
    yield array.copy()


@lru_cache(maxsize=1)
def _code() -> Code:
    return build(_EMIT, (object.__basicsize__,), host(), _NAMES)
