"""Sinks as a compiled pass of its own: they take their share after the softmax over the keys.

    out = out / (1 + exp(sink - lse)),   lse = log(exp(lse) + exp(sink))

as `qkv.partial.finish` has it, in float64 and rounded once to the type of storage.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.addresses import address_of
from qkv.backends.cpu.compiler.compile import EmitFunction, Kernel, build
from qkv.backends.cpu.emit.argument_block import word_index
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.rows.layout import SINKS_FIELDS, SinksKey
from qkv.backends.cpu.rows.row_pass import RowPass, argument_words

_EMIT = EmitFunction("qkv.backends.cpu.rows.sinks_kernel", "emit_sinks")

Array = NDArray[Any]

__all__ = ["Sinks"]


@lru_cache(maxsize=16)
def _kernel(key: SinksKey, here: Host) -> Kernel:
    return Kernel(build(_EMIT, (key,), here))


class Sinks:
    """Lets the sinks of a call take their share of results of one shape.

    Parameters
    ----------
    sinks : array (num_heads,)
    shape : tuple of int
        Of the output, `(*batch_shape, num_heads, q_len, v_head_dim)`.
    dtype, out_dtype : NumPy dtype
        Of the results over the keys alone, and of the output.
    keeps : bool
        Whether the output before it is rounded is stored in the place of that over the keys.
    """

    def __init__(
        self,
        sinks: Array,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        out_dtype: np.dtype[Any],
        *,
        keeps: bool = False,
    ) -> None:
        wide = host().shape_of(np.dtype(np.float64))
        key = SinksKey(dtype.name, out_dtype.name, wide.lanes, wide.halves, wide.fused, keeps)
        self._sinks = np.array(sinks, np.float64)
        *lead, heads, length, dim = shape
        count = math.prod(lead) * heads
        words = argument_words(
            SINKS_FIELDS,
            {
                "limit": count, "sinks": address_of(self._sinks), "heads": heads,
                "length": length, "dim": dim,
            },
        )  # fmt: skip
        self._entries = count * length * dim
        self._pass = RowPass(_kernel(key, host()), words, _WORDS, count)

    def __call__(
        self, keys_out: int, keys_lse: int, rest: int, out: int, lse: int, keep_alive: Any
    ) -> None:
        """Read and write at these addresses, of memory that `keep_alive` owns; `rest` 0 is none."""
        numbers = keys_out, keys_lse, rest, out, lse
        self._pass.run(numbers, self._entries, (keep_alive, self._sinks))


_WORDS = [word_index(name, SINKS_FIELDS) for name in ("keys_out", "keys_lse", "rest", "out", "lse")]
