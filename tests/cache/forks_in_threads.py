"""Requests on forks of one paged cache, each with a thread of its own, beside lists of tokens.

`python -m tests.cache.forks_in_threads --seconds 600` runs eight threads for ten minutes.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import qkv
from qkv.cache import PagedCache
from qkv.problem.stored_rows import as_stored_rows, whole_rows

PAGE = 3
HEADS, DIM = 2, 64
REQUESTS = 6
"""Requests of each thread on one pool; a new pool grows again."""


@dataclass
class Done:
    """What the threads have done, and what was wrong."""

    requests: int = 0
    tokens_compared: int = 0
    wrong: list[Any] = field(default_factory=list)


def rows_of(tokens: np.ndarray, of_library: Callable[[np.ndarray], Any]) -> tuple[Any, Any]:
    """Keys and values (batch, heads, new, dim) that say which token they are, also as int8.

    The largest number of a row is the token's, so that its scale gives it back.
    """
    key = np.broadcast_to(tokens[:, None, :, None], (len(tokens), HEADS, tokens.shape[1], DIM))
    key = np.ascontiguousarray(key, np.float32)
    return of_library(key), of_library(-key)


def tokens_in(rows: Any, lengths: np.ndarray) -> list[list[float]]:
    """The tokens of each sequence, read through the page table; an error if heads disagree."""
    found = []
    for stored, sign in ((rows.key, 1), (rows.value, -1)):
        if isinstance(stored.pages, qkv.Quantized):
            given = stored
        else:
            given = qkv.Paged(np.asarray(stored.pages), stored.page_table)
        with np.errstate(invalid="ignore"):  # Rows behind the lengths hold anything.
            whole = sign * whole_rows(as_stored_rows(given, "rows", "bhld"), np.dtype(np.float32))
        flat = whole.swapaxes(1, 2).reshape(len(whole), -1, HEADS * DIM)
        sequences = []
        for row, length in zip(flat, lengths, strict=True):
            assert (np.ptp(row[:length], axis=1) < 1e-2).all(), "entries of one row differ"
            sequences.append(row[:length, 0].round().tolist())
        found.append(sequences)
    assert found[0] == found[1], "keys and values differ"
    return found[0]


def serve(
    prompt: PagedCache,
    prefix: list[float],
    thread: int,
    of_library: Callable[[np.ndarray], Any],
    start: threading.Barrier,
    done: Done,
) -> None:
    """Requests, each a fork that grows, forks, reorders, truncates and is dropped or reset."""
    random = np.random.default_rng(thread)
    token = float(thread * 100 % 8000 + 1)
    held: list[tuple[PagedCache, list[list[float]]]] = []
    start.wait()
    try:
        for _ in range(REQUESTS):
            cache, model = prompt.fork(), [list(prefix)]
            for _ in range(int(random.integers(5, 30))):
                kind = random.integers(10)
                if kind < 6:
                    counts = random.integers(0, random.choice([2, 12]), len(model))
                    new = np.zeros((len(model), max(counts)))
                    for row, count in enumerate(counts):
                        new[row, :count] = token
                        model[row] += [token] * int(count)
                        token = token % 8000 + 1
                    rows = cache.append(*rows_of(new, of_library), counts)
                    _compare(rows, cache, model, done)
                elif kind == 6:
                    chosen = random.integers(0, len(model), random.integers(1, 4))
                    cache.reorder(chosen)
                    model = [list(model[i]) for i in chosen]
                elif kind == 7 and random.integers(2):
                    lengths = [int(random.integers(0, len(s) + 1)) for s in model]
                    cache.truncate(lengths)
                    model = [s[:n] for s, n in zip(model, lengths, strict=True)]
                elif kind == 8:
                    held.append((cache.fork(), [list(s) for s in model]))
                else:
                    _compare(cache.read(), cache, model, done)
            _compare(cache.read(), cache, model, done)
            if random.integers(2):
                cache.reset()
            if len(held) > 3:
                other, tokens = held.pop(int(random.integers(len(held))))
                _compare(other.read(), other, tokens, done)
            del cache
            done.requests += 1
    except Exception as error:
        done.wrong.append(error)


def _compare(rows: Any, cache: PagedCache, model: list[list[float]], done: Done) -> None:
    lengths = cache.lengths
    assert lengths.tolist() == [len(s) for s in model], "lengths"
    found = tokens_in(rows, lengths)
    done.tokens_compared += sum(map(len, model))
    if found != model:
        done.wrong.append((found, model))


def run(
    threads: int = 8,
    dtype: str | None = None,
    of_library: Callable[[np.ndarray], Any] = np.asarray,
    seed: int = 0,
) -> Done:
    """What became of requests on forks of one prompt; the pages are counted at the end too."""
    prompt, prefix = PagedCache(PAGE, dtype=dtype), [1.0, 2.0, 3.0, 4.0, 5.0]
    prompt.append(*rows_of(np.array([prefix]), of_library))
    done, start = [Done() for _ in range(threads)], threading.Barrier(threads)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [
            threading.Thread(
                target=serve, args=(prompt, prefix, seed + n, of_library, start, done[n])
            )
            for n in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    total = Done(
        sum(d.requests for d in done),
        sum(d.tokens_compared for d in done),
        [wrong for d in done for wrong in d.wrong],
    )
    _compare(prompt.read(), prompt, [prefix], total)
    free, pages = prompt.pages_free, prompt._pool.allocator.num_pages
    if pages - free != prompt.pages_held:
        total.wrong.append(f"{pages - free} pages are held, {prompt.pages_held} by the prompt")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    kinds: Counter[str] = Counter()
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        seed = 1000 * kinds["pools"]
        done = run(options.threads, (None, "int8")[kinds["pools"] % 2], seed=seed)
        kinds.update(
            pools=1,
            requests=done.requests,
            tokens_compared=done.tokens_compared,
            wrong=len(done.wrong),
        )
        for wrong in done.wrong[:3]:
            print(repr(wrong)[:500], flush=True)
    print(dict(kinds))
    sys.exit(bool(kinds["wrong"]))


if __name__ == "__main__":
    main()
