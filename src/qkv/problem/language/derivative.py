"""Symbolic derivatives of expressions, for gradients through score mods."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from qkv.problem.language.expressions import (
    SCORE,
    Load,
    Node,
    Op,
    Var,
    constant,
    operation,
    upwards,
)

ZERO, ONE = constant(0.0), constant(1.0)


def derivative(node: Node, wrt: Var | Load = SCORE) -> Node:
    """How `node` changes with one of its floating variables or table entries, as an expression."""
    return tangent(node, {wrt: ONE})


def tangent(node: Node, tangents: Mapping[Node, Node]) -> Node:
    """How `node` changes when variables and table entries in it do, each by its own expression.

    Piecewise operations have the derivative of the piece; where pieces meet, `min` and `max` give
    the mean of both sides and `abs` gives 0, as PyTorch does. Integers and conditions do not
    change. A part in which nothing moves is exactly 0, whatever it is multiplied with.
    """
    changes: dict[Node, Node] = dict(tangents)
    for n in upwards(node, changes):
        changes[n] = ZERO
        # Table indices are integers, so a table entry has no derivative by its index.
        if n.kind == "float" and isinstance(n, Op):
            of_args = tuple([changes[arg] for arg in n.args])
            if any(change != ZERO for change in of_args):
                changes[n] = RULES[n.name](n, of_args)
    return changes[node]


def _plus(a: Node, b: Node) -> Node:
    if ZERO in (a, b):
        return b if a == ZERO else a
    return operation("add", a, b)


def _minus(a: Node, b: Node) -> Node:
    if b == ZERO:
        return a
    return operation("neg", b) if a == ZERO else operation("sub", a, b)


def _times(a: Node, b: Node) -> Node:
    if ZERO in (a, b):
        return ZERO
    if ONE in (a, b):
        return b if a == ONE else a
    return operation("mul", a, b)


def _over(a: Node, b: Node) -> Node:
    return ZERO if a == ZERO else operation("div", a, b)


def _where(condition: Node, a: Node, b: Node) -> Node:
    return a if a == b else operation("where", condition, a, b)


def _minimum(op: Op, d: tuple[Node, ...]) -> Node:
    return _piecewise(operation("lt", *op.args), operation("lt", *op.args[::-1]), d)


def _maximum(op: Op, d: tuple[Node, ...]) -> Node:
    return _piecewise(operation("lt", *op.args[::-1]), operation("lt", *op.args), d)


def _piecewise(first: Node, second: Node, d: tuple[Node, ...]) -> Node:
    mean = _times(constant(0.5), _plus(*d))
    return _where(first, d[0], _where(second, d[1], mean))


def _abs(op: Op, d: tuple[Node, ...]) -> Node:
    (x,) = op.args
    falling = operation("lt", x, constant(0))
    rising = operation("lt", constant(0), x)
    return _where(rising, d[0], _where(falling, _minus(ZERO, d[0]), ZERO))


RULES: Mapping[str, Callable[[Op, tuple[Node, ...]], Node]] = {
    "add": lambda op, d: _plus(*d),
    "sub": lambda op, d: _minus(*d),
    "mul": lambda op, d: _plus(_times(d[0], op.args[1]), _times(op.args[0], d[1])),
    "div": lambda op, d: _minus(_over(d[0], op.args[1]), _times(op, _over(d[1], op.args[1]))),
    "min": _minimum,
    "max": _maximum,
    "neg": lambda op, d: _minus(ZERO, d[0]),
    "abs": _abs,
    "where": lambda op, d: _where(op.args[0], d[1], d[2]),
    "exp": lambda op, d: _times(op, d[0]),
    "log": lambda op, d: _over(d[0], op.args[0]),
    "sqrt": lambda op, d: _over(d[0], _times(constant(2.0), op)),
    "tanh": lambda op, d: _times(_minus(ONE, _times(op, op)), d[0]),
}
"""The derivative of each operation that gives a float, from its arguments' derivatives."""
