"""The local page of the lab: a server for one browser on this machine."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from qkv.errors import ArgumentError
from qkv.lab.document import asset
from qkv.lab.serving.application import Limits, application
from qkv.lab.serving.jobs import Jobs
from qkv.lab.session import Session

__all__ = ["listen", "serve"]

_INTERRUPTED = 130
"""The exit code of a process that Ctrl-C ended."""
_PATIENCE_SECONDS = 1.0


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
