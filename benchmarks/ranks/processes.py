"""Processes that are ranks of one group, and call what they are told."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import qkv

__all__ = ["Ranks", "started"]

_MINUTES = 30


def _serve(rank: int, ranks: int, threads: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(threads)
    qkv.set_num_threads(threads)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    while (called := pipe.recv()) is not None:
        function, arguments = called
        try:
            pipe.send(function(rank, ranks, *arguments))
        except Exception as error:
            pipe.send(error)


class Ranks:
    """`ranks(function, *arguments)` calls it on every rank, and gives what each returns."""

    def __init__(self, count: int, threads: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        os.environ["OMP_NUM_THREADS"] = str(threads)
        for rank in range(count):
            own, other = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, count, threads, str(folder / f"store-{count}"), other),
                daemon=True,
            )
            process.start()
            self.pipes.append(own)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, arguments))
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(60 * _MINUTES):
                raise TimeoutError(f"rank {rank} does not answer within {_MINUTES} minutes")
            found.append(pipe.recv())
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return found

    def close(self) -> None:
        """End them."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with suppress(BrokenPipeError):  # This rank has died.
                pipe.send(None)
            process.join(10)
            process.kill()


@contextmanager
def started(count: int, threads: int) -> Iterator[Ranks]:
    """Ranks, until the end of the `with`."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(count, threads, Path(folder))
        try:
            yield ranks
        finally:
            ranks.close()
