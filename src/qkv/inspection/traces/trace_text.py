"""A trace as plain text to read, one section a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.inspection.rendering.counts import counted
from qkv.inspection.rendering.tokens import columns, printable
from qkv.inspection.traces.trace_fields import (
    RowGradients,
    TracedGradients,
    TracedHead,
    TracedRow,
    TraceFields,
)

Array = NDArray[Any]

BAR = 40
"""Characters of the bar of a weight of 1, where there is room."""
_SHORTEST_BAR = 8
"""Where there is room for fewer characters, there are no bars."""


def bar(weight: float, length: int = BAR) -> str:
    """One `#` for each 1/length of the weight, truncated."""
    # The small addend gives a weight of k/length with rounding errors its k characters.
    return "#" * int(weight * length + 1e-9) if np.isfinite(weight) else ""


def _key_name(trace: TraceFields, j: int, numbered: bool) -> str:
    """A key by its token, and by its row where neighbours are missing."""
    name = _name(trace.kv_tokens, j, "key")
    return f"{name} {j}" if numbered and trace.kv_tokens is not None else name


def _name(tokens: Sequence[str] | None, i: int, word: str) -> str:
    return f"{word} {i}" if tokens is None else printable(tokens[i])


def _fold(terms: list[str], joint: str, width: int) -> list[str]:
    """Terms joined, in lines of about `width` columns."""
    lines, line = [], ""
    for term in terms:
        longer = line + joint + term if line else term
        if line and len(longer) > width:
            lines.append(line + joint.rstrip())
            longer = term
        line = longer
    return [*lines, line]


def _short(x: Any) -> str:
    """A given number: as short as it is."""
    return f"{x:.4g}" if x != 0 else "0"


def _number(x: Any) -> str:
    """A computed number: four decimals, or an exponent where those would hide it."""
    if x == 0:
        return "0.0000"
    return f"{x:.4f}" if not np.isfinite(x) or 5e-5 <= abs(x) < 1e6 else f"{x:.3e}"


def _numbers(array: Array) -> list[str]:
    return [_number(x) for x in array]


def _aligned(array: Array) -> list[str]:
    numbers = _numbers(array)
    width = max(map(len, numbers), default=0)
    return [f"{number:>{width}}" for number in numbers]


def _vector(
    start: str, array: Array, width: int, end: str = "", form: Callable[[Any], str] = _short
) -> Iterator[str]:
    """`start [a, b, ...] end`, folded."""
    lines = _fold([form(x) for x in array], ", ", width - columns(start) - 2)
    lines[0] = f"{start}[{lines[0]}"
    lines[1:] = [" " * (columns(start) + 1) + line for line in lines[1:]]
    lines[-1] += f"]{end}"
    yield from lines


def _without_noise(array: Array) -> Array:
    """Entries that are rounding errors of the largest one as zeros."""
    largest = np.abs(array).max(initial=0.0, where=np.isfinite(array))
    return np.where(np.abs(array) < 1e-14 * largest, 0.0, array)


def render(trace: TraceFields, width: int = 100, top: int | None = None) -> str:
    """The trace; products are folded at `width` columns, and `top` keys of a row are printed."""
    lines = list(_heading(trace))
    for head in trace.heads:
        for row in head.rows:
            lines += ["", *_Row(trace, head, row, width, top).lines()]
    if trace.gradient is not None:
        lines += ["", *_gradients(trace, trace.gradient, width, top)]
    return "\n".join(line.rstrip() for line in lines)


def _heading(trace: TraceFields) -> Iterator[str]:
    p = trace.problem
    yield f"Attention: {printable(p.summary, 200)}"
    heads = counted(p.num_heads, "head")
    if p.num_kv_heads != p.num_heads:
        heads += f" on {p.num_kv_heads} kv heads"
    batch = f"batch {p.batch_shape}, " if p.batch_shape else ""
    yield (
        f"{batch}{heads}, {counted(p.q_len, 'query', 'queries')}, "
        f"{counted(p.kv_len, 'key')}, head_dim {p.head_dim}, "
        f"v_head_dim {p.v_head_dim}, {p.dtype}"
    )


class _Row:
    """The sections of one query row."""

    def __init__(
        self, trace: TraceFields, head: TracedHead, row: TracedRow, width: int, top: int | None
    ) -> None:
        self.trace, self.head, self.row = trace, head, row
        self.width = width
        kv_len = len(head.kv_pos)
        self.shown = list(range(kv_len))
        if top is not None and top < kv_len:
            # Keys that are allowed come before those that are not, of the same weight 0.
            order = np.lexsort((~row.allowed, -np.nan_to_num(row.softmax.weights, nan=2.0)))
            self.shown = sorted(order[:top].tolist())
        self.keys = {j: _key_name(trace, j, len(self.shown) < kv_len) for j in self.shown}
        self.margin = max(map(columns, self.keys.values()), default=0)
        self.number = 0

    def lines(self) -> Iterator[str]:
        yield from self.title()
        yield from self.products()
        yield from self.scaling()
        yield from self.score_stages()
        yield from self.masking()
        yield from self.softmax()
        yield from self.weighted_sum()
        if self.row.back is not None:
            yield from self.backward_steps(self.row.back)

    def step(self, title: str) -> str:
        self.number += 1
        return f"\n{self.number}. {title}"

    def named(self, j: int) -> str:
        name = self.keys[j]
        return f"   {name}{' ' * (self.margin - columns(name))}  "

    def table(self, header: Sequence[str], *parts: Sequence[str]) -> Iterator[str]:
        """One line for each key; numbers are right-aligned below their headers."""
        widths = [
            max([len(title), *(len(cell) for cell in part)])
            for title, part in zip(header, parts, strict=True)
        ]
        if any(header):
            titles = "  ".join(f"{t:>{w}}" for t, w in zip(header, widths, strict=True))
            yield self.indent + titles
        for i, j in enumerate(self.shown):
            row = "  ".join(f"{part[i]:>{w}}" for part, w in zip(parts, widths, strict=True))
            yield self.named(j) + row

    def title(self) -> Iterator[str]:
        row, head, problem = self.row, self.head, self.trace.problem
        name = _name(self.trace.tokens, row.q_index, "query")
        place = [f"row {row.q_index}"]
        if row.q_pos != row.q_index:
            place.append(f"position {row.q_pos}")
        if problem.num_heads > 1:
            place.append(f"head {head.head}")
        if problem.num_kv_heads != problem.num_heads:
            place.append(f"kv head {head.kv_head}")
        if problem.batch_shape:
            place.append(f"batch {head.batch}")
        shown = f"'{name}'" if self.trace.tokens else name
        yield f"=== {shown} ({', '.join(place)}) ==="
        if len(self.shown) < len(row.allowed):
            share, keys = row.softmax.weights[self.shown].sum(), f"Of {len(row.allowed):,} keys"
            yield (
                f"{keys}, {len(self.shown)} are shown. Sums are over all."
                if np.isnan(share)
                else f"{keys}, the {len(self.shown)} with most weight are shown; "
                f"together they have {share:.4f} of it. Sums are over all."
            )
        if np.isnan(row.softmax.weights).any():
            yield "Its weights are not numbers, since a score or a sink is NaN or plus infinity."
            yield "qkv.inspect says why."
        yield from self.vector("q = ", row.query)
        if row.rotated_query is not None:
            rotation = printable(str(problem.rotation), 80)
            yield from self.vector("R q = ", row.rotated_query, f"  turned by {rotation}")

    def products(self) -> Iterator[str]:
        row = self.row
        rotated = row.rotated_query is not None
        query = row.query if row.rotated_query is None else row.rotated_query
        key = self.head.key if self.head.rotated_key is None else self.head.rotated_key
        yield self.step("Dot products: " + ("R q . R k" if rotated else "q . k"))
        raw = _aligned(row.raw[self.shown])
        width = self.width - self.margin - max(map(len, raw), default=0) - 8
        sums = [
            _fold([f"{_short(a)}*{_short(b)}" for a, b in zip(query, k, strict=True)], " + ", width)
            for k in key[self.shown]
        ]
        widest = max((len(lines[-1]) for lines in sums), default=0)
        for j, lines, total in zip(self.shown, sums, raw, strict=True):
            starts = [self.named(j)] + [self.indent] * (len(lines) - 1)
            ends = [""] * (len(lines) - 1) + [f"{'':{widest - len(lines[-1])}} = {total}"]
            for start, line, end in zip(starts, lines, ends, strict=True):
                yield start + line + end

    def numbers(self, of_keys: Array) -> list[str]:
        """The numbers of the keys that are shown."""
        return _numbers(of_keys[self.shown])

    @property
    def indent(self) -> str:
        return " " * (self.margin + 5)

    def vector(
        self, start: str, array: Array, end: str = "", form: Callable[[Any], str] = _short
    ) -> Iterator[str]:
        return _vector(start, array, self.width, end, form)

    def scaling(self) -> Iterator[str]:
        p = self.trace.problem
        why = ""
        if abs(p.scale - p.head_dim**-0.5) <= 1e-12:
            why = f" = 1 / sqrt({p.head_dim})"
        yield self.step(f"Scale: times {_short(p.scale)}{why}")
        yield from self.table([""], self.numbers(self.row.scaled))

    def score_stages(self) -> Iterator[str]:
        before = self.row.scaled
        for stage in self.row.stages:
            yield self.step(f"Score: {printable(stage.label, 80)}")
            yield from self.table(
                ["before", "after"], self.numbers(before), self.numbers(stage.scores)
            )
            before = stage.scores

    def masking(self) -> Iterator[str]:
        row = self.row
        hidden = ~row.allowed
        if not row.masks and not hidden.any():
            return
        yield self.step("Mask: " + (" and ".join(printable(m.label, 80) for m in row.masks)
                                    or "scores of -inf"))  # fmt: skip
        for j in self.shown:
            if row.allowed[j]:
                yield self.named(j) + "allowed"
                continue
            by = [printable(m.label, 80) for m in row.masks if not m.allowed[j]]
            yield self.named(j) + "masked by " + (", ".join(by) or "a score of -inf")

    def softmax(self) -> Iterator[str]:
        row, s = self.row, self.row.softmax
        if np.isneginf(s.row_max):
            yield self.step("Softmax: no key is allowed, so every weight is 0")
            yield f"   lse = -inf   entropy = {_number(s.entropy)} nats"
            return
        yield self.step(
            f"Softmax: subtract the largest, {_number(s.row_max)}; take exp; "
            f"divide by the sum, {_number(s.row_sum)}"
        )
        shown = [_number(row.scores[j]) if row.allowed[j] else "masked" for j in self.shown]
        shifted = [_number(s.shifted[j]) if row.allowed[j] else "" for j in self.shown]
        exp = [_number(s.exp[j]) if row.allowed[j] else "" for j in self.shown]
        numbers = [shown, shifted, exp, self.numbers(s.weights)]
        header = ["score", "shifted", "exp", "weight"]
        used = sum(
            2 + max([len(title), *map(len, part)])
            for title, part in zip(header, numbers, strict=True)
        )
        room = min(BAR, self.width - len(self.indent) - used - len("||"))
        weights = s.weights[self.shown]
        bars = [f"|{bar(w, room):<{room}}|" if room >= _SHORTEST_BAR else "" for w in weights]
        yield from map(str.rstrip, self.table([*header, ""], *numbers, bars))
        if s.sink is not None and s.sink_exp is not None:
            share = s.sink_exp / s.row_sum
            yield (
                f"   The sink, {_number(s.sink)}, adds exp {_number(s.sink_exp)} to the sum "
                f"and takes weight {_number(share)}"
            )
        sums = [
            f"   weights add to {s.weights.sum():.6f}",
            f"   lse = {_number(s.row_max)} + log {_number(s.row_sum)} = {_number(s.lse)}",
            f"   entropy = {_number(s.entropy)} nats",
        ]
        yield from ["".join(sums)] if sum(map(len, sums)) <= self.width else sums
        if row.factors is not None:
            dropped = s.weights * row.factors
            yield self.step(f"Dropout: p = {_short(self.trace.problem.dropout or 0.0)}")
            yield from self.table(
                ["weight", "factor", "kept"],
                self.numbers(s.weights),
                self.numbers(row.factors),
                self.numbers(dropped),
            )

    def weighted_sum(self) -> Iterator[str]:
        row = self.row
        weights = row.softmax.weights if row.factors is None else row.softmax.weights * row.factors
        yield self.step("Output: the values, weighted and added")
        for j, weight in zip(self.shown, _aligned(weights[self.shown]), strict=True):
            if row.allowed[j]:
                yield from self.vector(f"{self.named(j)}{weight} * ", self.head.value[j])
        yield from self.vector("   o = ", row.output, form=_number)

    def backward_steps(self, back: RowGradients) -> Iterator[str]:
        yield self.step("The step back")
        yield from self.vector("   dO = ", back.cotangent)
        names = ["dw", "ds"]
        parts = [self.numbers(back.d_weights), self.numbers(back.d_scores)]
        for slope in back.slopes:
            names.append("slope of " + printable(slope.label, 24))
            parts.append(self.numbers(slope.values))
        names += ["d(q.k)"]
        parts += [self.numbers(back.d_raw)]
        times = " * slopes" if back.slopes else ""
        times_factor = " * factor" if self.row.factors is not None else ""
        scale = _short(self.trace.problem.scale)
        yield f"   dw = dO . v{times_factor},  ds = J dw,  d(q.k) = ds{times} * {scale}"
        yield from self.table(names, *parts)
        yield "   J = diag(w) - w w^T, how each weight (row) changes with each score (column)"
        cells = [self.numbers(column) for column in back.jacobian.T[self.shown]]
        yield from self.table([""] * len(cells), *cells)
        yield from self.vector("   dq = ", _without_noise(back.d_query), form=_number)


def _gradients(
    trace: TraceFields, gradient: TracedGradients, width: int, top: int | None
) -> Iterator[str]:
    yield "=== Gradients, summed over all rows and heads ==="
    shown_rows = sum(len(head.rows) for head in trace.heads)
    all_rows = prod(trace.problem.batch_shape) * trace.problem.num_heads * trace.problem.q_len
    if shown_rows < all_rows:
        yield f"Of all {all_rows:,} rows, not of the {shown_rows:,} above alone."
    arrays = {"dQ": gradient.d_query, "dK": gradient.d_key, "dV": gradient.d_value}
    for name, array in arrays.items():
        shown = _without_noise(array)
        for index in islice(np.ndindex(*array.shape[:-1]), top):
            start = f"{name}[{', '.join(map(str, index))}] = "
            yield from _vector(start, shown[index], width, form=_number)
        rows = int(np.prod(array.shape[:-1], dtype=object))
        if top is not None and rows > top:
            yield f"{name} has {rows - top:,} more rows."
