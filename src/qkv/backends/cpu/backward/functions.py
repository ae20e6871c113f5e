"""The functions of backward kernels, by what a kernel must do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from qkv.backends.cpu.backward.block import (
    chain_rule_function,
    correct_sums_function,
    drop_weights_function,
    dropout_function,
    products_function,
    score_gradients_function,
    seen_range_function,
    weights_function,
)
from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.backward.gradient_sums import (
    key_sums_function,
    query_sums_function,
    round_pairs_function,
    selected_key_sums_function,
    selected_query_sums_function,
    transpose_function,
)
from qkv.backends.cpu.backward.query_block import QueryBlockPass
from qkv.backends.cpu.backward.query_rows import (
    delta_function,
    narrow_function,
    pack_function,
    pair_rows_function,
    unpack_function,
)
from qkv.backends.cpu.emit.emitter import POINTER, Value
from qkv.backends.cpu.emit.packing import all_finite_function, copy_rows_function
from qkv.backends.cpu.emit.storage import real_dtype
from qkv.problem.language.expressions import TRUE

WeightsFunction: TypeAlias = Callable[[BackwardFrame, str, bool], Value]
ChainRuleFunction: TypeAlias = Callable[[BackwardFrame], Value]


def vector_functions(
    frame: BackwardFrame, weights_function: WeightsFunction, chain_rule_function: ChainRuleFunction
) -> dict[str, Value]:
    """Functions of one vector of queries: mods and masks, dropout, the chain rule."""
    functions = {}
    if not frame.plain:
        functions["full"] = weights_function(frame, "full", False)
    if frame.mask != TRUE:
        functions["partial"] = weights_function(frame, "partial", True)
    if frame.spec.dropout:
        functions["dropout"] = dropout_function(frame)
    if frame.applies_chain_rule:
        functions["chain_rule"] = chain_rule_function(frame)
    return functions


def block_functions(
    frame: BackwardFrame,
    weights_function: WeightsFunction = weights_function,
    chain_rule_function: ChainRuleFunction = chain_rule_function,
) -> dict[str, Value]:
    """Functions that do not depend on the number of vectors.

    The delta correction has functions of its own for the weights, and in place of the chain rule.
    """
    e = frame.e
    functions = {"delta": delta_function(frame), "unpack": unpack_function(frame)}
    for dtype in sorted({real_dtype(e), *frame.dtypes.values()}):
        functions[f"pack {dtype}"] = pack_function(frame, dtype)
    for dtype in sorted({frame.dtypes["key"], frame.dtypes["value"]}):
        functions[f"copy {dtype}"] = copy_rows_function(e, dtype)
    functions |= vector_functions(frame, weights_function, chain_rule_function)
    if frame.in_pairs:
        functions |= {"pair": pair_rows_function(frame), "narrow": narrow_function(frame)}
        if (interleave := frame.packed_pairs().interleave_function("interleave")) is not None:
            functions["interleave"] = interleave
    if frame.in_pairs and frame.may_forbid:
        functions["pair_finite"] = pair_rows_function(frame, finite=True)
        functions["narrow_finite"] = narrow_function(frame, finite=True)
    if frame.corrects_sums:
        functions["correct_sums"] = correct_sums_function(frame)
    if frame.spec.dropout:
        functions["drop_weights"] = drop_weights_function(frame)
    functions["transpose"] = transpose_function(frame)
    functions["key_sums"] = key_sums_function(frame)
    if frame.may_forbid:
        functions["all_finite"] = all_finite_function(e)
        if frame.skips_keys_within_blocks:
            functions["seen_range"] = seen_range_function(frame)
        functions["selected_key_sums"] = selected_key_sums_function(frame)
    return functions


def query_block_function(frame: BackwardFrame, functions: dict[str, Value], vectors: int) -> Value:
    """A function `(arguments, task, block, scratch)` for blocks of `vectors` vectors of queries."""
    of_block = {
        "products": products_function(frame, vectors),
        "score_gradients": score_gradients_function(frame, vectors),
        "query_sums": query_sums_function(frame, vectors),
    }
    if frame.in_pairs:
        of_block["round_pairs"] = round_pairs_function(frame, vectors)
    if frame.may_forbid:
        of_block["selected_query_sums"] = selected_query_sums_function(frame, vectors)
    functions = {**functions, **of_block}
    with frame.e.function(f"query_block_{vectors}", [POINTER] * 4) as (function, args):
        QueryBlockPass(frame, vectors, functions, *args).emit()
    return function
