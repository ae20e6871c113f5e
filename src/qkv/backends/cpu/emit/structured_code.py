"""LLVM IR written as structured code: functions, loops that carry values, integers, addresses.

All integers that count or address are 64-bit, and all pointers point to bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from llvmlite import ir

Value: TypeAlias = Any

VOID = ir.VoidType()
BYTE = ir.IntType(8)
INT64 = ir.IntType(64)
POINTER = ir.PointerType()
CACHE_LINE = 64


def _split_constants(terms: Sequence[Any]) -> tuple[list[Value], list[int]]:
    """The values among the terms that are computed, and the numbers that are known."""
    values, known = [], []
    for term in terms:
        if isinstance(term, ir.Constant):
            known.append(int(term.constant))
        elif isinstance(term, ir.Value):
            values.append(term)
        else:
            known.append(int(term))
    return values, known


Maker: TypeAlias = Callable[..., Value]
"""`make(write, *arguments)`: a function that `write` writes, or its declaration."""


def written(write: Callable[..., Value], *arguments: Any, **options: Any) -> Value:
    """The function that `write` writes, as `StructuredCode.declared` gives its declaration."""
    return write(*arguments, **options)


class _Declared(Exception):
    """Ends the writing of a function of which only the declaration is wanted."""

    def __init__(self, function: Value) -> None:
        self.function = function


class StructuredCode:
    """Holds one module, and the place where the next instruction goes."""

    def __init__(self, name: str) -> None:
        self.module = ir.Module(name)
        self.builder: Any = None
        self._declares = False

    # Functions and control flow

    @contextmanager
    def function(
        self,
        name: str,
        arguments: Sequence[Any],
        result: Any = VOID,
        *,
        public: bool = False,
        in_place: bool = False,
    ) -> Iterator[tuple[Any, Sequence[Value]]]:
        """Write the body of a function.

        Pointers of an internal function do not alias, unless it writes what it reads (`in_place`).
        """
        function = ir.Function(self.module, ir.FunctionType(result, arguments), name)
        if self._declares:
            raise _Declared(function)
        outside = self.builder
        self.builder = ir.IRBuilder(function.append_basic_block())
        if not public:
            function.linkage = "internal"
            # Vectors that are spilled to the stack then do not straddle cache lines.
            function.attributes.alignstack = CACHE_LINE
            for argument in function.args:
                if isinstance(argument.type, ir.PointerType) and not in_place:
                    argument.add_attribute("noalias")
        yield function, function.args
        if not self.builder.block.is_terminated:
            self.builder.ret_void()
        self.builder = outside

    def declared(self, write: Callable[..., Value], *arguments: Any, **options: Any) -> Value:
        """The function that `write(*arguments)` writes into another module, declared in this one.

        `function` stops `write` before the body, so that names and types are said in one place.
        """
        self._declares = True
        try:
            write(*arguments, **options)
        except _Declared as found:
            return found.function
        finally:
            self._declares = False
        raise TypeError(f"{write.__name__} writes no function")

    def sharing(self, functions: Sequence[Value]) -> str:
        """The text of the module; others may call these internal functions of it."""
        for function in functions:
            function.linkage = "external"
        return str(self.module)

    def loop(
        self,
        start: Any,
        stop: Any,
        step: Any,
        carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value] | None],
    ) -> list[Value]:
        """`for i in range(start, stop, step)`; `body(i, carried)` gives the next carried values."""
        b, before = self.builder, self.builder.block
        if isinstance(start, int) and isinstance(stop, int) and start < stop <= start + step:
            return list(body(self.index(start), list(carried)) or ())
        start, stop = self.index(start), self.index(stop)
        inside, after = (b.append_basic_block(part) for part in ("body", "after"))
        # The condition follows the body, which is the form that LLVM generates good code for.
        b.cbranch(b.icmp_signed("<", start, stop), inside, after)
        b.position_at_end(inside)
        index, *values = (b.phi(value.type) for value in (start, *carried))
        following = list(body(index, list(values)) or ())
        next_index = self.add(index, step)
        b.cbranch(b.icmp_signed("<", next_index, stop), inside, after)
        last = b.block
        b.position_at_end(after)
        results = [b.phi(value.type) for value in carried]
        firsts, nexts = [start, *carried, *carried], [next_index, *following, *following]
        for phi, first, value in zip([index, *values, *results], firsts, nexts, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(value, last)
        return results

    def find(self, count: Value, condition: Callable[[Value], Value]) -> Value:
        """The first i below `count` for which `condition(i)` holds, or `count` if none does."""
        b, before = self.builder, self.builder.block
        head, inside, after = (b.append_basic_block(part) for part in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(INT64)
        index.add_incoming(self.index(0), before)
        b.cbranch(b.icmp_signed("<", index, count), inside, after)
        b.position_at_end(inside)
        holds = condition(index)
        index.add_incoming(b.add(index, self.index(1)), b.block)
        b.cbranch(holds, after, head)
        b.position_at_end(after)
        return index

    def take_while(
        self, take: Callable[[], tuple[Any, Value]], body: Callable[[Any], None]
    ) -> None:
        """`while (item, more := take())[1]: body(item)`."""
        b = self.builder
        head, inside, after = (b.append_basic_block(part) for part in ("take", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        item, more = take()
        b.cbranch(more, inside, after)
        b.position_at_end(inside)
        body(item)
        b.branch(head)
        b.position_at_end(after)

    def choose(
        self, condition: Value, first: Callable[[], object], second: Callable[[], object]
    ) -> None:
        with self.builder.if_else(condition) as (then, otherwise):
            with then:
                first()
            with otherwise:
                second()

    def either(
        self, condition: Value, first: Callable[[], Value], second: Callable[[], Value]
    ) -> Value:
        """The value of one of the two, which alone is computed."""
        b = self.builder
        values = []
        with b.if_else(condition) as branches:
            for branch, compute in zip(branches, (first, second), strict=True):
                with branch:
                    values.append((compute(), b.block))
        phi = b.phi(values[0][0].type)
        for value, block in values:
            phi.add_incoming(value, block)
        return phi

    # Integers and addresses

    def index(self, value: Any) -> Value:
        return value if isinstance(value, ir.Value) else ir.Constant(INT64, value)

    def add(self, *terms: Any) -> Value:
        values, known = _split_constants(terms)
        total = self.index(sum(known)) if sum(known) or not values else values.pop(0)
        for value in reversed(values):
            total = self.builder.add(value, total)
        return total

    def sub(self, a: Any, b: Any) -> Value:
        values, known = _split_constants((a, b))
        if not values:
            return self.index(known[0] - known[1])
        if known == [0] and values == [a]:
            return a
        return self.builder.sub(self.index(a), self.index(b))

    def mul(self, *factors: Any) -> Value:
        values, known = _split_constants(factors)
        constant = math.prod(known)
        if not values or constant == 0:
            return self.index(constant)
        product = values[0]
        for value in values[1:]:
            product = self.builder.mul(product, value)
        return product if constant == 1 else self.builder.mul(product, self.index(constant))

    def least(self, a: Any, b: Any) -> Value:
        a, b = self.index(a), self.index(b)
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def larger_of(self, a: Any, b: Any) -> Value:
        a, b = self.index(a), self.index(b)
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def below(self, a: Any, b: Any) -> Value:
        return self.builder.icmp_signed("<", self.index(a), self.index(b))

    def round_down(self, a: Value, multiple: int) -> Value:
        return self.sub(a, self.builder.srem(a, self.index(multiple)))

    def at(self, pointer: Value, *offsets: Any) -> Value:
        """The pointer moved by a number of bytes."""
        offset = self.add(*offsets)
        if isinstance(offset, ir.Constant) and offset.constant == 0:
            return pointer
        return self.builder.gep(pointer, [offset], source_etype=BYTE)

    def pointer(self, address: Value) -> Value:
        return self.builder.inttoptr(address, POINTER)
