"""Work of the server: short answers by a few threads, and one long job at a time.

Long jobs can be stopped. All threads are daemons, so that none of them keeps the process alive.
"""

from __future__ import annotations

import asyncio
import ctypes
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["Job", "Jobs", "StoppedError"]

T = TypeVar("T")

_SHORT_WORKERS = 4
_LOOK_SECONDS = 0.25
"""Seconds between two checks of whether the reader of an answer is still connected."""


class StoppedError(BaseException):
    """Raised in the thread of a job that is to end; it passes through `except Exception`."""


@dataclass(eq=False)
class Job:
    """A long piece of work.

    Attributes
    ----------
    number : int
        By which a page names it.
    name : str
        What is computed, in a few words.
    done, total : int
        How far it is; total is 0 where that is not known.
    began : float
        When it began to run, by `time.monotonic`; 0 while it waits.
    stopped : bool
        Whether it was told to end.
    """

    number: int
    name: str
    work: Callable[[Job], Any]
    done: int = 0
    total: int = 0
    began: float = 0.0
    stopped: bool = False
    thread: threading.Thread | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def progress(self, done: int, total: int) -> None:
        """Note how far the work is; raise `StoppedError` if it is to end."""
        self.done, self.total = done, total
        if self.stopped:
            raise StoppedError

    def stop(self) -> None:
        """End the work at its next step in Python, to which kernels return several times a second.

        Whoever waits for its result is told at once.
        """
        self.stopped = True
        thread = self.thread
        if thread is not None and thread.is_alive() and thread.ident is not None:
            # Raises in the thread when it next runs Python.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(StoppedError)
            )
        self.answered.set()


class Jobs:
    """Runs the work of a server, in an event loop.

    Parameters
    ----------
    waiting : int
        Long jobs that wait for the one that runs.
    """

    def __init__(self, waiting: int) -> None:
        self._most = waiting + 1
        self._count = 0
        self._number = 0
        self._jobs: list[Job] = []
        self._turn = asyncio.Lock()
        self._short: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started = False

    async def soon(self, work: Callable[[], T]) -> T:
        """The result of short work."""
        if not self._started:
            self._started = True
            for _ in range(_SHORT_WORKERS):
                threading.Thread(target=self._serve, name="qkv-lab-short", daemon=True).start()
        loop, result = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        self._short.put(lambda: _settle(loop, result, work))
        returned: T = await result
        return returned

    def _serve(self) -> None:
        while True:
            self._short.get()()

    async def run(
        self,
        name: str,
        work: Callable[[Job], T],
        is_gone: Callable[[], Awaitable[bool]] | None = None,
    ) -> T | None:
        """The result of a long job; None at once if too many wait.

        Parameters
        ----------
        name : str
        work : callable (Job) -> result
        is_gone : callable () -> awaitable bool, optional
            Whether nobody waits for the result any more; the job then ends.

        Raises
        ------
        StoppedError
            It was stopped.
        """
        if self._count >= self._most:
            return None
        self._number += 1
        job = Job(self._number, name, work)
        self._count += 1
        self._jobs.append(job)
        result = asyncio.ensure_future(self._in_turn(job))
        answered = asyncio.ensure_future(job.answered.wait())
        try:
            while not result.done() and not job.stopped:
                waits = {result, answered}
                await asyncio.wait(waits, timeout=_LOOK_SECONDS, return_when="FIRST_COMPLETED")
                if is_gone is not None and await is_gone():
                    job.stop()
            if job.stopped:
                raise StoppedError
            returned: T = result.result()
            return returned
        except asyncio.CancelledError:  # The server ends.
            job.stop()
            raise
        finally:
            answered.cancel()
            result.add_done_callback(_look_at)

    async def _in_turn(self, job: Job) -> Any:
        try:
            async with self._turn:
                if job.stopped:
                    raise StoppedError
                loop = asyncio.get_running_loop()
                result = loop.create_future()
                job.thread = threading.Thread(
                    target=_settle_quietly, args=(loop, result, lambda: job.work(job)),
                    name="qkv-lab-job", daemon=True,
                )  # fmt: skip
                job.began = time.monotonic()
                job.thread.start()
                while not result.done() and job.thread.is_alive():
                    await asyncio.wait({result}, timeout=_LOOK_SECONDS)
                await asyncio.sleep(0)
                # A job that is stopped just before it ends gives no result.
                if not result.done():
                    raise StoppedError
                return result.result()
        finally:
            self._count -= 1
            self._jobs.remove(job)

    def state(self) -> dict[str, Any]:
        """What runs, and how many jobs wait, for JSON."""
        running = [job for job in self._jobs if job.began and not job.stopped]
        return {
            "running": [
                {
                    "number": job.number,
                    "name": job.name,
                    "done": job.done,
                    "total": job.total,
                    "seconds": round(time.monotonic() - job.began, 1),
                }
                for job in running
            ],
            "waiting": sum(not job.began for job in self._jobs),
        }

    def stop(self, number: int | None = None) -> bool:
        """Stop one job, or all; return whether there was one."""
        chosen = [job for job in self._jobs if number in (None, job.number) and not job.stopped]
        for job in chosen:
            job.stop()
        return bool(chosen)

    def threads(self) -> list[threading.Thread]:
        """Threads of jobs that have not ended."""
        return [job.thread for job in self._jobs if job.thread is not None]


def _settle(loop: asyncio.AbstractEventLoop, result: asyncio.Future[Any], work: Any) -> None:
    """Do work, and give its result or exception to an event loop."""
    returned, error = None, None
    try:
        returned = work()
    except BaseException as raised:
        error = raised
    with suppress(RuntimeError):  # The loop has ended, and nobody waits.
        loop.call_soon_threadsafe(_hand_over, result, returned, error)


def _settle_quietly(*arguments: Any) -> None:
    with suppress(StoppedError):
        _settle(*arguments)


def _hand_over(result: asyncio.Future[Any], returned: Any, error: BaseException | None) -> None:
    if result.done():
        return
    if error is None:
        result.set_result(returned)
    else:
        result.set_exception(error)


def _look_at(result: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a job that was stopped, for which nobody else asks."""
    if not result.cancelled():
        result.exception()
