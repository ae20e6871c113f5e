"""The local page of the lab: a server for one browser on this machine."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from qkv.errors import ArgumentError, QkvError, UnsupportedError
from qkv.files import read_array_bytes
from qkv.lab.document import FILES, asset, served_page
from qkv.lab.guard import Guard
from qkv.lab.messages import failure, read_request
from qkv.lab.parameters import MissingError, TooLongError
from qkv.lab.session import HEAVY, Session
from qkv.lab.sources import open_arrays

__all__ = ["Limits", "application", "listen", "serve"]

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
    """

    call_bytes: int = 1 << 20
    file_bytes: int = 1 << 28
    waiting: int = 64


class _TooLargeError(Exception):
    """A body has more bytes than are read."""


class _Jobs:
    """One heavy job at a time; the others wait in a queue of bounded length."""

    def __init__(self, waiting: int) -> None:
        self._most = waiting + 1
        self._count = 0
        self._turn = asyncio.Semaphore(1)

    async def run(self, job: Callable[[], Any]) -> Any:
        """The result of a job, in a thread; None at once if too many wait."""
        if self._count >= self._most:
            return None
        self._count += 1
        try:
            async with self._turn:
                return await asyncio.to_thread(job)
        finally:
            self._count -= 1


def application(session: Session, token: str, host: str, limits: Limits | None = None) -> Guard:
    """The server as an ASGI application.

    Parameters
    ----------
    session : Session
    token : str
        Opens the page once.
    host : str
        The address that requests must name, such as "127.0.0.1:8123".
    limits : Limits, optional
    """
    most = limits or Limits()
    jobs = _Jobs(most.waiting)
    files = {path: asset(path[1:]) for path in FILES}

    def page(request: Request) -> Response:
        return HTMLResponse(served_page(session.data("server")))

    def file(request: Request) -> Response:
        path = request.url.path
        return Response(files[path], headers={"content-type": FILES[path]})

    async def call(request: Request) -> Response:
        if _type_of(request) != "application/json":
            return _failed(0, ArgumentError("a call is application/json."), 415)
        try:
            asked = read_request(json.loads(await _body(request, most.call_bytes)))
        except _TooLargeError:
            error = ArgumentError(f"a call has at most {most.call_bytes} bytes.")
            return _failed(0, error, 413)
        except (ValueError, RecursionError) as error:
            known = error if isinstance(error, QkvError) else ArgumentError("this is no JSON.")
            return _failed(0, known, 400)

        def answer() -> Response:
            try:
                found = session.answer(asked.method, asked.params)
                if found.arrays:
                    data = found.frame(asked.id)
                    return Response(data, media_type="application/octet-stream")
                return JSONResponse(found.message(asked.id))
            except Exception as error:
                return _failed(asked.id, error, _status(error))

        if asked.method not in HEAVY:
            return await asyncio.to_thread(answer)
        return await jobs.run(answer) or _busy(asked.id)

    async def upload(request: Request) -> Response:
        if _type_of(request) != "application/octet-stream":
            return _failed(0, ArgumentError("a file is application/octet-stream."), 415)
        try:
            data = await _body(request, most.file_bytes)
        except _TooLargeError:
            error = ArgumentError(
                f"a file has at most {most.file_bytes} bytes here.",
                action="Start qkv lab with the name of the file.",
            )
            return _failed(0, error, 413)

        def open_it() -> Response:
            try:
                arrays = read_array_bytes(data, "the file", most.file_bytes)
                session.open(open_arrays(arrays, "a file of the reader"))
                return JSONResponse({"ok": True, "result": {"data": session.data("server")}})
            except Exception as error:
                return _failed(0, error, _status(error))

        return await jobs.run(open_it) or _busy(0)

    routes = [
        Route("/", page, methods=["GET"]),
        *(Route(path, file, methods=["GET"]) for path in FILES),
        Route("/call", call, methods=["POST"]),
        Route("/file", upload, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return Guard(app, token, host)


def _type_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def _body(request: Request, most: int) -> bytes:
    """The body, if it has no more bytes than may be; no more are kept."""
    said = request.headers.get("content-length", "0")
    if not said.isdecimal() or int(said) > most:
        raise _TooLargeError
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise _TooLargeError
    return bytes(data)


def _status(error: Exception) -> int:
    kinds = ((TooLongError, 422), (MissingError, 404), (UnsupportedError, 422), (QkvError, 400))
    for kind, status in kinds:
        if isinstance(error, kind):
            return status
    _LOG.error("a request failed", exc_info=error)
    return 500


def _failed(request_id: int, error: Exception, status: int) -> Response:
    return JSONResponse(failure(request_id, error), status)


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
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # On Windows SO_REUSEADDR would let two processes answer at one port, and without any option
    # another process may still take it by asking for that. Elsewhere it only frees a port at once.
    exclusive = getattr(socket, "SO_EXCLUSIVEADDRUSE", None)
    try:
        if exclusive is not None:
            found.setsockopt(socket.SOL_SOCKET, exclusive, 1)
        elif port:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        found.close()
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(
            f"port {port} of 127.0.0.1 cannot be used: {reason}.",
            action="Choose another, or leave --port out for a free one.",
        ) from error
    return found


def serve(
    session: Session,
    port: int = 0,
    ready: Callable[[str], object] = print,
    limits: Limits | None = None,
) -> None:
    """Serve the page on 127.0.0.1 until Ctrl-C.

    Parameters
    ----------
    session : Session
    port : int
        A free one by default.
    ready : callable (url)
        Told of the address, once, when it can be opened.
    limits : Limits, optional
    """
    import uvicorn

    asset("lab.js"), asset("lab.css")  # Complained of before anything is printed.
    with listen(port) as opened:
        host = f"127.0.0.1:{opened.getsockname()[1]}"
        token = secrets.token_urlsafe(32)
        app = application(session, token, host, limits)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )

        class Server(uvicorn.Server):
            """Tells its address when it answers, and Ctrl-C ends it."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                ready(f"http://{host}/?token={token}")

        opened.listen(128)
        try:
            Server(config).run(sockets=[opened])
        except KeyboardInterrupt:
            return
