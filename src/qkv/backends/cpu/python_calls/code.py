"""Built-in functions of Python that fill an argument block, and run short jobs at once.

Python would take longer for that than attention to a few tokens. `read` is given arrays of NumPy,
and asks whether they are laid out as expected; `write` is given addresses, `step` also sizes and
strides. NumPy's C interface fixes how an array object begins, because every extension module is
compiled with it: after Python's object header come the address of the data, the number of axes, the
addresses of shape and strides, the object that it is a view of, and the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from qkv.backends.cpu.emit.argument_block import WORD
from qkv.backends.cpu.emit.emitter import BIT, INT32, INT64, POINTER, VOID, Emitter, Value
from qkv.backends.cpu.python_calls.layout import AXIS_WORDS, CALL_WORDS, OPERAND_WORDS

_DATA, _NDIM, _SHAPE, _STRIDES, _DTYPE = 0, 8, 16, 24, 40
"""Bytes behind the object header."""
_ANY, _UNLIKE = -1, -2
"""What stands for a number of keys that may be any, and for one that is not as expected."""
_DONE = -1
"""The result if the job is done."""
_OPERANDS = 3
"""Query, key and value."""
_FROM_LONG_LONG = ir.FunctionType(POINTER, [INT64]).as_pointer()
_AS_LONG_LONG = ir.FunctionType(INT64, [POINTER]).as_pointer()
_TUPLE_SIZE = _AS_LONG_LONG
_TUPLE_ITEM = ir.FunctionType(POINTER, [POINTER, INT64]).as_pointer()
_JOB = ir.FunctionType(VOID, [POINTER, INT64]).as_pointer()


def emit_calls(header: int) -> str:
    """The module with `read`, `write` and `step`; `header` is the bytes of Python's object header.

    `read(q_shift, query, key, value, *results, *arrays)` takes arrays, or None for a result that is
    not wanted. It writes their addresses, and what may differ from call to call, into the block,
    and runs the job if there is one for so many keys. `q_shift` is the position of the first query,
    or None, and then the words of the call say it. The result is 0 if an operand is not as expected
    or the job's output is not finite; -1 if the job is done; else the number of keys, or 1 if that
    is fixed. Another number of arguments is unlike too.

    `write(*addresses)` takes a number for each of these; they are known to be as expected, and the
    number of keys is fixed.

    `step(q_shift, in_elements, *addresses, *layouts)` is for any number of keys. It takes the
    position of the first query, whether strides are in elements, not bytes, the addresses, which
    are not 0 but for results, and of query, key, value and each array a tuple of its sizes and one
    of its strides. Both give what `read` does.
    """
    e = Emitter("qkv_calls", 1)
    _Calls(e, header).emit()
    return str(e.module)


class _Calls:
    """Writes the functions."""

    def __init__(self, e: Emitter, header: int) -> None:
        self.e = e
        self.header = header

    def emit(self) -> None:
        run_job = self._job_function()
        self._emit_read(run_job)
        self._emit_step(run_job)
        self._emit_write(run_job)

    def _emit_write(self, run_job: Value) -> None:
        e = self.e
        with e.function("write", [POINTER, POINTER, INT64], POINTER, public=True) as (_, arguments):
            own, objects, count = arguments
            expected = e.pointer(self.part(own, _DATA))
            block = e.pointer(self.call_word(expected, "block"))
            as_number = e.builder.inttoptr(self.call_word(expected, "as_long_long"), _AS_LONG_LONG)

            def write(n: Value, carried: list[Value]) -> list[Value]:
                (place,) = carried
                given = self.given(objects, n)
                e.store(e.builder.call(as_number, [given]), e.at(block, self.word(place)), WORD)
                return [self.next_operand(place)]

            e.loop(0, count, 1, [e.at(expected, WORD * len(CALL_WORDS))], write)
            self.give(expected, e.builder.call(run_job, [expected, block]))

    def word(self, place: Value, number: int = 0) -> Value:
        return self.e.load(self.e.at(place, WORD * number), INT64, WORD)

    def given(self, objects: Value, n: Any) -> Value:
        """The address of argument n of a call."""
        return self.e.pointer(self.word(self.e.at(objects, self.e.mul(n, WORD))))

    def call_word(self, expected: Value, name: str) -> Value:
        return self.word(expected, CALL_WORDS.index(name))

    def part(self, array: Value, offset: int) -> Value:
        """A word of an array object."""
        return self.word(self.e.at(array, self.header + offset))

    def operand_words(self, place: Value) -> list[Value]:
        """What is expected of an operand."""
        return [self.word(place, n) for n in range(len(OPERAND_WORDS))]

    def next_operand(self, place: Value) -> Value:
        """Where what is expected of the next operand begins."""
        axes = self.word(place, OPERAND_WORDS.index("ndim"))
        size = self.e.mul(axes, WORD * len(AXIS_WORDS))
        return self.e.at(place, WORD * len(OPERAND_WORDS), size)

    def give(self, expected: Value, number: Value) -> None:
        """Return an integer to Python."""
        b = self.e.builder
        make = b.inttoptr(self.call_word(expected, "from_long_long"), _FROM_LONG_LONG)
        b.ret(b.call(make, [number]))

    def _job_function(self) -> Value:
        """A function `(expected, block)` that runs the job, if there is one, and gives the result
        of `write`."""
        e = self.e
        with e.function("run_job", [POINTER, POINTER], INT64) as (function, (expected, block)):
            b, job = e.builder, self.call_word(expected, "job")
            with b.if_then(b.icmp_signed("==", job, e.index(0))):
                b.ret(e.index(1))
            e.store(e.index(0), block, WORD)  # The counter of tasks.
            argument = self.call_word(expected, "job_argument")
            b.call(b.inttoptr(job, _JOB), [block, argument])
            place = self.call_word(expected, "not_finite")
            with b.if_then(b.icmp_signed("!=", place, e.index(0))):
                not_finite = e.at(block, place)
                with b.if_then(b.icmp_signed("!=", self.word(not_finite), e.index(0))):
                    e.store(e.index(0), not_finite, WORD)
                    b.ret(e.index(0))
            b.ret(e.index(_DONE))
        return function

    def _emit_read(self, run_job: Value) -> None:
        e, fits_axes = self.e, self._axes_function()
        with e.function("read", [POINTER, POINTER, INT64], POINTER, public=True) as (_, arguments):
            own, objects, count = arguments
            b, checks = e.builder, _Checks(self, own)
            expected, call, block = checks.expected, checks.call, checks.block
            require = checks.require
            first_result = 1 + _OPERANDS
            first_array = e.add(call["results"], first_result)
            end = e.add(first_array, call["arrays"])
            require(b.icmp_signed("==", count, end))
            place, keys = e.at(expected, WORD * len(CALL_WORDS)), e.index(_ANY)

            given = partial(self.given, objects)

            def read(n: Any, place: Value, keys: Value, is_array: int) -> Value:
                """Read an array that must be as expected; the number of keys, if it is known."""
                array = given(n)
                address_place, dtype, _, ndim, page, page_rows = self.operand_words(place)
                is_paged = b.icmp_signed("!=", page_rows, e.index(0))
                page_axes = b.zext(is_paged, INT64)
                own_ndim = b.sext(e.load(e.at(array, self.header + _NDIM), INT32, 4), INT64)
                is_kind = b.icmp_signed("==", self.part(array, _DTYPE), dtype)
                require(b.and_(is_kind, b.icmp_signed("==", own_ndim, e.add(ndim, page_axes))))
                # An array without axes may have no strides.
                strides = b.select(is_paged, e.pointer(self.part(array, _STRIDES)), place)
                has_page = b.icmp_signed("==", self.word(strides), page)
                require(b.or_(b.not_(is_paged), has_page))
                axes = e.at(place, WORD * len(OPERAND_WORDS))
                of_call = axes, ndim, keys, block, e.index(is_array), page_axes, page_rows
                keys = b.call(fits_axes, [array, *of_call])
                require(b.icmp_signed("!=", keys, e.index(_UNLIKE)))
                e.store(self.part(array, _DATA), e.at(block, address_place), WORD)
                return keys

            for n in range(_OPERANDS):
                keys = read(e.index(1 + n), place, keys, 0)
                place = self.next_operand(place)

            def read_result(n: Value, carried: list[Value]) -> list[Value]:
                (place,) = carried
                given_place = e.at(block, self.word(place))
                result = given(n)
                e.store(e.index(0), given_place, WORD)
                is_wanted = b.icmp_signed("!=", b.ptrtoint(result, INT64), call["none"])
                with b.if_then(is_wanted):
                    e.store(self.part(result, _DATA), given_place, WORD)
                return [self.next_operand(place)]

            def read_array(n: Value, carried: list[Value]) -> list[Value]:
                place, keys = carried
                keys = read(n, place, keys, 1)
                return [self.next_operand(place), keys]

            (place,) = e.loop(first_result, first_array, 1, [place], read_result)
            _, keys = e.loop(first_array, end, 1, [place, keys], read_array)
            with b.if_then(b.icmp_signed("==", call["kv_len"], e.index(0))):
                self.give(expected, b.call(run_job, [expected, block]))
            # With equal lengths the positions of queries may be left out, which is another call.
            require(b.icmp_signed("!=", keys, call["q_len"]))
            require(b.and_(e.below(0, keys), e.below(keys, e.add(call["longest"], 1))))
            shift = given(e.index(0))
            at_end = e.mul(call["at_end"], e.sub(keys, call["q_len"]))
            is_given = b.icmp_signed("!=", b.ptrtoint(shift, INT64), call["none"])
            as_number = b.inttoptr(call["as_long_long"], _AS_LONG_LONG)
            as_given = partial(b.call, as_number, [shift])
            shift = e.either(is_given, as_given, lambda: at_end)
            self._require_shift(checks, shift)
            self._finish_step(checks, run_job, keys, shift)

    def _emit_step(self, run_job: Value) -> None:
        e = self.e
        with e.function("step", [POINTER, POINTER, INT64], POINTER, public=True) as (_, arguments):
            own, objects, count = arguments
            b, checks = e.builder, _Checks(self, own)
            expected, call, block = checks.expected, checks.call, checks.block
            require = checks.require
            first_address = 2
            first_array = e.add(call["results"], first_address + _OPERANDS)
            layouts = e.add(first_array, call["arrays"])
            end = e.add(layouts, e.mul(2, e.add(call["arrays"], _OPERANDS)))
            require(b.icmp_signed("==", count, end))
            as_number = b.inttoptr(call["as_long_long"], _AS_LONG_LONG)
            tuple_size = b.inttoptr(call["tuple_size"], _TUPLE_SIZE)
            tuple_item = b.inttoptr(call["tuple_item"], _TUPLE_ITEM)

            given = partial(self.given, objects)

            def argument(n: Any) -> Value:
                return b.call(as_number, [given(n)])

            def entry(of: Value, i: Value) -> Value:
                return b.call(as_number, [b.call(tuple_item, [of, i])])

            shift, longest = argument(e.index(0)), call["longest"]
            in_elements = b.icmp_signed("!=", argument(e.index(1)), e.index(0))

            def read(at: Any, layout: Value, place: Value, keys: Value, is_array: int) -> Value:
                """Read what must be as expected; the number of keys."""
                address_place, _, item, ndim, *_ = self.operand_words(place)
                address, sizes, strides = argument(at), given(layout), given(e.add(layout, 1))
                e.store(address, e.at(block, address_place), WORD)
                is_there = b.icmp_signed("!=", address, e.index(0))
                for part in (sizes, strides):
                    has_axes = b.icmp_signed("==", b.call(tuple_size, [part]), ndim)
                    is_there = b.and_(is_there, has_axes)
                require(is_there)
                unit = b.select(in_elements, item, e.index(1))

                def own_axis(i: Value) -> tuple[Value, Value]:
                    return entry(sizes, i), e.mul(entry(strides, i), unit)

                axes = e.at(place, WORD * len(OPERAND_WORDS))
                keys = self._fitting_axes(axes, ndim, keys, block, e.index(is_array), own_axis)
                require(b.icmp_signed("!=", keys, e.index(_UNLIKE)))
                return keys

            place, keys = e.at(expected, WORD * len(CALL_WORDS)), e.index(_ANY)
            for n in range(_OPERANDS):
                keys = read(e.index(first_address + n), e.add(layouts, 2 * n), place, keys, 0)
                place = self.next_operand(place)

            def write_result(n: Value, carried: list[Value]) -> list[Value]:
                (place,) = carried
                e.store(argument(n), e.at(block, self.word(place)), WORD)
                return [self.next_operand(place)]

            def read_array(n: Value, carried: list[Value]) -> list[Value]:
                place, layout = carried
                read(n, layout, place, keys, 1)
                return [self.next_operand(place), e.add(layout, 2)]

            (place,) = e.loop(first_address + _OPERANDS, first_array, 1, [place], write_result)
            start = [place, e.add(layouts, 2 * _OPERANDS)]
            e.loop(first_array, layouts, 1, start, read_array)
            require(b.and_(e.below(0, keys), b.icmp_signed("<=", keys, longest)))
            self._require_shift(checks, shift)
            self._finish_step(checks, run_job, keys, shift)

    def _require_shift(self, checks: _Checks, shift: Value) -> None:
        """Require a position of the first query for which the code was made."""
        e, b, longest = self.e, self.e.builder, checks.call["longest"]
        checks.require(b.icmp_signed("<=", shift, longest))
        checks.require(b.icmp_signed(">=", shift, e.sub(0, longest)))

    def _finish_step(self, checks: _Checks, run_job: Value, keys: Value, shift: Value) -> None:
        """Write these words, and run the job if it takes so many keys; nothing may follow."""
        e, b, call = self.e, self.e.builder, checks.call
        e.store(keys, e.at(checks.block, call["kv_len"]), WORD)
        e.store(shift, e.at(checks.block, call["q_shift"]), WORD)
        with b.if_then(b.icmp_signed("<=", keys, call["job_keys"])):
            self.give(checks.expected, b.call(run_job, [checks.expected, checks.block]))
        self.give(checks.expected, keys)
        checks.end()

    def _fitting_axes(
        self,
        axes: Value,
        ndim: Value,
        keys: Value,
        block: Value,
        is_array: Value,
        own_axis: Callable[[Value], tuple[Value, Value]],
        page_rows: Value | None = None,
    ) -> Value:
        """Compare sizes and strides with the expected ones, and write those that may differ.

        `own_axis(i)` gives a size, and a stride in bytes. `keys` is the number of keys, `_ANY` if
        it is not known yet. It is returned, or `_UNLIKE`. An array of pages has `page_rows`, which
        is else 0, where others have an entry for each key.
        """
        e, b = self.e, self.e.builder
        is_of_variant = b.icmp_signed("!=", is_array, e.index(0))

        def read_axis(i: Value, carried: list[Value]) -> list[Value]:
            is_alike, known_keys = carried
            axis = e.at(axes, e.mul(i, WORD * len(AXIS_WORDS)))
            size, stride, place, keys_each = (self.word(axis, n) for n in range(len(AXIS_WORDS)))
            own_size, own_stride = own_axis(i)
            has_place = b.icmp_signed("!=", place, e.index(0))
            has_keys = b.icmp_signed("!=", keys_each, e.index(0))
            with b.if_then(has_place):
                e.store(own_stride, e.at(block, place), WORD)
            with b.if_then(has_keys):
                e.store(own_size, e.at(block, place, -WORD), WORD)
            along_keys = b.icmp_signed("==", size, e.index(_ANY))
            if page_rows is not None:
                in_page = b.and_(along_keys, b.icmp_signed("!=", page_rows, e.index(0)))
                size = b.select(in_page, page_rows, size)
                along_keys = b.and_(along_keys, b.not_(in_page))
            each = e.larger_of(keys_each, 1)
            own_keys = e.mul(own_size, each)
            is_first = b.icmp_signed("==", known_keys, e.index(_ANY))
            has_all = b.or_(is_first, b.icmp_signed("==", own_keys, known_keys))
            entries = b.sdiv(e.add(known_keys, e.sub(each, 1)), each)
            wanted = b.select(has_keys, entries, b.select(along_keys, known_keys, size))
            fits = b.select(along_keys, has_all, b.icmp_signed("==", own_size, wanted))
            # One entry that is repeated will do for any number of them.
            is_one = b.icmp_signed("==", wanted, e.index(1))
            repeats = b.and_(is_one, b.icmp_signed("==", own_stride, e.index(0)))
            repeats = b.and_(repeats, b.and_(has_place, b.not_(has_keys)))
            fits = b.or_(fits, b.and_(repeats, is_of_variant))
            fits = b.and_(fits, b.or_(has_place, b.icmp_signed("==", own_stride, stride)))
            keys_so_far = b.select(along_keys, own_keys, known_keys)
            return [b.and_(is_alike, fits), keys_so_far]

        is_alike, key_count = e.loop(0, ndim, 1, [ir.Constant(BIT, 1), keys], read_axis)
        return b.select(is_alike, key_count, e.index(_UNLIKE))

    def _axes_function(self) -> Value:
        """`_fitting_axes` of an array object, without its first `skipped` axes:
        `(array, axes, ndim, keys, block, is_array, skipped, page_rows)`."""
        e = self.e
        kinds = [POINTER, POINTER, INT64, INT64, POINTER, INT64, INT64, INT64]
        with e.function("axes", kinds, INT64) as (function, arguments):
            array, axes, ndim, keys, block, is_array, skipped, page_rows = arguments
            shape, strides = (e.pointer(self.part(array, x)) for x in (_SHAPE, _STRIDES))

            def own_axis(i: Value) -> tuple[Value, Value]:
                place = e.mul(e.add(i, skipped), WORD)
                at_size, at_stride = (e.at(x, place) for x in (shape, strides))
                return self.word(at_size), self.word(at_stride)

            found = self._fitting_axes(axes, ndim, keys, block, is_array, own_axis, page_rows)
            e.builder.ret(found)
        return function


class _Checks:
    """What is expected of a call, and the way out of a function if something is not."""

    def __init__(self, calls: _Calls, own: Value) -> None:
        self._calls, builder = calls, calls.e.builder
        self.expected = calls.e.pointer(calls.part(own, _DATA))
        self._unlike = builder.append_basic_block("unlike")
        self.call = {name: calls.call_word(self.expected, name) for name in CALL_WORDS}
        self.block = calls.e.pointer(self.call["block"])

    def require(self, condition: Value) -> None:
        """Go on if this holds; else the function gives 0."""
        builder = self._calls.e.builder
        following = builder.append_basic_block("alike")
        builder.cbranch(condition, following, self._unlike)
        builder.position_at_end(following)

    def end(self) -> None:
        """Write what is done if a condition does not hold; nothing may follow."""
        self._calls.e.builder.position_at_end(self._unlike)
        self._calls.give(self.expected, self._calls.e.index(0))
