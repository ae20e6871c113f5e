"""The functions of backward kernels, by what a kernel must do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from qkv.backends.cpu.backward.block import (
    chain_rule_function,
    dropout_function,
    seen_range_function,
    weights_function,
)
from qkv.backends.cpu.backward.block_of_queries import BlockCall
from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.backward.query_block import QueryBlockPass
from qkv.backends.cpu.emit.emitter import POINTER, Value
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
    """Functions of a kernel's own, which read its masks and score mods.

    The delta correction has functions of its own for the weights, and in place of the chain rule.
    """
    functions = vector_functions(frame, weights_function, chain_rule_function)
    if frame.may_forbid and frame.skips_keys_within_blocks:
        functions["seen_range"] = seen_range_function(frame)
    return functions


def query_block_function(
    block_pass: type[QueryBlockPass],
    frame: BackwardFrame,
    functions: dict[str, Value],
    vectors: int,
) -> Value:
    """A function `(arguments, task, block, scratch)` for blocks of `vectors` vectors of queries."""
    with frame.e.function(f"query_block_{vectors}", [POINTER] * 4) as (function, args):
        block_pass(frame, vectors, functions, BlockCall(*args)).emit()
    return function
