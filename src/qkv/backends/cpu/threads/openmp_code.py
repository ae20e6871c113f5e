"""The code that runs a job on the threads of an OpenMP library."""

from __future__ import annotations

from llvmlite import ir

from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import INT32, INT64, POINTER, VOID, Emitter, Value
from qkv.backends.cpu.threads.floating_mode import adopt_floating_mode, save_floating_mode
from qkv.backends.cpu.threads.layout import LAUNCH_WORDS, Processor

_OFFSET = {name: 8 * i for i, name in enumerate(LAUNCH_WORDS)}
_PARALLEL = ir.FunctionType(VOID, [POINTER, POINTER, INT32, INT32]).as_pointer()
_THREAD_NUM = ir.FunctionType(INT32, []).as_pointer()
_JOB = ir.FunctionType(VOID, [POINTER, INT64]).as_pointer()


def emit_team(processor: Processor) -> str:
    """The module with `launch(words)`, which runs a job on a team.

    The team has as many threads as the library takes by itself. If it were asked for fewer, it
    would end the others, and start new ones for the caller's next product.
    """
    e = Emitter("qkv_openmp", 1)

    def word(words: Value, name: str) -> Value:
        return e.load(e.at(words, _OFFSET[name]), INT64, WORD)

    def function(words: Value, name: str, kind: ir.PointerType) -> Value:
        return e.builder.inttoptr(word(words, name), kind)

    with e.function("member", [POINTER]) as (member, (words,)):
        b = e.builder
        number = b.zext(b.call(function(words, "thread_num", _THREAD_NUM), []), INT64)
        with b.if_then(e.below(number, word(words, "threads"))):
            own = e.stack_words()
            save_floating_mode(e, processor, own)
            adopt_floating_mode(e, processor, e.at(words, _OFFSET["floating"]))
            arguments = e.pointer(word(words, "arguments"))
            b.call(function(words, "job", _JOB), [arguments, number])
            adopt_floating_mode(e, processor, own)
    with e.function("launch", [POINTER], public=True) as (_, (words,)):
        b = e.builder
        save_floating_mode(e, processor, e.at(words, _OFFSET["floating"]))
        by_default = ir.Constant(INT32, 0)
        launch = function(words, "parallel", _PARALLEL)
        b.call(launch, [b.bitcast(member, POINTER), words, by_default, by_default])
    return str(e.module)
