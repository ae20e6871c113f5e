"""The loop over heads of passes over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qkv.backends.cpu.emit.argument_block import COUNTER_BYTES, WORD
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Emitter, Value


def emit_head_job(
    e: Emitter, fields: Sequence[str], run: Callable[[Value, dict[str, Value]], None]
) -> None:
    """Emit `job(arguments, worker)`, which takes heads until none is left.

    `run(number, words)` emits the pass over one head of one batch row, numbered through; `words`
    has the words of the argument block by name, of which the first is `limit`.
    """
    with e.function("job", [POINTER, INT64], public=True) as (_, (arguments, _worker)):
        words = {
            name: e.load(e.at(arguments, COUNTER_BYTES + WORD * i), INT64, WORD)
            for i, name in enumerate(fields)
        }

        def take_head() -> tuple[Value, Value]:
            number = e.builder.atomic_rmw("add", arguments, e.index(1), "monotonic")
            return number, e.below(number, words["limit"])

        e.take_while(take_head, lambda number: run(number, words))
