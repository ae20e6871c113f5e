"""A server of the lab in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import uvicorn
from lab_client import TOKEN, Client

from qkv.lab.serving.application import Limits, application
from qkv.lab.serving.server import listen
from qkv.lab.session import Session


@pytest.fixture
def start() -> Iterator[Callable[..., Client]]:
    """Start a server for a session, with a client that has not entered yet."""
    running = []

    def begin(session: Session | None = None, limits: Limits | None = None) -> Client:
        opened = listen()
        client = Client(opened.getsockname()[1])
        app = application(session or Session(), TOKEN, client.host, limits or Limits())
        config = uvicorn.Config(
            app, http="h11", ws="none", lifespan="off", log_level="critical", access_log=False,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = uvicorn.Server(config)
        opened.listen(128)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
        thread.start()
        running.append((server, thread, opened))
        return client

    yield begin
    for server, thread, opened in running:
        server.should_exit = True
        thread.join(10)
        opened.close()


@pytest.fixture
def client(start: Callable[..., Client]) -> Client:
    """A client that has entered."""
    found = start()
    found.enter()
    return found
