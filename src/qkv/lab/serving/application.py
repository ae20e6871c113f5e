"""What the lab's server answers, as an ASGI application."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from qkv.arguments.declarations import is_integer
from qkv.errors import ArgumentError, QkvError, UnsupportedError
from qkv.files import read_array_bytes
from qkv.lab.document import FILES, asset, export_data, offline_page, served_page
from qkv.lab.messages import failure, read_request, read_view
from qkv.lab.parameters import MissingError, StaleError, TooLongError
from qkv.lab.serving.guard import Guard
from qkv.lab.serving.jobs import Job, Jobs, StoppedError
from qkv.lab.session import HEAVY, Session
from qkv.lab.sources.source import Source, open_arrays, require_pairs

__all__ = ["Limits", "application"]

_T = TypeVar("_T")
_LOG = logging.getLogger("qkv.lab")


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one request may bring, and how many may wait.

    Attributes
    ----------
    call_bytes, file_bytes : int
        Bytes of the body of a call, and of a file.
    waiting : int
        Heavy jobs that wait for the one that runs; more are answered 503.
    pairs : int
        Pairs of a query and a key, over all heads, of a file that is brought; more are answered
        422 before any is computed.
    connections : int
        More are answered 503.
    idle_seconds : float
        How long a body may send nothing before it is answered 408.
    """

    call_bytes: int = 1 << 20
    file_bytes: int = 1 << 28
    waiting: int = 64
    pairs: int = 1 << 38
    connections: int = 512
    idle_seconds: float = 30.0


def application(
    session: Session,
    token: str,
    host: str,
    limits: Limits,
    jobs: Jobs | None = None,
) -> Guard:
    """The server as an ASGI application.

    Parameters
    ----------
    session : Session
    token : str
        Opens the page once.
    host : str
        The address that requests must name, such as "127.0.0.1:8123".
    limits : Limits
    jobs : Jobs, optional
        Those of the server, if the caller is to be able to stop them.
    """
    answers = _Answers(session, limits, jobs or Jobs(limits.waiting))
    routes = [
        Route("/", answers.page, methods=["GET"]),
        *(Route(path, answers.file, methods=["GET"]) for path in FILES),
        Route("/call", answers.call, methods=["POST"]),
        Route("/file", answers.upload, methods=["POST"]),
        Route("/page", answers.saved, methods=["POST"]),
        Route("/job", answers.job, methods=["POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers={_RefusedError: _refusal})
    app.router.redirect_slashes = False
    return Guard(app, token, host)


class _JSON(Response):
    """An answer in ASCII, since names of tokens may hold surrogates that UTF-8 cannot encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class _RefusedError(Exception):
    """A request that is answered with an error and a status."""

    def __init__(self, error: Exception, status: int, request_id: int = 0) -> None:
        self.response = _JSON(failure(request_id, error), status)


def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, _RefusedError)
    return error.response


class _Answers:
    """One method for each address."""

    def __init__(self, session: Session, limits: Limits, jobs: Jobs) -> None:
        self.session, self.limits, self.jobs = session, limits, jobs
        self.files = {path: asset(path[1:]) for path in FILES}
        self.reading = asyncio.Lock()

    async def page(self, request: Request) -> Response:
        data = await self.jobs.soon(lambda: served_page(self.session.data("server")))
        return HTMLResponse(data)

    async def file(self, request: Request) -> Response:
        path = request.url.path
        return Response(self.files[path], headers={"content-type": FILES[path]})

    async def call(self, request: Request) -> Response:
        asked = await self._read(request, "call", read_request)

        def answer() -> Response:
            reply = self.session.answer(asked.method, asked.params, asked.shown)
            if reply.arrays:
                return Response(reply.frame(asked.id), media_type="application/octet-stream")
            return _JSON(reply.message(asked.id))

        if asked.method not in HEAVY:
            return await _result(self.jobs.soon(answer), asked.id)
        job = self.jobs.run(asked.method, lambda job: answer(), request.is_disconnected)
        return await _result(job, asked.id)

    async def saved(self, request: Request) -> Response:
        """What is shown, as a file that opens with the given view."""
        view, about = await self._read(request, "view", read_view)

        def write(job: Job) -> Response:
            self.session.require_shown(about)
            data = export_data(self.session, view)
            # Something else may have been opened meanwhile.
            self.session.require_shown(about)
            return HTMLResponse(offline_page(data))

        return await _result(self.jobs.run("the page", write, request.is_disconnected))

    async def upload(self, request: Request) -> Response:
        """The data of a page that shows the file."""
        _require_type(request, "file", "application/octet-stream")
        # A second file is refused before it is read, so that memory holds one at a time.
        if self.reading.locked():
            raise _busy()
        async with self.reading:
            most = self.limits.file_bytes
            action = "Start qkv lab with the name of the file."
            data = await self._body(request, "file", most, action)

            def read(job: Job) -> Source:
                arrays = read_array_bytes(data, "the file", most)
                require_pairs(arrays, self.limits.pairs)
                return open_arrays(arrays, "a file of the reader", progress=job.progress)

            source = await _result(self.jobs.run("the file", read, request.is_disconnected))

            def show() -> Response:
                return _JSON({"ok": True, "result": {"data": self.session.show(source, "server")}})

            return await self.jobs.soon(show)

    async def job(self, request: Request) -> Response:
        """The state of the jobs as JSON; a body with the number of a job stops that job first."""
        _require_type(request, "call", "application/json")
        try:
            number = json.loads(await self._body(request, "call", 100)).get("stop")
        except (_RefusedError, ValueError, AttributeError, RecursionError):
            error = ArgumentError('a job is asked for with {"stop": null}.')
            raise _RefusedError(error, 400) from None
        if is_integer(number):
            self.jobs.stop(number)
        return _JSON({"ok": True, "result": self.jobs.state()})

    async def _read(self, request: Request, what: str, read: Callable[[Any], _T]) -> _T:
        """What `read` makes of a body of JSON."""
        _require_type(request, what, "application/json")
        try:
            return read(json.loads(await self._body(request, what, self.limits.call_bytes)))
        except (ValueError, RecursionError) as error:
            known = error if isinstance(error, QkvError) else ArgumentError("the body is not JSON.")
            raise _RefusedError(known, 400) from error

    async def _body(self, request: Request, what: str, most: int, action: str = "") -> bytes:
        """The body, of at most `most` bytes; no more than these are kept."""
        too_large = ArgumentError(f"a {what} has at most {most} bytes here.", action=action)
        said = request.headers.get("content-length", "0")
        if not said.isdecimal() or int(said) > most:
            raise _RefusedError(too_large, 413)
        data = bytearray()
        chunks = request.stream()
        while True:
            try:
                chunk = await asyncio.wait_for(anext(chunks), self.limits.idle_seconds)
            except StopAsyncIteration:
                break
            except (TimeoutError, ClientDisconnect):
                error = ArgumentError(f"the {what} did not arrive.")
                raise _RefusedError(error, 408) from None
            data += chunk
            if len(data) > most:
                raise _RefusedError(too_large, 413)
        return bytes(data)


def _require_type(request: Request, what: str, media_type: str) -> None:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != media_type:
        raise _RefusedError(ArgumentError(f"a {what} is {media_type}."), 415)


async def _result(work: Awaitable[_T | None], request_id: int = 0) -> _T:
    """The result of work; a refusal if it failed, was stopped, or if too much other work waits."""
    try:
        result = await work
    except StoppedError:
        raise _RefusedError(UnsupportedError("it was stopped."), 409, request_id) from None
    except Exception as error:
        raise _RefusedError(error, _status(error), request_id) from error
    if result is None:
        raise _busy(request_id)
    return result


def _status(error: Exception) -> int:
    kinds = (
        (TooLongError, 422),
        (MissingError, 404),
        (StaleError, 409),
        (UnsupportedError, 422),
        (QkvError, 400),
    )
    for kind, status in kinds:
        if isinstance(error, kind):
            return status
    _LOG.error("a request failed", exc_info=error)
    return 500


def _busy(request_id: int = 0) -> _RefusedError:
    error = UnsupportedError("too many questions wait for an answer.", action="Ask again later.")
    return _RefusedError(error, 503, request_id)
