"""The replay kernels: the forward pass up to its scores, once more, to see what the weights were.

What the forward pass leaves of a row i is lse[i]. One more pass over the scores, with the same
blocks and the same products but no values, answers one *question* about the weights

    w[i, j] = exp((s[i, j] - a[i]) - b[i])          a = lse and b = 0, or a = m and b = log(l)

- sums: m[i] and log(l[i]), the maximum of a row and the logarithm of its sum over that, for rows
  whose lse is so large that its rounding would show in the weights;
- top: the k best scores of each row and their keys. A sorted list of k is kept for each lane. A
  block is looked at only if its best score enters some list, and a score is inserted only if it
  is above the last of some lane's; keys come in rising order, so that ties stay with the lower;
- received: sum_i w[i, j] of each key j. A task is a range of keys and meets the blocks of queries
  in rising order; each lane has a compensated sum for each key, and the lanes are added at the
  end, so that the bits depend on the number of queries alone.

Scores are natural here, mods or not. Sources: as `forward`; Kahan, "Further remarks on reducing
truncation errors" (1965).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from llvmlite import ir

from qkv.backends.cpu.emit import vector_math
from qkv.backends.cpu.emit.emitter import BIT, INT64, POINTER, Value
from qkv.backends.cpu.emit.frame import COMMON_FIELDS, WORD, operand_fields
from qkv.backends.cpu.emit.packing import copy_rows
from qkv.backends.cpu.emit.transpose import transposed_bytes
from qkv.backends.cpu.forward.kernel import BLOCK_KV, RUN, SOFTMAX, STATS, TASK, Forward, ForwardKey
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.products.query_lanes import dot_rows, store_vectors, vectors_at
from qkv.problem.expressions import TRUE
from qkv.problem.spec import Spec

Question: TypeAlias = Literal["sums", "top", "received", "blocks"]

FIELDS = (
    *COMMON_FIELDS,
    *operand_fields("query", "key"),
    "copy_key", "sign", "runs", "rows",
    "row_max", "log_sum",
    "k", "best", "indices",
    "blocks", "shift", "padded_rows", "received", "q_blocks_per_task",
    "unit", "first_vector", "first_unit", "units", "joined", "largest", "sums",
)  # fmt: skip
"""Words of the argument block. `shift` points to a and b of each vector of rows, side by side; a
head has `padded_rows` of them."""

RANGE = ("batch", "head", "first_key", "last_key", "first_block", "last_block")
"""Words of a task of `received`. Its blocks are rows of `blocks`, each a `TASK` of the forward
pass."""


def state_rows(question: Question, k: int) -> int:
    """Numbers that are kept for each query."""
    return {"sums": STATS, "top": 2 * (k + 1), "received": 0, "blocks": 0}[question]


def scratch_bytes(question: Question, spec: Spec, shape: TileShape, k: int, keys: int) -> int:
    """Memory of one worker: packed Q, S, states; one block of K and of tables; sums of keys."""
    real_bytes = spec.compute_dtype.itemsize
    rows = (spec.head_dim + BLOCK_KV + state_rows(question, k)) * shape.block_q
    totals = 2 * keys * shape.lanes if question == "received" else 0
    transposed = transposed_bytes(spec, BLOCK_KV, shape.lanes * real_bytes)
    size = (rows + BLOCK_KV * spec.head_dim + totals) * real_bytes + transposed
    return -(-size // 4096) * 4096


@dataclass(frozen=True, slots=True)
class ReplayKey:
    """What the code of one replay depends on."""

    question: Question
    spec: Spec
    shape: TileShape
    int_bits: int
    folded: bool
    rotated: bool


def emit_replay(key: ReplayKey) -> str:
    """The module of one kernel; `job(arguments, worker)` runs tasks until none is left."""
    kinds: dict[str, type[Replay]] = {"sums": Sums, "top": Top, "received": Received}
    kernel = kinds[key.question](key)
    kernel.all_tasks()
    return str(kernel.e.module)


class Areas(NamedTuple):
    """Where a block of queries keeps what, in the scratch of its worker."""

    packed: Value
    scores: Value
    state: Value
    key_copy: Value
    transposed: Value
    totals: Value


class Block(NamedTuple):
    """A block of queries: its task, and its areas for `vectors` vectors."""

    arguments: Value
    batch: Value
    head: Value
    first_row: Value
    first_key: Value
    vectors: int
    areas: Areas


class Replay(Forward):
    """What all questions share: blocks of queries meet blocks of keys."""

    def __init__(self, key: ReplayKey) -> None:
        real = "float64" if key.spec.dtype == "float64" else "float32"
        super().__init__(
            ForwardKey(
                key.spec, key.shape, key.int_bits, key.folded, key.rotated, real, statistics=False
            )
        )
        self.fields = FIELDS
        self.plain = False

    # What a question decides

    def see(self, name: str, masked: bool) -> Value:
        """A function with the arguments of `softmax`: one vector of queries sees a block of keys.

        Its state takes the place of the statistics, and nothing is marked.
        """
        raise NotImplementedError

    def state(self, block: Block, vector: int) -> Value:
        """What `see` is given for a vector of the block."""
        raise NotImplementedError

    def state_bytes(self, arguments: Value, row: int) -> Value:
        """What the states of a block take in scratch, `row` bytes for one number of each query."""
        return self.e.index(0)

    def begin(self, block: Block) -> None:
        """Before a block of queries meets its first keys."""

    def after_keys(self, block: Block, kv_start: Value, count: Value) -> None:
        """After all vectors of a block have seen a block of keys."""

    def end(self, block: Block, functions: dict[str, Value]) -> None:
        """After a block of queries has met its last keys."""

    # A block of queries meets its keys

    def scores(self, vectors: int) -> Value:
        """S[k, :] = K[k, :] . packed Q."""
        e = self.e
        with e.function(f"scores_{vectors}", [POINTER] * 3 + [INT64] * 3) as (function, args):
            key, packed, out, key_row, head_dim, count = args

            def finish(k: Value, products: list[Value], _: list[Value]) -> list[Value]:
                store_vectors(e, e.at(out, e.mul(k, vectors * e.vector_bytes)), products)
                return []

            dot_rows(e, key, key_row, count, packed, vectors, head_dim, self.shape.keys, [], finish)
        return function

    def areas(self, arguments: Value, scratch: Value) -> Areas:
        e, head_dim = self.e, self.field(arguments, "head_dim")
        row = self.shape.block_q * e.real_bytes
        scores = e.at(scratch, e.mul(head_dim, row))
        state = e.at(scores, BLOCK_KV * row)
        key_copy = e.at(state, self.state_bytes(arguments, row))
        transposed = e.at(key_copy, e.mul(head_dim, BLOCK_KV * e.real_bytes))
        totals = e.at(transposed, transposed_bytes(self.spec, BLOCK_KV, e.vector_bytes))
        return Areas(scratch, scores, state, key_copy, transposed, totals)

    def meet(self, vectors: int, functions: dict[str, Value]) -> Value:
        """One block of queries, and those of its runs of keys from one key to another."""
        e = self.e
        scores = self.scores(vectors)
        with e.function(f"meet_{vectors}", [POINTER] * 3 + [INT64] * 2) as (function, args):
            arguments, task, scratch, first_key, last_key = args
            b = e.builder
            batch, head, first_row, first_run, last_run = self.record(task, TASK)
            areas = self.areas(arguments, scratch)
            block = Block(arguments, batch, head, first_row, first_key, vectors, areas)
            width = e.index(vectors * e.vector_bytes)
            head_dim = self.field(arguments, "head_dim")
            query = self.operand(arguments, "query", batch, head)
            kv_head = b.sdiv(head, self.field(arguments, "group_size"))
            key = self.operand(arguments, "key", batch, kv_head)
            runs = self.pointer_field(arguments, "runs")

            def run(r: Value) -> tuple[Value, Value, Value]:
                start, stop, kind = self.record(e.at(runs, e.mul(r, WORD * len(RUN))), RUN)
                return e.greater(start, first_key), e.least(stop, last_key), kind

            def pack() -> None:
                for j in range(vectors):
                    to = e.at(areas.packed, j * e.vector_bytes)
                    first = e.add(first_row, j * e.lanes)
                    b.call(functions["pack"], [arguments, query.pointer, to, first, width])

            def see(name: str, kv_start: Value, keys: Value) -> None:
                for j in range(vectors):
                    part = e.at(areas.scores, j * e.vector_bytes)
                    first = e.add(first_row, j * e.lanes)
                    at = (arguments, part, self.state(block, j), areas.transposed, width)
                    where = (keys, batch, head, first, kv_start, ir.Constant(BIT, 0))
                    b.call(functions[name], [*at, *where])

            def one_block(kv_start: Value, keys: Value, partial: Value) -> None:
                k, key_row = self.block_of(
                    arguments, "key", key, kv_start, keys, head_dim, areas.key_copy, functions
                )
                b.call(scores, [k, areas.packed, areas.scores, key_row, head_dim, keys])
                if self.mask == TRUE:
                    see("full", kv_start, keys)
                else:
                    e.choose(
                        partial,
                        lambda: see("partial", kv_start, keys),
                        lambda: see("full", kv_start, keys),
                    )
                self.after_keys(block, kv_start, keys)

            def each_run(r: Value, _: list[Value]) -> None:
                start, stop, kind = run(r)
                partial = b.icmp_signed("!=", kind, e.index(0))
                e.loop(
                    start, stop, BLOCK_KV, [],
                    lambda k, _: one_block(k, e.least(BLOCK_KV, e.sub(stop, k)), partial),
                )  # fmt: skip

            def number(r: Value, met: list[Value]) -> list[Value]:
                start, stop, _ = run(r)
                return [e.add(met[0], e.greater(e.sub(stop, start), 0))]

            (met,) = e.loop(first_run, last_run, 1, [e.index(0)], number)
            self.begin(block)
            with b.if_then(e.below(0, met)):
                pack()
                e.loop(first_run, last_run, 1, [], each_run)
            self.end(block, functions)
        return function

    def functions(self) -> dict[str, Value]:
        dtype = self.dtypes["key"]
        functions = {"pack": self.pack(), "full": self.see("full", False)}
        functions[f"copy {dtype}"] = copy_rows(self.e, dtype)
        if self.mask != TRUE:
            functions["partial"] = self.see("partial", True)
        return functions

    def meeting(self) -> Callable[..., None]:
        """Emits one call of `meet`, for few queries or many."""
        e, functions = self.e, self.functions()
        one, many = (self.meet(vectors, functions) for vectors in (1, self.shape.vectors))

        def meet(arguments: Value, task: Value, *rest: Value) -> None:
            first_row = self.record(task, TASK)[TASK.index("first_row")]
            few = e.below(e.sub(self.field(arguments, "rows"), first_row), e.lanes + 1)
            call = [arguments, task, *rest]
            e.choose(few, lambda: e.builder.call(one, call), lambda: e.builder.call(many, call))

        return meet


class RowReplay(Replay):
    """Questions about rows: a task is a block of queries, and what it found is written at the end.

    The state of a vector is some rows of numbers, `width` bytes apart.
    """

    def state(self, block: Block, vector: int) -> Value:
        return self.e.at(block.areas.state, vector * self.e.vector_bytes)

    def write_rows(self, arguments: Value, state: Value, width: Value, rows: list[Value]) -> None:
        """Store what a vector found, lane by lane; `rows` are theirs of all, batch and heads."""
        raise NotImplementedError

    def write(self) -> Value:
        """A function `(arguments, state, width, batch, head, first_row)`.

        Lanes beyond the last row hold what it holds and write it again.
        """
        e = self.e
        with e.function("write", [POINTER] * 2 + [INT64] * 4) as (function, args):
            arguments, state, width, batch, head, first_row = args
            num_heads, q_len, rows = (
                self.field(arguments, n) for n in ("num_heads", "q_len", "rows")
            )
            start, last = e.mul(e.add(e.mul(batch, num_heads), head), q_len), e.sub(rows, 1)
            lanes = [e.add(start, e.least(e.add(first_row, i), last)) for i in range(e.lanes)]
            self.write_rows(arguments, state, width, lanes)
        return function

    def end(self, block: Block, functions: dict[str, Value]) -> None:
        e = self.e
        width = e.index(block.vectors * e.vector_bytes)
        for j in range(block.vectors):
            first = e.add(block.first_row, j * e.lanes)
            where = (width, block.batch, block.head, first)
            e.builder.call(functions["write"], [block.arguments, self.state(block, j), *where])

    def functions(self) -> dict[str, Value]:
        return {**super().functions(), "write": self.write()}

    def all_tasks(self) -> None:
        e, meet = self.e, self.meeting()

        def run(arguments: Value, number: Value, scratch: Value) -> None:
            task = e.at(self.pointer_field(arguments, "tasks"), e.mul(number, WORD * len(TASK)))
            meet(arguments, task, scratch, e.index(0), self.field(arguments, "kv_len"))

        self.job(run)


class Sums(RowReplay):
    """m and log(l) of each row: the softmax of the forward pass, its weights left behind."""

    def see(self, name: str, masked: bool) -> Value:
        return self.softmax(name, masked)

    def state_bytes(self, arguments: Value, row: int) -> Value:
        return self.e.index(STATS * row)

    def begin(self, block: Block) -> None:
        e, width = self.e, block.vectors * self.e.vector_bytes
        for j in range(block.vectors):
            for i in range(STATS):
                first = e.const(0.0 if i else -math.inf)
                e.store_vector(first, e.at(self.state(block, j), i * width))

    def write_rows(self, arguments: Value, state: Value, width: Value, rows: list[Value]) -> None:
        e = self.e
        row_max, row_sum = (e.load_vector(e.at(state, e.mul(width, i))) for i in (0, 1))
        for name, found in (("row_max", row_max), ("log_sum", vector_math.log(e, row_sum))):
            start = self.pointer_field(arguments, name)
            for i, row in enumerate(rows):
                e.store(e.extract(found, i), e.at(start, e.mul(row, e.real_bytes)), e.real_bytes)


class Top(RowReplay):
    """The k best scores of each row, falling, and their keys.

    The list of a vector of rows has k + 1 places: an infinite score that nothing passes, then the
    k best. Its keys follow in the same order.
    """

    def state_bytes(self, arguments: Value, row: int) -> Value:
        e = self.e
        return e.mul(e.add(self.field(arguments, "k"), 1), 2 * row)

    def begin(self, block: Block) -> None:
        e = self.e
        places = e.add(self.field(block.arguments, "k"), 1)
        width = block.vectors * e.vector_bytes

        def clear(i: Value, _: list[Value]) -> None:
            for j in range(block.vectors):
                score = e.at(self.state(block, j), e.mul(i, width))
                e.store_vector(e.const(-math.inf), score)
                nothing = e.as_floats(e.const_bits(-1))
                e.store_vector(nothing, e.at(score, e.mul(places, width)))

        e.loop(0, places, 1, [], clear)
        for j in range(block.vectors):
            e.store_vector(e.const(math.inf), self.state(block, j))

    def see(self, name: str, masked: bool) -> Value:
        e = self.e
        with e.function(name, SOFTMAX) as (function, args):
            arguments_, scores, best, transposed, width, count, batch, head, first_row = args[:9]
            kv_start = args[9]
            b = e.builder
            places = self.places(arguments_, batch, head, first_row)
            scale = e.splat(self.real_field(arguments_, "scale"))
            largest = self.finish_scores(
                places, scale, scores, transposed, width, count, kv_start, masked
            )
            k = self.field(arguments_, "k")
            last = e.at(best, e.mul(k, width))

            def each(n: Value, _: list[Value]) -> None:
                score = e.load_vector(e.at(scores, e.mul(n, width)))
                better = b.fcmp_ordered(">", score, e.load_vector(last))
                with b.if_then(self._any(better), likely=False):
                    self._insert(best, width, k, score, e.add(kv_start, n), better)

            with b.if_then(self._any(b.fcmp_ordered(">", largest, e.load_vector(last)))):
                e.loop(0, count, 1, [], each)
        return function

    def _insert(
        self, best: Value, width: Value, k: Value, score: Value, kv_index: Value, better: Value
    ) -> None:
        """What is not as good moves down one place, the last out; equal scores stay before."""
        e, b = self.e, self.e.builder
        keys = e.mul(e.add(k, 1), width)
        own = e.splat(b.trunc(kv_index, e.whole) if e.whole != INT64 else kv_index)

        def entry(i: Value) -> tuple[Value, Value]:
            at = e.at(best, e.mul(i, width))
            return at, e.at(at, keys)

        def load(i: Value) -> list[Value]:
            score_at, key_at = entry(i)
            return [e.load_vector(score_at), e.load(key_at, e.bits, e.vector_bytes)]

        def move(n: Value, carried: list[Value]) -> list[Value]:
            better, *here = carried
            i = e.sub(k, n)
            before = load(e.sub(i, 1))
            passes = b.fcmp_ordered(">", score, before[0])
            for at, new, above, old in zip(entry(i), (score, own), before, here, strict=True):
                kept = b.select(better, b.select(passes, above, new), old)
                e.store(kept, at, e.vector_bytes)
            return [passes, *before]

        e.loop(0, k, 1, [better, *load(k)], move)

    def _any(self, condition: Value) -> Value:
        b, lanes = self.e.builder, ir.IntType(self.e.lanes)
        return b.icmp_unsigned("!=", b.bitcast(condition, lanes), ir.Constant(lanes, 0))

    def write_rows(self, arguments: Value, state: Value, width: Value, rows: list[Value]) -> None:
        e, b = self.e, self.e.builder
        k, best, indices = (self.field(arguments, name) for name in ("k", "best", "indices"))
        starts = [e.mul(row, k) for row in rows]

        def place(n: Value, _: list[Value]) -> None:
            at = e.at(state, e.mul(e.add(n, 1), width))
            scores = e.load_vector(at)
            keys = e.load(e.at(at, e.mul(e.add(k, 1), width)), e.bits, e.vector_bytes)
            for i, start in enumerate(starts):
                to, key = e.add(start, n), e.extract(keys, i)
                key = key if e.whole == INT64 else b.sext(key, INT64)
                score_at = e.at(e.pointer(best), e.mul(to, e.real_bytes))
                e.store(e.extract(scores, i), score_at, e.real_bytes)
                e.store(key, e.at(e.pointer(indices), e.mul(to, WORD)), WORD)

        e.loop(0, k, 1, [], place)


class Received(Replay):
    """sum_i w[i, j] of each key j of a range.

    `totals` has two vectors for each key: the sums of the lanes, and what rounding took from them.
    """

    def state(self, block: Block, vector: int) -> Value:
        """a and b of the rows of a vector."""
        e = self.e
        names = ("num_heads", "padded_rows")
        num_heads, padded = (self.field(block.arguments, name) for name in names)
        start = e.mul(e.add(e.mul(block.batch, num_heads), block.head), padded)
        row = e.add(start, block.first_row, vector * e.lanes)
        return e.at(self.pointer_field(block.arguments, "shift"), e.mul(row, 2 * e.real_bytes))

    def see(self, name: str, masked: bool) -> Value:
        """S becomes w; the padding of the rows has b = inf, which makes it 0."""
        e = self.e
        with e.function(name, SOFTMAX) as (function, args):
            arguments_, scores, shift, transposed, width, count, batch, head, first_row = args[:9]
            kv_start = args[9]
            b = e.builder
            places = self.places(arguments_, batch, head, first_row)
            scale = e.splat(self.real_field(arguments_, "scale"))
            self.finish_scores(places, scale, scores, transposed, width, count, kv_start, masked)
            lse, log_sum = (
                e.load_vector(e.at(shift, i * e.vector_bytes), aligned=False) for i in (0, 1)
            )

            def weigh(k: Value, _: list[Value]) -> None:
                at = e.at(scores, e.mul(k, width))
                score = e.load_vector(at)
                weight = vector_math.exp_flushed(e, b.fsub(b.fsub(score, lse), log_sum))
                never = b.fcmp_ordered("==", score, e.const(-math.inf))
                e.store_vector(b.select(never, e.const(0.0), weight), at)

            e.loop(0, count, 1, [], weigh)
        return function

    def after_keys(self, block: Block, kv_start: Value, count: Value) -> None:
        """Add the weights of all vectors to the sums of their keys."""
        e, b = self.e, self.e.builder
        first = e.sub(kv_start, block.first_key)
        totals = e.at(block.areas.totals, e.mul(first, 2 * e.vector_bytes))

        def add(k: Value, _: list[Value]) -> None:
            weights = vectors_at(e, block.areas.scores, block.vectors, k)
            more = weights[0]
            for weight in weights[1:]:
                more = b.fadd(more, weight)
            at = e.at(totals, e.mul(k, 2 * e.vector_bytes))
            lost_at = e.at(at, e.vector_bytes)
            old = e.load_vector(at)
            more = b.fsub(more, e.load_vector(lost_at))
            new = b.fadd(old, more)
            e.store_vector(new, at)
            e.store_vector(b.fsub(b.fsub(new, old), more), lost_at)

        e.loop(0, count, 1, [], add)

    def all_tasks(self) -> None:
        e, meet = self.e, self.meeting()

        def run(arguments: Value, number: Value, scratch: Value) -> None:
            tasks = self.pointer_field(arguments, "tasks")
            batch, head, first_key, last_key, first_block, last_block = self.record(
                e.at(tasks, e.mul(number, WORD * len(RANGE))), RANGE
            )
            count = e.sub(last_key, first_key)
            totals = self.areas(arguments, scratch).totals
            e.loop(
                0, e.mul(count, 2 * e.vector_bytes), e.vector_bytes, [],
                lambda i, _: e.store_vector(e.const(0.0), e.at(totals, i)),
            )  # fmt: skip
            blocks = self.pointer_field(arguments, "blocks")

            def each(n: Value, _: list[Value]) -> None:
                block = e.at(blocks, e.mul(n, WORD * len(TASK)))
                meet(arguments, block, scratch, first_key, last_key)

            e.loop(first_block, last_block, 1, [], each)
            num_heads, kv_len = (self.field(arguments, n) for n in ("num_heads", "kv_len"))
            start = e.add(e.mul(e.add(e.mul(batch, num_heads), head), kv_len), first_key)
            received = self.pointer_field(arguments, "received")

            def write(k: Value, _: list[Value]) -> None:
                at = e.at(totals, e.mul(k, 2 * e.vector_bytes))
                lost = e.load_vector(e.at(at, e.vector_bytes))
                lanes = e.builder.fsub(e.load_vector(at), lost)
                total = e.extract(e.reduce(lanes, e.builder.fadd), 0)
                e.store(total, e.at(received, e.mul(e.add(start, k), e.real_bytes)), e.real_bytes)

            e.loop(0, count, 1, [], write)

        self.job(run)
