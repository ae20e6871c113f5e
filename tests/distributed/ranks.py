"""Processes that are the ranks of a group, and call functions of these tests together."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LIMIT = 480.0
"""Seconds that one call of all ranks may take, on a slow machine beside other work too."""


def _measured() -> dict[str, Any] | None:
    """How coverage is measured in this process, None if it is not."""
    module = sys.modules.get("coverage")
    current = None if module is None else module.Coverage.current()
    if current is None:
        return None
    return {"data_file": current.config.data_file, "config_file": current.config.config_file}


def _serve(rank: int, ranks: int, store: str, pipe: Any, measured: dict[str, Any] | None) -> None:
    if measured is None:
        _answer(rank, ranks, store, pipe)
        return
    import coverage

    here = coverage.Coverage(data_suffix=True, **measured)
    here.start()
    try:
        _answer(rank, ranks, store, pipe)
    finally:
        here.stop()
        here.save()


def _answer(rank: int, ranks: int, store: str, pipe: Any) -> None:
    os.environ.update(QKV_NUM_THREADS="1", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    while (called := pipe.recv()) is not None:
        function, arguments = called
        try:
            # A module is imported with its first function, which takes ranks of a busy machine
            # very different times.
            dist.barrier()
            pipe.send((True, function(rank, ranks, *arguments)))
        except BaseException as error:
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class Ranks:
    """`ranks(function, *arguments)` calls `function(rank, ranks, *arguments)` in every process."""

    def __init__(self, count: int, folder: Path, ends_by_itself: bool = True) -> None:
        self.ends_by_itself = ends_by_itself
        context = mp.get_context("spawn")
        self.count = count
        self.pipes = []
        self.processes = []
        for rank in range(count):
            own, other = context.Pipe()
            store = str(folder / f"store{count}")
            process = context.Process(
                target=_serve, args=(rank, count, store, other, _measured()), daemon=True
            )
            process.start()
            self.pipes.append(own)
            self.processes.append(process)

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        for pipe in self.pipes:
            pipe.send((function, arguments))

    def answers(self, ranks: Any = None) -> list[tuple[bool, Any]]:
        """(whether it returned, what it returned or raised) of each rank."""
        found = []
        for rank in range(self.count) if ranks is None else ranks:
            assert self.pipes[rank].poll(LIMIT), f"rank {rank} does not answer"
            found.append(self.pipes[rank].recv())
        return found

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.begin(function, *arguments)
        found = self.answers()
        failed = [str(what) for succeeded, what in found if not succeeded]
        if failed:
            pytest.fail("\n".join(failed))
        return [what for _, what in found]

    def close(self) -> None:
        """End the ranks; those that do not end by themselves are killed."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                with contextlib.suppress(BrokenPipeError):  # It was killed, but is not gone yet.
                    pipe.send(None)
        for process in self.processes:
            process.join(10 if self.ends_by_itself else 0)
            process.kill()
