"""What every pass over one block of queries begins with: its sizes, its memory and its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from qkv.backends.cpu.backward.frame import BackwardFrame
from qkv.backends.cpu.emit.emitter import Value
from qkv.backends.cpu.forward.layout import TASK as BLOCK


class BlockCall(NamedTuple):
    """The addresses that the compiled function of a block is called with."""

    arguments: Value
    task: Value
    block: Value
    scratch: Value


class BlockOfQueries:
    """Emits code for one block of queries; the words of a task begin with batch row and kv head."""

    def __init__(
        self, frame: BackwardFrame, vectors: int, functions: dict[str, Value], call: BlockCall
    ) -> None:
        arguments, task, block, scratch = call
        self.frame, self.e, self.functions = frame, frame.e, functions
        self.arguments, self.task, self.vectors = arguments, task, vectors
        e = self.e
        self.width = e.index(vectors * e.vector_bytes)
        self.batch, self.kv_head = frame.record(task, ("batch", "kv_head"))
        _, self.head, self.first_row, self.first_run, self.last_run = frame.record(block, BLOCK)
        num_heads, group_size, q_len, kv_len, head_dim, v_head_dim = frame.words(
            arguments, "num_heads", "group_size", "q_len", "kv_len", "head_dim", "v_head_dim"
        )
        self.dims = {
            "query": head_dim, "key": head_dim, "grad_out": v_head_dim, "value": v_head_dim,
        }  # fmt: skip
        self.area = {n: e.at(scratch, self.field(f"area_{n}")) for n in frame.area_names}
        self.last = e.sub(q_len, 1)
        self.rows = e.least(e.sub(q_len, self.first_row), vectors * e.lanes)
        self.head_row = e.mul(e.add(e.mul(self.batch, num_heads), self.head), q_len)
        num_kv_heads = e.builder.sdiv(num_heads, group_size)
        self.kv_row = e.mul(e.add(e.mul(self.batch, num_kv_heads), self.kv_head), kv_len)

    def field(self, name: str) -> Value:
        return self.frame.field(self.arguments, name)

    def call(self, name: str, *arguments: Value) -> Value:
        return self.e.builder.call(self.functions[name], arguments)

    def for_each_vector(self, body: Callable[[Value, Value], None]) -> None:
        """Emit `body(offset, first)`: the byte offset of a vector, and its first query."""
        e = self.e
        e.loop(
            0, self.vectors, 1, [],
            lambda j, _: body(e.mul(j, e.vector_bytes), e.mul(j, e.lanes)),
        )  # fmt: skip
