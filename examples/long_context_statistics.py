"""Statistics of one layer of 12 heads at 16,384 tokens, whose weights would take 12.9 GB.

    python examples/long_context_statistics.py [LENGTH]

Two heads are made on purpose, the others look where chance sends them: head 3 attends to the token
before, head 8 to what followed the same token before. NumPy alone; takes half a minute to a minute.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

import qkv
from qkv.inspection.models.model_record import ModelRecord
from qkv.ledger import memory

HEADS, HEAD_DIM, VOCABULARY = 12, 64, 2000
PREVIOUS, INDUCTION = 3, 8
Array = NDArray[np.float32]
Found = TypeVar("Found")


def layer(length: int, ids: NDArray[np.int64]) -> tuple[Array, Array, Array]:
    """Query, key and value (1, heads, length, head_dim)."""
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((1, HEADS, length, HEAD_DIM), np.float32) for _ in range(3)
    )
    # Directions of places and of tokens: nearly orthogonal, as random ones are.
    places = rng.standard_normal((length + 1, HEAD_DIM), np.float32)
    tokens = rng.standard_normal((VOCABULARY, HEAD_DIM), np.float32)
    key[0, PREVIOUS], query[0, PREVIOUS] = places[1:], 4 * places[:-1]
    query[0, INDUCTION] = 4 * tokens[ids]
    key[0, INDUCTION, 1:] = tokens[ids[:-1]]
    return query, key, value


class Peak:
    """The most memory that this process has held, beyond what it held before."""

    def __enter__(self) -> Peak:
        self.before = self.bytes = resident()
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watch.join()
        self.bytes -= self.before

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self.bytes = max(self.bytes, resident())


def resident() -> int:
    """Bytes of memory in use, where the system tells in a file."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def measured(what: str, run: Callable[[slice], Found]) -> Found:
    """Run it on all rows, and say what that took; kernels are compiled on a few rows first."""
    run(slice(0, 64))
    began = time.perf_counter()
    with Peak() as peak:
        found = run(slice(None))
    seconds = time.perf_counter() - began
    print(f"{what}: {seconds:.1f} s, {memory(peak.bytes)} at most beside query, key and value")
    return found


def main(length: int = 16_384) -> None:
    half = np.random.default_rng(1).integers(0, VOCABULARY, length // 2)
    ids = np.concatenate([half, half])
    query, key, value = layer(len(ids), ids)
    dense = HEADS * len(ids) ** 2 * 4
    print(f"{HEADS} heads, {len(ids)} tokens; the weights in float32 are {dense / 1e9:.1f} GB")

    def statistics(rows: slice) -> tuple[Array, Array]:
        arrays = (array[:, :, rows] for array in (query, key, value))
        record = qkv.inspect(*arrays, qkv.Causal())
        return record.entropy, record.received

    entropy, received = measured("output, entropy and received weight", statistics)
    print(f"  mean entropy {entropy.mean():.2f} nats, most received {received.max():.0f}")

    def scores(rows: slice) -> ModelRecord:
        record = ModelRecord("one layer")
        arrays = (array[:, :, rows] for array in (query, key))
        record.add(*arrays, qkv.Causal(), name="layer 0", tokens=ids[None, rows])
        return record

    print(measured("every score of every head", scores).rows())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
