"""The replays of rows where the forward pass multiplied parts: with the same products.

What `replay` asks of each row, of scores that are bit for bit those of the forward pass. As there,
one task is several blocks of queries, for which a block of keys is split once.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from qkv.backends.cpu.emit.emitter import BIT, POINTER, Value
from qkv.backends.cpu.emit.frame import WORD, Rows
from qkv.backends.cpu.emit.transpose import turned_bytes
from qkv.backends.cpu.forward.kernel import RUN, TASK
from qkv.backends.cpu.machine.tiling import Shape
from qkv.backends.cpu.products import matrix_unit
from qkv.backends.cpu.products.bfloat16 import chunks, whole
from qkv.backends.cpu.replay.kernel import (
    Areas,
    Block,
    Question,
    ReplayKey,
    RowReplay,
    Sums,
    Top,
    state_rows,
)
from qkv.backends.cpu.split_bf16 import non_finite
from qkv.backends.cpu.split_bf16.factors import FLOAT_BYTES
from qkv.backends.cpu.split_bf16.forward import BLOCK_KV
from qkv.backends.cpu.split_bf16.scores import PartScores
from qkv.problem.expressions import TRUE
from qkv.problem.spec import Spec
from qkv.problem.tiles import TileKind


def part_scratch_bytes(question: Question, spec: Spec, shape: Shape, k: int) -> int:
    """Memory of one worker: a block of scores, K, copied rows and tables; Q and states."""
    width, wide = FLOAT_BYTES * shape.block_q, chunks(spec.head_dim)
    shared = BLOCK_KV * (width + (2 * shape.parts + FLOAT_BYTES) * wide)
    own = width * (shape.parts * wide // 2 + 1 + state_rows(question, k))
    turned = turned_bytes(spec, BLOCK_KV, FLOAT_BYTES * shape.lanes)
    total = non_finite.ODD_BYTES + shared + turned + shape.together * own
    return -(-total // 4096) * 4096


def emit_part_replay(key: ReplayKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    kernel = (_TopOfParts if key.question == "top" else _SumsOfParts)(key)
    kernel.all_tasks()
    return str(kernel.e.module)


class _OfParts(RowReplay):
    """Some blocks of queries meet blocks of keys."""

    def __init__(self, key: ReplayKey) -> None:
        super().__init__(key)
        self.block_kv = BLOCK_KV
        self.factors = PartScores(self, BLOCK_KV)
        self.width = self.factors.split.width

    def parts(self) -> dict[str, Value]:
        split = self.factors.split
        parts = self.factors.functions((self.dtypes["query"], self.dtypes["key"]))
        parts["scores"] = matrix_unit.add_products(
            self.e, "scores", split.vectors, onto=False, products=split.products()
        )
        parts["full"], parts["write"] = self.see("full", False), self.write()
        if self.mask != TRUE:
            parts["partial"] = self.see("partial", True)
        return parts

    def task(self, parts: dict[str, Value]) -> Value:
        """A function `(arguments, task, scratch)`."""
        e, vectors = self.e, self.shape.vectors
        with e.function("task", [POINTER] * 3) as (function, args):
            arguments, task, scratch = args
            b, split, block_q = e.builder, self.factors.split, self.shape.block_q
            matrix_unit.configure(e)
            batch, head, first_row, first_run, last_run = self.record(task, TASK)
            names = ("group_size", "q_len", "head_dim", "together")
            group_size, q_len, head_dim, together = (self.field(arguments, n) for n in names)
            query = self.operand(arguments, "query", batch, head)
            key = self.operand(arguments, "key", batch, b.sdiv(head, group_size))

            wide = whole(e, head_dim)
            scores = e.at(scratch, non_finite.ODD_BYTES)
            keys = e.at(scores, BLOCK_KV * self.width)
            copy = e.at(keys, e.mul(wide, 2 * split.parts * BLOCK_KV))
            turned = e.at(copy, e.mul(wide, FLOAT_BYTES * BLOCK_KV))
            blocks = e.at(turned, turned_bytes(self.spec, BLOCK_KV, e.vector_bytes))
            lanes_at = e.mul(wide, split.parts * self.width // 2)
            state_at = e.add(lanes_at, self.width)
            block_bytes = e.add(state_at, self.state_bytes(arguments, self.width))
            left = e.add(e.sub(q_len, first_row), block_q - 1)
            count = e.least(together, b.sdiv(left, e.index(block_q)))

            def block_at(i: Value) -> Block:
                packed = e.at(blocks, e.mul(i, block_bytes))
                row = e.add(first_row, e.mul(i, block_q))
                areas = Areas(packed, scores, e.at(packed, state_at), copy, turned, blocks)
                return Block(arguments, batch, head, row, e.index(0), vectors, areas)

            def each_block(body: Callable[[Block], None]) -> None:
                e.loop(0, count, 1, [], lambda i, _: body(block_at(i)))

            def begin(block: Block) -> None:
                for j in range(vectors):
                    row = e.least(e.add(block.first_row, j * e.lanes), e.sub(q_len, 1))
                    offset = j * e.vector_bytes
                    packed = e.at(block.areas.packed, offset)
                    lanes = b.call(parts["pack"], [arguments, query.pointer, packed, copy, row])
                    e.store(lanes, e.at(block.areas.packed, lanes_at, offset), WORD)
                self.begin(block)

            def see(name: str, block: Block, kv_start: Value, number: Value) -> None:
                for j in range(vectors):
                    place = e.at(scores, j * e.vector_bytes)
                    first = e.add(block.first_row, j * e.lanes)
                    at = (arguments, place, self.state(block, j), turned, e.index(self.width))
                    where = (number, batch, head, first, kv_start, ir.Constant(BIT, 0))
                    b.call(parts[name], [*at, *where])

            def block_of_keys(kv_start: Value, number: Value, kinds: Value) -> None:
                here = Rows(e.at(key.pointer, e.mul(kv_start, key.row)), key.row, key.element)
                self.factors.split_keys(parts, here, number, head_dim, copy, keys, scratch)
                band, pairs = split.band(head_dim), b.ashr(wide, e.index(1))

                def one(i: Value, _: list[Value]) -> None:
                    block = block_at(i)
                    kind = b.and_(b.lshr(kinds, e.mul(i, 2)), e.index(3))

                    def score() -> None:
                        packed = block.areas.packed
                        b.call(parts["scores"], [keys, packed, scores, band, number, pairs])
                        odd = (scratch, e.at(packed, lanes_at), scores)
                        where = (block.first_row, e.index(0), number)
                        self.factors.mend(arguments, parts, here, query, *where, *odd)

                    with b.if_then(b.icmp_signed("!=", kind, e.index(TileKind.EMPTY))):
                        score()
                        if self.mask == TRUE:
                            see("full", block, kv_start, number)
                        else:
                            e.choose(
                                b.icmp_signed("==", kind, e.index(TileKind.PARTIAL)),
                                lambda: see("partial", block, kv_start, number),
                                lambda: see("full", block, kv_start, number),
                            )

                e.loop(0, count, 1, [], one)

            def each_run(r: Value, _: list[Value]) -> None:
                run = e.at(self.pointer_field(arguments, "runs"), e.mul(r, WORD * len(RUN)))
                start, stop, kinds = self.record(run, RUN)
                e.loop(
                    start, stop, BLOCK_KV, [],
                    lambda k, _: block_of_keys(k, e.least(BLOCK_KV, e.sub(stop, k)), kinds),
                )  # fmt: skip

            each_block(begin)
            e.loop(first_run, last_run, 1, [], each_run)
            each_block(lambda block: self.end(block, parts))
            matrix_unit.release(e)
        return function

    def all_tasks(self) -> None:
        e = self.e
        whole_task = self.task(self.parts())

        def run(arguments: Value, number: Value, scratch: Value) -> None:
            task = e.at(self.pointer_field(arguments, "tasks"), e.mul(number, WORD * len(TASK)))
            e.builder.call(whole_task, [arguments, task, scratch])

        self.job(run)


class _SumsOfParts(_OfParts, Sums):
    pass


class _TopOfParts(_OfParts, Top):
    pass
