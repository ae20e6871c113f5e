"""Gradients of the tables that a score reads, added where each entry was read."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.backward.layout import TASK
from qkv.backends.cpu.emit.argument_block import COUNTER_BYTES, WORD
from qkv.backends.cpu.emit.emitter import DOUBLE, INT64, Value
from qkv.backends.cpu.emit.expressions.tables import TableView
from qkv.backends.cpu.emit.expressions.vector_code import Expressions
from qkv.problem.language.expressions import Load


class TableSums:
    """Adds to a task's copies of the gradients of tables, for one vector of `rows` queries.

    An entry that all pairs of a block read is added up in lanes first, in sums that a loop over
    keys carries. A task has `words` before the bytes at which its copies begin.
    """

    def __init__(
        self,
        frame: BackwardFrame,
        arguments: Value,
        task: Value,
        rows: Value,
        words: tuple[str, ...] = TASK,
    ) -> None:
        b = frame.e.builder
        self._frame = frame
        self._views = _views(frame, arguments, frame.e.at(task, WORD * len(words)))
        self._fixed = [load for load in frame.loads if _reads_one_entry(load)]
        self._is_query = b.icmp_signed("<", frame.lane_numbers(), frame.lane_integers(rows))

    def zeros(self) -> list[Value]:
        """The carried sums before the first key."""
        kinds = [
            ir.VectorType(_sum_type(self._frame, load.table), self._frame.e.lanes)
            for load in self._fixed
        ]
        return [ir.Constant(kind, [0.0] * self._frame.e.lanes) for kind in kinds]

    def add(
        self,
        inner: Expressions,
        share_of: Callable[[Load], Value],
        forbidden: Value,
        sums: list[Value],
    ) -> list[Value]:
        """Add what each read of a table gets at one key; gives the carried sums."""
        e, b = self._frame.e, self._frame.e.builder
        counts = b.and_(b.not_(forbidden), self._is_query)
        following: list[Value] = []
        for load in self._frame.loads:
            share = b.select(counts, share_of(load), e.const(0.0))
            if load in self._fixed:
                total = sums[len(following)]
                share = share if share.type == total.type else b.fpext(share, total.type)
                following.append(b.fadd(total, share))
            else:
                self._scatter(inner, load, share)
        return following

    def finish(self, places: Expressions, sums: list[Value]) -> None:
        """Add the carried sums after the last key."""
        for load, total in zip(self._fixed, sums, strict=True):
            self._scatter(places, load, total)

    def _scatter(self, places: Expressions, load: Load, share: Value) -> None:
        """Add each lane's share where it read the table, one lane after the other."""
        e, b = self._frame.e, self._frame.e.builder
        kind, view = _sum_type(self._frame, load.table), self._views[load.table]

        def add_number(pointer: Value, number: Value) -> None:
            if number.type != kind:
                number = b.fpext(number, kind)
            e.store(b.fadd(e.load(pointer, kind), number), pointer, 1)

        uniform, varying = places.entry_offset(load, view)
        start = e.at(view.pointer, uniform)
        shares = [e.extract(share, lane) for lane in range(e.lanes)]
        if varying is None:
            while len(shares) > 1:
                shares = [b.fadd(*pair) for pair in zip(shares[::2], shares[1::2], strict=True)]
            add_number(start, shares[0])
            return
        for lane, number in enumerate(shares):
            add_number(e.at(start, e.extract(varying, lane)), number)


def _sum_type(frame: BackwardFrame, table: str) -> ir.Type:
    """The type in which the gradient of a table is added."""
    wide = next(wanted.wide for wanted in frame.wanted_tables if wanted.name == table)
    return DOUBLE if wide else frame.e.real


def _views(frame: BackwardFrame, arguments: Value, copies: Value) -> dict[str, TableView]:
    """The task's copies of the gradients of tables, as the expressions index the tables.

    `copies` points to the bytes at which they begin.
    """
    e = frame.e
    views = frame.tables(arguments)
    word = len(frame.fields) + sum(1 + 2 * table.ndim for table in frame.spec.tables)
    gradients = {}
    for n, table in enumerate(frame.wanted_tables):
        view = views[table.name]
        base, *strides = (
            e.load(e.at(arguments, COUNTER_BYTES + WORD * (word + i)), INT64, WORD)
            for i in range(1 + view.spec.ndim)
        )
        word += 1 + len(strides)
        copy = e.load(e.at(copies, WORD * n), INT64, WORD)
        pointer = e.at(e.pointer(base), copy)
        gradients[table.name] = TableView(view.spec, pointer, view.sizes, tuple(strides))
    return gradients


def _reads_one_entry(load: Load) -> bool:
    """Whether all pairs of a block read the same entry."""
    read = set().union(*(index.variables for index in load.indices))
    return not {"q_index", "kv_index", "score"} & read
