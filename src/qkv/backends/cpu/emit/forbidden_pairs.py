"""How kernels mark pairs of a query and a key that a mask forbids.

A marked pair has the weight -0.0, which no other pair has. In a sum of products it counts as 0.
Where a factor is infinite or NaN, the mark says which products to leave out, because 0 * inf would
be NaN. Gradients of scores that are marked in the same way have 0.0 added first.
"""

from __future__ import annotations

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import Emitter, Value

FORBIDDEN_WEIGHT = -0.0
FORBIDDEN_BFLOAT16 = 1 << 15
"""The bits of this weight as bfloat16."""


def forbidden_bits(e: Emitter) -> Value:
    """The bits of `FORBIDDEN_WEIGHT` in every lane."""
    return e.as_bits(e.const(FORBIDDEN_WEIGHT))


def is_forbidden(e: Emitter, weight: Value) -> Value:
    """Which lanes' pairs are forbidden."""
    return e.builder.icmp_signed("==", e.as_bits(weight), forbidden_bits(e))


def is_allowed(e: Emitter, weight: Value, forbidden: Value | None = None) -> Value:
    """Which lanes' pairs are allowed; `forbidden` is `forbidden_bits(e)`, made before a loop."""
    bits = e.as_bits(weight)
    return e.builder.icmp_signed("!=", bits, forbidden_bits(e) if forbidden is None else forbidden)


def forbidden_weight(e: Emitter, marked: Value) -> Value:
    """What forbidden pairs get as weight: `FORBIDDEN_WEIGHT` if they are to be `marked`, else 0."""
    weights = (ir.Constant(e.real, weight) for weight in (FORBIDDEN_WEIGHT, 0.0))
    return e.splat(e.builder.select(marked, *weights))
