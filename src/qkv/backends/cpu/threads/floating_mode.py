"""Rounding and the flushing of subnormal numbers, which each thread has its own setting of.

Bits must not depend on which thread has computed them: a thread that joins a job takes over the
setting of the thread that began it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import INT32, INT64, VOID, Emitter, Value
from qkv.backends.cpu.threads.layout import Processor

_FLUSH = 1 << 15
"""The bit of MXCSR that makes subnormal results 0."""


def save_floating_mode(e: Emitter, processor: Processor, word: Value) -> None:
    """Write the setting of this thread to a word of 64 bits."""
    if processor == "x86":
        e.machine_intrinsic("llvm.x86.sse.stmxcsr", VOID, word)
    elif processor == "arm":
        e.builder.store(e.machine_intrinsic("llvm.aarch64.get.fpcr", INT64), word)


def adopt_floating_mode(e: Emitter, processor: Processor, word: Value) -> None:
    """Give this thread the setting that was written to a word."""
    if processor == "x86":
        e.machine_intrinsic("llvm.x86.sse.ldmxcsr", VOID, word)
    elif processor == "arm":
        e.machine_intrinsic("llvm.aarch64.set.fpcr", VOID, e.builder.load(word, typ=INT64))


@contextmanager
def flushing(e: Emitter) -> Iterator[None]:
    """Let subnormal results of this thread become 0 in code that is emitted meanwhile, on x86.

    There a vector with a subnormal result takes some 150 cycles. The code must be calls of
    functions: LLVM does not know that arithmetic depends on this setting.
    """
    before, now = e.stack_words(), e.stack_words()
    for word in (before, now):
        save_floating_mode(e, "x86", word)
    mode = e.builder.or_(e.load(now, INT32, WORD), ir.Constant(INT32, _FLUSH))
    e.store(mode, now, WORD)
    adopt_floating_mode(e, "x86", now)
    yield
    adopt_floating_mode(e, "x86", before)
