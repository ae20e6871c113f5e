"""What calls must know of the kernel: what its code depends on, and the memory it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qkv.backends.cpu.backward.layout import (
    BackwardKey,
    TableGradient,
    shared_modules,
)
from qkv.backends.cpu.compiler.compile import EmitFunction, Module
from qkv.backends.cpu.emit.argument_block import COMMON_FIELDS, operand_fields
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.layout import round_to_vectors
from qkv.problem.language.expressions import SCORE, Load, Node
from qkv.problem.spec import Spec

BLOCK_KV = 64
"""Keys whose scores are computed at once."""

MOST_KEPT_BLOCKS = 64
"""The most blocks of keys whose scores are kept from the first pass to the second: those of 4,096
keys take 1.5 to 5 MB for each thread. Beyond that they are computed again."""

TASK = ("batch", "kv_head", "first_block", "last_block", "split", "is_first")
"""The words of a task: some blocks of queries of every head that reads one kv head, and whether
they are the first of their split, so that its sums are to be cleared. Behind them follows, for each
table with a gradient, the byte at which the task's copy of it begins."""

ROWS = ("lse_dot", "delta", "delta_dot", "sink_share")
"""What is written for each query in float64. The share of the sink is its weight."""

PAIR_AREAS = (
    "scores", "scores_dot", "products", "products_dot", "d_weights", "d_weights_dot",
)  # fmt: skip
"""Areas with a number for each pair of a block of queries and a block of keys."""


def pair_areas(*, plain: bool, backward: bool) -> dict[str, str]:
    """Where each of `PAIR_AREAS` lies.

    Without score mods products lie where scores do. Without cotangents there is no dP, and its
    place is never used.
    """
    places = {name: name for name in PAIR_AREAS}
    if plain:
        places |= {"products": "scores", "products_dot": "scores_dot"}
    if not backward:
        places |= {"d_weights": "scores", "d_weights_dot": "scores_dot"}
    return places


SUM_ROWS = ("total", "moved", "d_mean", "moved_d_mean", "d_mean_dot")
"""Sums over the keys of a row, in float64: of e, e x, e p, e x p and e pdot.

x is sdot, p is dP and pdot is dPdot, each less what it is for the key of the largest score so far.
Where one key has nearly all the weight, these differences are 0, and nothing large cancels."""

PEAK_ROWS = ("peak", "peak_score_dot", "peak_d_weight", "peak_d_weight_dot")
"""The largest score so far, and sdot, dP and dPdot of its key."""

REAL_ROWS = (*PEAK_ROWS, "share", "lse_dot", "delta", "delta_dot", "grad_lse")
"""Numbers of a row in the type of computation: 1 / total, and r, delta and deltadot, each less what
it would be if the key of the largest score had all the weight."""

OPERANDS = ("query", "query_dot", "key", "key_dot", "value", "value_dot", "grad_out")
"""Arrays of the type of computation, with any strides but for elements, which are adjacent."""

FIELDS = (
    *COMMON_FIELDS,
    *operand_fields(*OPERANDS), "grad_lse", "sinks", "sinks_dot", "blocks", "runs", "q_blocks",
    *(f"{name}_rows" for name in ROWS), "out_dot", "d_query_dot", "kept_blocks",
    "key_sums", "key_sum_row", "key_part", "value_sums", "value_sum_row", "value_part",
)  # fmt: skip
"""The words of the argument block; behind them follows where each area of scratch begins.

What is written is dense, with the heads of all batch rows on one axis. `key_sums` and `value_sums`
have a part for each split of the queries, so many bytes long."""


@dataclass(frozen=True, slots=True)
class TangentKey:
    """Everything that the code of one kernel depends on.

    `score_dot` and `slope_dot` say how a score, and its derivative, change when the product does,
    by `scaled_dot`, and when tables do. With `backward`, gradients have tangents too. Those of
    `tables` are wanted; `load_slopes_dot` says how the derivative by each read of one changes.
    """

    spec: Spec
    shape: TileShape
    int_bits: int
    backward: bool
    score_dot: Node
    slope_dot: Node
    scaled_dot: Load
    tables: tuple[TableGradient, ...] = ()
    load_slopes_dot: tuple[Node, ...] = ()

    @property
    def of_backward(self) -> BackwardKey:
        """A backward kernel with the same functions for rows and sums."""
        real = str(self.spec.compute_dtype)
        return BackwardKey(self.spec, self.shape, self.int_bits, False, real, real, self.tables)


def kept_blocks(kv_len: int) -> int:
    """Blocks of keys whose scores are kept."""
    return min(-(-kv_len // BLOCK_KV), MOST_KEPT_BLOCKS)


def scratch_areas(spec: Spec, shape: TileShape, *, backward: bool) -> dict[str, int]:
    """Bytes of each area of a worker's scratch memory, in order."""
    block_q, item = shape.block_q, spec.compute_dtype.itemsize
    query, value = (
        round_to_vectors(dim, shape.lanes) * block_q for dim in (spec.head_dim, spec.v_head_dim)
    )
    sizes = {
        "query": query, "query_dot": query, "out_sums": value,
        "sums": len(SUM_ROWS) * block_q * (8 // item), "reals": len(REAL_ROWS) * block_q,
    }  # fmt: skip
    if backward:
        sizes |= {
            "grad_out": value, "query_rows": query, "query_dot_rows": query, "grad_rows": value,
            "query_sums": query,
        }  # fmt: skip
    own = set(pair_areas(plain=spec.score == SCORE, backward=backward).values())
    # Blocks that are not kept share one more.
    pairs = BLOCK_KV * block_q * (kept_blocks(spec.kv_len) + 1)
    sizes |= {name: pairs for name in PAIR_AREAS if name in own}
    return {name: size * item for name, size in sizes.items()}


_EMIT_PRODUCTS = EmitFunction("qkv.backends.cpu.tangents.shared", "emit_products")


def shared_with(key: TangentKey) -> tuple[Module, ...]:
    """The modules that a kernel is linked with: sums of the backward pass, and products."""
    sums, _ = shared_modules(key.of_backward, sums_rows=False)
    of_sums, traits = sums.arguments
    same = replace(key.of_backward, spec=key.spec.without_expressions, int_bits=32, tables=())
    # Any pair may be forbidden here: by a score of -inf.
    sums = Module(sums.emit, (of_sums, traits._replace(may_forbid=True)))
    return sums, Module(_EMIT_PRODUCTS, (same,))
