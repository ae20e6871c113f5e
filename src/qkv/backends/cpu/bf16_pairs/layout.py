"""What calls must know of the kernel for pairs of bfloat16: its memory, and its blocks of keys."""

from __future__ import annotations

from qkv.backends.cpu.compiler.compile import EmitFunction
from qkv.backends.cpu.emit.transposed_loads import transposed_bytes
from qkv.backends.cpu.forward.layout import STATS, ForwardKernel
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.layout import round_to_chunks, round_to_pages
from qkv.problem.spec import Spec

BLOCK_KV = 256
"""Number of keys whose scores are held at once; a multiple of `CHUNK`."""


def scratch_bytes(spec: Spec, shape: TileShape) -> int:
    """Memory of one worker: a block of S, V, K and tables; Q, O and statistics of each block."""
    width = 4 * shape.block_q
    head_dim, v_head_dim = round_to_chunks(spec.head_dim), round_to_chunks(spec.v_head_dim)
    shared = BLOCK_KV * (width + 2 * (head_dim + 2 * v_head_dim))
    own = width * (head_dim // 2 + v_head_dim + STATS)
    transposed = transposed_bytes(spec, BLOCK_KV, 4 * shape.lanes)
    return round_to_pages(shared + shape.q_blocks_per_task * own + transposed)


BF16_PAIRS = ForwardKernel(
    EmitFunction("qkv.backends.cpu.bf16_pairs.kernel", "emit_bf16_pairs"),
    scratch_bytes,
    BLOCK_KV,
)
"""The forward kernel for bfloat16 on machines that multiply pairs of it, and have no tiles."""
