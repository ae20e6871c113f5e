"""Ctrl-C at every line of every method that changes a cache: all of it happens, or nothing."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.cache import ContiguousCache, PageAllocator, PagedCache, RollingCache

FOLDERS = tuple(str(Path(qkv.__file__).parent / name) for name in ("cache", "hf"))


class Interrupt(KeyboardInterrupt):
    """Raised by the test."""


def _leaves_a_with(frame: FrameType) -> bool:
    """Whether the line is that of a `with` whose block has ended.

    No signal handler runs there: the interpreter looks for signals after calls, in the block still,
    and leaves a lock in one step.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    if dis.opname[code[at]] == "SWAP":  # below a value that is returned
        at += 2
    return all(
        dis.opname[code[i]] == "LOAD_CONST" and frame.f_code.co_consts[code[i + 1]] is None
        for i in (at, at + 2)
    )


def _goes_round_a_comprehension(frame: FrameType) -> bool:
    """Whether a loop asks for its next value, perhaps that of a comprehension inlined there.

    From 3.12 on, what a trace function raises there passes by the `with` around the comprehension.
    What a signal handler raises does not.
    """
    inlines = sys.version_info >= (3, 12)
    return inlines and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"


def interrupted_at(number: int, call: Callable[[], Any]) -> bool:
    """Whether the call has as many lines; it is interrupted there."""
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(FOLDERS):
            return None
        if event == "line" and not (_leaves_a_with(frame) or _goes_round_a_comprehension(frame)):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def tokens(*sequences: list[float]) -> np.ndarray:
    return np.array(sequences, np.float64)[:, None, :, None] * np.ones(2)


CACHES: dict[str, Callable[[], Any]] = {
    "contiguous": ContiguousCache,
    "contiguous int8": lambda: ContiguousCache(dtype="int8"),
    "rolling": lambda: RollingCache(3, 1),
    "rolling int8": lambda: RollingCache(3, 1, dtype="int8"),
    "paged": lambda: PagedCache(2),
    "paged int8": lambda: PagedCache(2, dtype="int8"),
    "fixed pages": lambda: PagedCache(2, 12),
}
START = ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
MORE = ([7.0, 8.0], [9.0, 10.0])
METHODS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "append": (
        lambda c: c.append(tokens(*MORE), tokens(*MORE)),
        lambda s: [s[0] + MORE[0], s[1] + MORE[1]],
    ),
    "truncate": (lambda c: c.truncate([2, 3]), lambda s: [s[0][:2], s[1]]),
    "reorder": (lambda c: c.reorder([1, 1, 0]), lambda s: [s[1], s[1], s[0]]),
    "reset": (lambda c: c.reset(), lambda s: []),
    "fork": (lambda c: c.fork(), lambda s: s),
}  # fmt: skip


def answers(cache: Any, sequences: list[list[float]]) -> bool:
    """Whether attention over the cache is that over the sequences, after one more token."""
    if cache.lengths.tolist() != ([len(s) for s in sequences] if sequences else 0):
        return False
    sequences = sequences or [[], []]
    more = tokens(*([11.0 + n] for n in range(len(sequences))))
    query = np.full((len(sequences), 1, 1, 2), 0.05)
    found = cache.append(more, more).attention(query, qkv.Causal())
    for row, sequence, new in zip(found, sequences, more, strict=True):
        whole = np.concatenate([tokens(sequence)[0], new], axis=1)
        if isinstance(cache, RollingCache):
            whole = np.concatenate([whole[:, :1], whole[:, 1:][:, -3:]], axis=1)
        weights = np.exp(whole @ query[0, 0, 0] / np.sqrt(2))
        expected = (weights[..., None] * whole).sum(1) / weights.sum()
        if not np.abs(row[0, 0] - expected).max() < 0.3 * (cache.dtype == "int8") + 1e-6:
            return False
    return True


@pytest.mark.slow
@pytest.mark.sampled(("kind", "method"), list(product(CACHES, METHODS)), one_in=5)
def test_a_cache_is_as_before_or_as_after(kind: str, method: str) -> None:
    change, changed = METHODS[method]
    before = [list(s) for s in START]
    lines, left = 0, True
    while left:
        root = CACHES[kind]()
        root.append(tokens(*START), tokens(*START))
        cache, other = root.fork(), root.fork()
        left = interrupted_at(lines, lambda cache=cache: change(cache))
        where = f"line {lines} of {method}"
        as_before = cache.lengths.tolist() == [3, 3]
        assert as_before or cache.lengths.tolist() == ([len(s) for s in changed(before)] or 0), (
            where
        )
        held = {"as before": before} if as_before else {"as after": changed(before)}
        if method == "reorder" and not as_before:
            assert len(cache.lengths) == 3, where
        assert any(answers(cache.fork(), s) for s in held.values()), where
        assert answers(cache, next(iter(held.values()))), where
        assert answers(other, before), where
        if isinstance(root, PagedCache):
            cache.reset()
            other.reset()
            assert root._pool.allocator.num_pages - root.pages_free == root.pages_held == 4, where
            root.reset()
            assert root.pages_free == root._pool.allocator.num_pages, f"{where}: pages are lost"
        lines += 1
    assert lines > 1


@pytest.mark.parametrize("lengths", [[3, 2], [2, 3]])
def test_sequences_of_different_lengths_on_one_page(lengths: list[int]) -> None:
    """One of them writes to the page itself, behind the tokens of the other too."""
    before = [[1.0, 2.0, 3.0][:n] for n in lengths]
    after = [sequence + [new] for sequence, new in zip(before, (7.0, 9.0), strict=True)]
    lines, left = 0, True
    while left:
        cache = PagedCache(4)
        cache.append(tokens([1.0, 2.0, 3.0]), tokens([1.0, 2.0, 3.0]))
        cache.reorder([0, 0])
        cache.truncate(lengths)
        more = tokens([7.0], [9.0])
        left = interrupted_at(lines, lambda cache=cache, more=more: cache.append(more, more))
        as_before = cache.lengths.tolist() == lengths
        assert answers(cache, before if as_before else after), f"line {lines}"
        lines += 1
    assert lines > 1


@pytest.mark.slow
@pytest.mark.sampled("kind", list(CACHES), one_in=3)
def test_the_first_append_may_be_of_other_shapes_after_it_was_interrupted(kind: str) -> None:
    lines, left = 0, True
    while left:
        cache = CACHES[kind]()
        left = interrupted_at(
            lines, lambda cache=cache: cache.append(tokens(*START), tokens(*START))
        )
        if not cache.lengths.ndim:
            assert cache.nbytes == 0
            wide = np.ones((1, 3, 4, 5))
            assert cache.append(wide, wide).attention(wide).shape == wide.shape
        else:
            assert answers(cache, [list(s) for s in START])
        lines += 1


@pytest.mark.parametrize("method", ["take", "share", "release", "grow"])
def test_pages_of_an_allocator(method: str) -> None:
    lines, left = 0, True
    while left:
        allocator = PageAllocator(6)
        held = allocator.take(3)
        argument = {"take": 2, "grow": 8}.get(method, held[:2])
        call = partial(getattr(allocator, method), argument)
        left = interrupted_at(lines, call)
        times = [allocator.references(page) for page in range(allocator.num_pages)]
        before, after = [1, 1, 1, 0, 0, 0], {
            "take": [1, 1, 1, 1, 1, 0],
            "share": [2, 2, 1, 0, 0, 0],
            "release": [0, 0, 1, 0, 0, 0],
            "grow": [1, 1, 1, 0, 0, 0, 0, 0],
        }[method]  # fmt: skip
        assert times in (before, after), lines
        free = [page for page, n in enumerate(times) if not n]
        assert sorted(allocator.take(len(free))) == free
        lines += 1
