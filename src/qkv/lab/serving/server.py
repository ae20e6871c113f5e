"""The local page of the lab: a server for one browser on this machine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from qkv.errors import ArgumentError, QkvError, UnsupportedError
from qkv.files import read_array_bytes
from qkv.lab.document import FILES, asset, export_data, offline_page, served_page
from qkv.lab.messages import failure, read_request, read_view
from qkv.lab.parameters import MissingError, StaleError, TooLongError
from qkv.lab.serving.guard import Guard
from qkv.lab.serving.jobs import Job, Jobs, StoppedError
from qkv.lab.session import HEAVY, Session
from qkv.lab.sources.source import Source, open_arrays, require_pairs

__all__ = ["Limits", "application", "listen", "serve"]

_T = TypeVar("_T")
_LOG = logging.getLogger("qkv.lab")

_INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ended."""
_PATIENCE_SECONDS = 1.0


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


class _JSON(Response):
    """An answer in ASCII, since names of tokens may hold surrogates that UTF-8 cannot encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class _TooLargeError(Exception):
    """A body has more bytes than are read."""


class _TooSlowError(Exception):
    """Nothing of a body has arrived for too long."""


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
    jobs = jobs or Jobs(limits.waiting)
    files = {path: asset(path[1:]) for path in FILES}
    reading = asyncio.Lock()

    async def page(request: Request) -> Response:
        data = await jobs.soon(lambda: served_page(session.data("server")))
        return HTMLResponse(data)

    async def file(request: Request) -> Response:
        path = request.url.path
        return Response(files[path], headers={"content-type": FILES[path]})

    async def read_json(request: Request, what: str, read: Callable[[Any], _T]) -> _T | Response:
        """What `read` makes of a body of JSON, or the response that refuses the body."""
        if _type_of(request) != "application/json":
            return _failed(0, ArgumentError(f"a {what} is application/json."), 415)
        try:
            return read(json.loads(await _body(request, limits.call_bytes, limits)))
        except _TooSlowError:
            return _failed(0, ArgumentError(f"the {what} did not arrive."), 408)
        except _TooLargeError:
            error = ArgumentError(f"a {what} has at most {limits.call_bytes} bytes.")
            return _failed(0, error, 413)
        except (ValueError, RecursionError) as error:
            known = error if isinstance(error, QkvError) else ArgumentError("the body is not JSON.")
            return _failed(0, known, 400)

    async def call(request: Request) -> Response:
        asked = await read_json(request, "call", read_request)
        if isinstance(asked, Response):
            return asked

        def answer() -> Response:
            try:
                reply = session.answer(asked.method, asked.params, asked.shown)
                if reply.arrays:
                    data = reply.frame(asked.id)
                    return Response(data, media_type="application/octet-stream")
                return _JSON(reply.message(asked.id))
            except Exception as error:
                return _failed(asked.id, error, _status(error))

        if asked.method not in HEAVY:
            return await jobs.soon(answer)
        try:
            response = await jobs.run(asked.method, lambda job: answer(), request.is_disconnected)
        except StoppedError:
            return _stopped(asked.id)
        return response or _busy(asked.id)

    async def saved(request: Request) -> Response:
        """What is shown, as a file that opens with the given view."""
        view = await read_json(request, "view", read_view)
        if isinstance(view, Response):
            return view

        def write(job: Job) -> Response:
            try:
                return HTMLResponse(offline_page(export_data(session, view)))
            except Exception as error:
                return _failed(0, error, _status(error))

        try:
            response = await jobs.run("the page", write, request.is_disconnected)
        except StoppedError:
            return _stopped(0)
        return response or _busy(0)

    async def upload(request: Request) -> Response:
        if _type_of(request) != "application/octet-stream":
            return _failed(0, ArgumentError("a file is application/octet-stream."), 415)
        # A second file is refused before it is read, so that memory holds one at a time.
        if reading.locked():
            return _busy(0)
        async with reading:
            return await receive(request)

    async def receive(request: Request) -> Response:
        try:
            data = await _body(request, limits.file_bytes, limits)
        except _TooSlowError:
            return _failed(0, ArgumentError("the file did not arrive."), 408)
        except _TooLargeError:
            error = ArgumentError(
                f"a file has at most {limits.file_bytes} bytes here.",
                action="Start qkv lab with the name of the file.",
            )
            return _failed(0, error, 413)

        def read(job: Job) -> Source | Response:
            try:
                arrays = read_array_bytes(data, "the file", limits.file_bytes)
                require_pairs(arrays, limits.pairs)
                return open_arrays(arrays, "a file of the reader", progress=job.progress)
            except Exception as error:
                return _failed(0, error, _status(error))

        try:
            source = await jobs.run("the file", read, request.is_disconnected)
        except StoppedError:
            return _stopped(0)
        if not isinstance(source, Source):
            return source or _busy(0)

        def show() -> Response:
            return _JSON({"ok": True, "result": {"data": session.show(source, "server")}})

        return await jobs.soon(show)

    async def job(request: Request) -> Response:
        """The state of the jobs as JSON; a body with the number of a job stops that job first."""
        if _type_of(request) != "application/json":
            return _failed(0, ArgumentError("a call is application/json."), 415)
        try:
            number = json.loads(await _body(request, 100, limits)).get("stop")
        except (_TooLargeError, _TooSlowError, ValueError, AttributeError, RecursionError):
            return _failed(0, ArgumentError('a job is asked for with {"stop": null}.'), 400)
        if isinstance(number, int) and not isinstance(number, bool):
            jobs.stop(number)
        return _JSON({"ok": True, "result": jobs.state()})

    routes = [
        Route("/", page, methods=["GET"]),
        *(Route(path, file, methods=["GET"]) for path in FILES),
        Route("/call", call, methods=["POST"]),
        Route("/file", upload, methods=["POST"]),
        Route("/page", saved, methods=["POST"]),
        Route("/job", job, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return Guard(app, token, host)


def _type_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _body(request: Request, most: int, limits: Limits) -> bytes:
    """The body, of at most `most` bytes; no more than these are kept."""
    said = request.headers.get("content-length", "0")
    if not said.isdecimal() or int(said) > most:
        raise _TooLargeError
    data = bytearray()
    chunks = request.stream()
    while True:
        try:
            chunk = await asyncio.wait_for(anext(chunks), limits.idle_seconds)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise _TooSlowError from None
        data += chunk
        if len(data) > most:
            raise _TooLargeError
    return bytes(data)


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


def _failed(request_id: int, error: Exception, status: int) -> Response:
    return _JSON(failure(request_id, error), status)


def _stopped(request_id: int) -> Response:
    return _failed(request_id, UnsupportedError("it was stopped."), 409)


def _busy(request_id: int) -> Response:
    error = UnsupportedError("too many questions wait for an answer.", action="Ask again later.")
    return _failed(request_id, error, 503)


def listen(port: int = 0) -> socket.socket:
    """A socket on this machine alone, on a free port unless one is named.

    Raises
    ------
    ArgumentError
        The port is taken, or may not be used.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # On Windows SO_REUSEADDR would let two processes answer at one port, and without any option
    # another process may still take it by asking for that. Elsewhere it only frees a port at once,
    # if the connections had it too that the server before has closed; a free port is chosen first.
    exclusive = getattr(socket, "SO_EXCLUSIVEADDRUSE", None)
    reuse = socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
    try:
        if exclusive is not None:
            listener.setsockopt(socket.SOL_SOCKET, exclusive, 1)
        elif port:
            listener.setsockopt(*reuse)
        listener.bind(("127.0.0.1", port))
        if exclusive is None:
            listener.setsockopt(*reuse)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(
            f"port {port} of 127.0.0.1 cannot be used: {reason}.",
            action="Choose another, or leave --port out for a free one.",
        ) from error
    return listener


def serve(
    session: Session,
    port: int = 0,
    ready: Callable[[str], object] = print,
    renewing: Callable[[Callable[[], str]], object] | None = None,
) -> None:
    """Serve the page on 127.0.0.1 until Ctrl-C.

    Parameters
    ----------
    session : Session
    port : int
        A free one by default.
    ready : callable (url)
        Told of the address, once, when it can be opened.
    renewing : callable (new_address), optional
        Told, after `ready`, of a function that returns a new address, which opens the page once
        in another browser. The address before it no longer does.
    """
    import uvicorn

    asset("lab.js"), asset("lab.css")  # Raises, before anything is printed, if one is missing.
    with listen(port) as opened:
        host = f"127.0.0.1:{opened.getsockname()[1]}"
        token = secrets.token_urlsafe(32)
        limits = Limits()
        jobs = Jobs(limits.waiting)
        app = application(session, token, host, limits, jobs)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            limit_concurrency=limits.connections,
        )

        class Server(uvicorn.Server):
            """Tells its address once it answers. A second Ctrl-C ends the process at once."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                ready(f"http://{host}/?token={token}")
                if renewing is not None:
                    renewing(lambda: f"http://{host}/?token={app.renew()}")

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                if self.should_exit:
                    os._exit(_INTERRUPTED)
                # Clients whose requests are cut off would fill the terminal with tracebacks.
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
                super().handle_exit(sig, frame)
                jobs.stop()

        opened.listen(128)
        with suppress(KeyboardInterrupt):
            Server(config).run(sockets=[opened])
        _leave_behind(jobs)


def _leave_behind(jobs: Jobs) -> None:
    """Wait a moment for jobs that were stopped; end the process if one of them goes on."""
    ends = time.monotonic() + _PATIENCE_SECONDS
    for thread in jobs.threads():
        thread.join(max(0.0, ends - time.monotonic()))
        if thread.is_alive():
            sys.stdout.flush()
            os._exit(_INTERRUPTED)
