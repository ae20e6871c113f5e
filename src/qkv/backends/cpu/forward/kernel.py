"""The forward kernel: online softmax with queries in lanes.

One task is one or several blocks of queries of one head (`tasks`), each of `vectors * lanes` rows
at most. Where weights are replayed for few queries, the heads that share a kv head are rows of one
block (`pack_gqa`). Scores are computed transposed, one vector of queries for each key, so that the
maximum, the sum, the rescaling and the mask of a row are all lane-wise:

    S[k, q] = score(scale * K[k, :] . Q[q, :])            -inf where the mask forbids the pair
    m'[q]   = max(m[q], max_k S[k, q])
    P[k, q] = exp(S[k, q] - m'[q])
    l[q]    = exp(m[q] - m'[q]) * l[q] + sum_k P[k, q]
    O[d, q] = exp(m[q] - m'[q]) * O[d, q] + sum_k V[k, d] * P[k, q]

for one block of keys after the other; then `out = O / l` and `lse = m + log(l)`, with the rounding
error of lse for the backward pass. On request the same pass gives max score, max weight and
entropy, from `T[q] = sum_k P[k, q] * (S[k, q] - m[q])`:

    max weight = 1 / l,    entropy = log(l) - T / l

Only Q is packed. K and V are read where they lie if they are of the type of computation and their
elements are adjacent; else each block of keys is first copied side by side, once for all blocks of
queries of a task.

Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
"FlashAttention" (2022), algorithm 1.
"""

from __future__ import annotations

from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.forward.boundary_blocks import BoundaryBlocks
from qkv.backends.cpu.forward.frame import ForwardFrame
from qkv.backends.cpu.forward.layout import ForwardKey, skips_keys_within_blocks
from qkv.backends.cpu.forward.query_block import (
    QueryBlockFunctions,
    advance_function,
)
from qkv.backends.cpu.forward.shared import declare_shared
from qkv.backends.cpu.forward.softmax import softmax_function
from qkv.backends.cpu.forward.tasks import task_function
from qkv.problem.language.expressions import TRUE


def emit_forward(key: ForwardKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left.

    It is linked with those of `shared`.
    """
    frame = ForwardFrame(key)
    e, skips = frame.e, skips_keys_within_blocks(frame.mask)
    functions = declare_shared(frame, may_forbid=key.spec.may_forbid)
    functions["full"] = softmax_function(frame, "full", False)
    if frame.mask != TRUE:
        functions["partial"] = softmax_function(frame, "partial", True)
    at_boundary = BoundaryBlocks(frame, functions).attend if skips else None

    def functions_of(vectors: int) -> QueryBlockFunctions:
        begin, end = (functions[f"{step}_{vectors}"] for step in ("begin", "end"))
        advance = advance_function(frame, vectors, functions, at_boundary)
        return QueryBlockFunctions(begin, advance, end)

    attend = task_function(frame, *map(functions_of, frame.shape.block_sizes))

    def run_task(arguments: Value, number: Value, scratch: Value) -> None:
        e.builder.call(attend, [arguments, number, scratch])

    frame.emit_job(run_task)
    return str(e.module)
