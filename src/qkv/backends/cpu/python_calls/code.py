"""Built-in functions of Python that fill an argument block, and run short jobs at once.

Python would take longer for that than attention to a few tokens. `read` is given arrays of NumPy,
and asks whether they are laid out as expected; `write` is given addresses, `step` also sizes and
strides. NumPy's C interface fixes how an array object begins, because every extension module is
compiled with it: after Python's object header come the address of the data, the number of axes, the
addresses of shape and strides, the object that it is a view of, and the dtype.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, INT32, INT64, POINTER, VOID, Emitter, Value
from qkv.backends.cpu.emit.frame import WORD

PLACES = ("out", "lse", "not_finite", "kv_len", "q_shift")
CALL_WORDS = (
    "from_long_long", "as_long_long", "tuple_size", "tuple_item", "block", "job", "job_argument",
    "job_keys", "q_len", "longest", "shift", "at_end", "arrays", *PLACES,
)  # fmt: skip
"""What is expected of a call begins with these words: the addresses of `PyLong_FromLongLong`,
`PyLong_AsLongLong`, `PyTuple_Size` and `PyTuple_GetItem`; the argument block; a job that is run at
once, or 0, its second argument, and the most keys that it takes if their number is not fixed. The
number of keys is at most `longest`. The first query stands at `shift`, or, if `at_end` is 1, the
last one at the last key. `arrays` of variants are read too. `PLACES` say where in the block
something is, in bytes; `kv_len` is 0 if the number of keys is fixed, and `not_finite` if the job
does not tell."""
OPERAND_WORDS = ("place", "dtype", "item", "ndim")
"""Then, for query, key and value, and for each array: where the address goes, the dtype object, the
bytes of an element, and the number of axes. For `write`, more numbers of a call may follow."""
AXIS_WORDS = ("size", "stride", "place", "keys")
"""Then, for each axis: its size, -1 for the number of keys; its stride in bytes, or, if any stride
will do, where that goes, else 0. The axis of an array has an entry for so many `keys`, unless this
is 0; the word before that of its stride is then its size."""

_DATA, _NDIM, _SHAPE, _STRIDES, _DTYPE = 0, 8, 16, 24, 40
"""Bytes behind the object header."""
_ANY, _UNLIKE = -1, -2
"""In the place of a number of keys."""
_DONE = -1
"""The result if the job is done."""
_FROM_LONG_LONG = ir.FunctionType(POINTER, [INT64]).as_pointer()
_AS_LONG_LONG = ir.FunctionType(INT64, [POINTER]).as_pointer()
_TUPLE_SIZE = _AS_LONG_LONG
_TUPLE_ITEM = ir.FunctionType(POINTER, [POINTER, INT64]).as_pointer()
_JOB = ir.FunctionType(VOID, [POINTER, INT64]).as_pointer()


def emit_calls(header: int) -> str:
    """The module with `read`, `write` and `step`; `header` is the bytes of Python's object header.

    `read(query, key, value, out)` or `read(query, key, value, out, lse)` takes arrays. It writes
    their addresses, and what may differ from call to call, into the block, and runs the job if
    there is one for so many keys. The result is 0 if an operand is not as expected or the job's
    output is not finite; -1 if the job is done; else the number of keys, or 1 if that is fixed.

    `write(...)` takes a number for each operand, such as its address; they are known to be as
    expected, and the number of keys is fixed.

    `step(out, lse, q_shift, ...)` takes addresses, the position of the first query, and for each
    operand and array its address, which is not 0, and tuples of its sizes and of its strides in
    elements. The number of keys is not fixed.
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
                given = e.pointer(self.word(e.at(objects, e.mul(n, WORD))))
                e.store(e.builder.call(as_number, [given]), e.at(block, self.word(place)), WORD)
                return [self.next_operand(place)]

            e.loop(0, count, 1, [e.at(expected, WORD * len(CALL_WORDS))], write)
            self.give(expected, e.builder.call(run_job, [expected, block]))

    def word(self, place: Value, number: int = 0) -> Value:
        return self.e.load(self.e.at(place, WORD * number), INT64, WORD)

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
        e, axes_of = self.e, self._axes_function()
        with e.function("read", [POINTER, POINTER, INT64], POINTER, public=True) as (_, arguments):
            own, objects, count = arguments
            b, checks = e.builder, _Checks(self, own)
            expected, call, block = checks.expected, checks.call, checks.block
            require = checks.require
            place, keys = e.at(expected, WORD * len(CALL_WORDS)), e.index(_ANY)
            for n in range(3):
                array = e.pointer(self.word(objects, n))
                address_place, dtype, _, ndim = self.operand_words(place)
                own_ndim = b.sext(e.load(e.at(array, self.header + _NDIM), INT32, 4), INT64)
                is_kind = b.icmp_signed("==", self.part(array, _DTYPE), dtype)
                require(b.and_(is_kind, b.icmp_signed("==", own_ndim, ndim)))
                axes = e.at(place, WORD * len(OPERAND_WORDS))
                keys = b.call(axes_of, [array, axes, ndim, keys, block])
                require(b.icmp_signed("!=", keys, e.index(_UNLIKE)))
                e.store(self.part(array, _DATA), e.at(block, address_place), WORD)
                place = self.next_operand(place)
            out = e.pointer(self.word(objects, 3))
            e.store(self.part(out, _DATA), e.at(block, call["out"]), WORD)
            e.store(e.index(0), e.at(block, call["lse"]), WORD)
            with b.if_then(b.icmp_signed("==", count, e.index(5))):
                lse = e.pointer(self.word(objects, 4))
                e.store(self.part(lse, _DATA), e.at(block, call["lse"]), WORD)
            with b.if_then(b.icmp_signed("==", call["kv_len"], e.index(0))):
                self.give(expected, b.call(run_job, [expected, block]))
            # With equal lengths the positions of queries may be left out, which is another call.
            require(b.icmp_signed("!=", keys, call["q_len"]))
            require(b.and_(e.below(0, keys), e.below(keys, e.add(call["longest"], 1))))
            shift = e.add(call["shift"], e.mul(call["at_end"], e.sub(keys, call["q_len"])))
            self._finish_step(checks, run_job, {"kv_len": keys, "q_shift": shift})

    def _emit_step(self, run_job: Value) -> None:
        e = self.e
        with e.function("step", [POINTER, POINTER, INT64], POINTER, public=True) as (_, arguments):
            own, objects, _ = arguments
            b, checks = e.builder, _Checks(self, own)
            expected, call, block = checks.expected, checks.call, checks.block
            require = checks.require
            as_number = b.inttoptr(call["as_long_long"], _AS_LONG_LONG)
            tuple_size = b.inttoptr(call["tuple_size"], _TUPLE_SIZE)
            tuple_item = b.inttoptr(call["tuple_item"], _TUPLE_ITEM)

            def given(n: Any) -> Value:
                return e.pointer(self.word(e.at(objects, e.mul(n, WORD))))

            def argument(n: Any) -> Value:
                return b.call(as_number, [given(n)])

            def entry(of: Value, i: Value) -> Value:
                return b.call(as_number, [b.call(tuple_item, [of, i])])

            def read(place: Value, first: Value, keys: Value, *, is_array: bool) -> list[Value]:
                """Read an operand or array; whether it is as expected, and the number of keys."""
                address_place, _, item, ndim = self.operand_words(place)
                address, sizes, strides = (
                    argument(first),
                    given(e.add(first, 1)),
                    given(e.add(first, 2)),
                )
                e.store(address, e.at(block, address_place), WORD)
                is_there = b.icmp_signed("!=", address, e.index(0))
                for part in (sizes, strides):
                    has_axes = b.icmp_signed("==", b.call(tuple_size, [part]), ndim)
                    is_there = b.and_(is_there, has_axes)
                axes = b.select(is_there, ndim, e.index(0))

                def read_axis(i: Value, carried: list[Value]) -> list[Value]:
                    is_alike, known_keys = carried
                    axis = e.at(place, WORD * len(OPERAND_WORDS), e.mul(i, WORD * len(AXIS_WORDS)))
                    size, _, stride_place, keys_each = (
                        self.word(axis, n) for n in range(len(AXIS_WORDS))
                    )
                    own_size, stride = entry(sizes, i), e.mul(entry(strides, i), item)
                    e.store(stride, e.at(block, stride_place), WORD)
                    if is_array:
                        has_keys = b.icmp_signed("!=", keys_each, e.index(0))
                        with b.if_then(has_keys):
                            e.store(own_size, e.at(block, stride_place, -WORD), WORD)
                        each = e.larger_of(keys_each, 1)
                        entries = b.sdiv(e.add(known_keys, e.sub(each, 1)), each)
                        wanted = b.select(has_keys, entries, size)
                        fits = b.icmp_signed("==", own_size, wanted)
                        # One entry that is repeated will do for any number of them.
                        is_one = b.icmp_signed("==", wanted, e.index(1))
                        repeats = b.and_(is_one, b.icmp_signed("==", stride, e.index(0)))
                        fits = b.or_(fits, b.and_(repeats, b.not_(has_keys)))
                        return [b.and_(is_alike, fits), known_keys]
                    wanted, keys_so_far = self._wanted_size(size, own_size, known_keys)
                    return [b.and_(is_alike, b.icmp_signed("==", own_size, wanted)), keys_so_far]

                return e.loop(0, axes, 1, [is_there, keys], read_axis)

            place, first, keys = e.at(expected, WORD * len(CALL_WORDS)), e.index(3), e.index(_ANY)
            for _ in range(3):
                is_alike, keys = read(place, first, keys, is_array=False)
                require(is_alike)
                first, place = e.add(first, 3), self.next_operand(place)

            def read_array(_: Value, carried: list[Value]) -> list[Value]:
                place, first, is_alike = carried
                fits, _ = read(place, first, keys, is_array=True)
                return [self.next_operand(place), e.add(first, 3), b.and_(is_alike, fits)]

            start = [place, first, ir.Constant(BIT, 1)]
            *_, is_alike = e.loop(0, call["arrays"], 1, start, read_array)
            require(is_alike)
            shift, longest = argument(2), call["longest"]
            require(b.and_(e.below(0, keys), b.icmp_signed("<=", keys, longest)))
            require(b.icmp_signed("<=", shift, longest))
            require(b.icmp_signed(">=", shift, e.sub(0, longest)))
            words = {"out": argument(0), "lse": argument(1), "kv_len": keys, "q_shift": shift}
            self._finish_step(checks, run_job, words)

    def _finish_step(self, checks: _Checks, run_job: Value, words: dict[str, Value]) -> None:
        """Write these words, and run the job if it takes so many keys; nothing may follow."""
        e, b, call = self.e, self.e.builder, checks.call
        for name, word in words.items():
            e.store(word, e.at(checks.block, call[name]), WORD)
        with b.if_then(b.icmp_signed("<=", words["kv_len"], call["job_keys"])):
            self.give(checks.expected, b.call(run_job, [checks.expected, checks.block]))
        self.give(checks.expected, words["kv_len"])
        checks.end()

    def _wanted_size(self, size: Value, own: Value, keys: Value) -> tuple[Value, Value]:
        """The size that an axis should have, and the number of keys: `_ANY` in `keys` until now."""
        e, b = self.e, self.e.builder
        along_keys = b.icmp_signed("==", size, e.index(_ANY))
        is_first = b.icmp_signed("==", keys, e.index(_ANY))
        wanted = b.select(along_keys, b.select(is_first, own, keys), size)
        return wanted, b.select(along_keys, own, keys)

    def _axes_function(self) -> Value:
        """A function `(array, axes, ndim, keys, block)` that compares shape and strides.

        `keys` is the number of keys, `_ANY` if it is not known yet. It is returned, or `_UNLIKE`.
        """
        e = self.e
        kinds = [POINTER, POINTER, INT64, INT64, POINTER]
        with e.function("axes", kinds, INT64) as (function, (array, axes, ndim, keys, block)):
            b = e.builder
            shape, strides = (e.pointer(self.part(array, x)) for x in (_SHAPE, _STRIDES))

            def read_axis(i: Value, carried: list[Value]) -> list[Value]:
                is_alike, known_keys = carried
                axis = e.at(axes, e.mul(i, WORD * len(AXIS_WORDS)))
                size, stride, place, _ = (self.word(axis, n) for n in range(len(AXIS_WORDS)))
                own_size, own_stride = (
                    self.word(e.at(x, e.mul(i, WORD))) for x in (shape, strides)
                )
                has_place = b.icmp_signed("!=", place, e.index(0))
                with b.if_then(has_place):
                    e.store(own_stride, e.at(block, place), WORD)
                wanted, keys_so_far = self._wanted_size(size, own_size, known_keys)
                fits = b.and_(
                    b.icmp_signed("==", own_size, wanted),
                    b.or_(has_place, b.icmp_signed("==", own_stride, stride)),
                )
                return [b.and_(is_alike, fits), keys_so_far]

            is_alike, key_count = e.loop(0, ndim, 1, [ir.Constant(BIT, 1), keys], read_axis)
            b.ret(b.select(is_alike, key_count, e.index(_UNLIKE)))
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
