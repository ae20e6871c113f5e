"""Compiled attention for the CPU that it runs on.

The layers of this package, from the top to the bottom. Imports go down this list only, never up,
and packages on one line do not import one another:

    backend       the class `CpuBackend`: what it accepts, and which pass a call goes to
    prepared      calls made ready for arrays of one form, so that repeating them costs little
    passes        one call of a kernel: the choice of it, its argument block, its tasks and threads
    plan | rows   plan: which blocks are computed at all, and what a kernel is compiled for
                  rows: compiled passes over single rows, for rotary embedding, sinks and int8
    split_bf16 | bf16_tiles | tangents
                  split_bf16: kernels for float32 and float16 as sums of bfloat16 on matrix tiles
                  bf16_tiles: the forward kernel for bfloat16 on matrix tiles (AMX)
                  tangents: the kernel for forward mode and gradients of gradients
    backward | bf16_pairs | decode | replay
                  the kernels for gradients, for few queries, and for questions about weights
                  bf16_pairs: the forward kernel for bfloat16 by pairs of it
    forward       the kernel for many queries, and what all forward kernels have
    products      the matrix products that all of these are made of
    threads | python_calls
                  threads: native worker threads
                  python_calls: compiled code that Python calls as built-in functions
    emit | compiler
                  emit: how LLVM IR is written; compiler: IR to machine code, and its cache on disk
    machine       the processor, its instruction set, and the tiles that fit its registers

What happens in a call of `qkv.attention`: `call` checks it and chooses `backend.CpuBackend.run`.
For many queries that makes a `passes.forward.ForwardPass`: it asks `plan.schedule` which blocks of
keys each block of queries needs, asks `machine.host` for the tile, and `compiler.compile.build` for
the machine code of `forward.kernel.emit_forward`, or of one like it, linked with the functions that
kernels for all masks share (`forward.shared`). `ForwardArguments` writes the addresses and strides
of the arrays into an argument block, and `threads.jobs.run` runs the code on one or more threads,
each of which takes tasks from a counter in the block. The kernel has then written `out` and `lse`
into the arrays of a `Partial`, which `run` returns. Few queries go through `passes.decode` instead,
gradients through `passes.gradient`, second derivatives through `passes.tangents`, inspection
through `passes.replay`.

The second call of a kind is prepared (`prepared`), and further ones go straight to
`prepared.kernel.Attend.if_alike`: compiled code looks at the arrays, fills the block, and runs the
job.
"""

from qkv.backends.cpu.backend import CpuBackend, describe_host

__all__ = ["CpuBackend", "describe_host"]
