"""A server of the lab in a thread, and a plain client that sends what it is told to send."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra lab is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra lab is not installed")

from qkv.lab.server import Limits, application, listen  # noqa: E402
from qkv.lab.session import Session  # noqa: E402

TOKEN = "a token that opens once"


@dataclass
class Client:
    """Requests to one server; headers are replaced or, with None, left out."""

    port: int
    cookie: str | None = None
    default: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str | None] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        said: dict[str, str | None] = {"Host": self.host, **self.default}
        if self.cookie is not None:
            said["Cookie"] = f"qkv-lab={self.cookie}"
        if method == "POST":
            said |= {"Origin": f"http://{self.host}", "Sec-Fetch-Site": "same-origin"}
            said["Content-Type"] = "application/json"
        said |= headers or {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in said.items():
                if value is not None:
                    connection.putheader(name, value)
            if body is not None and "Content-Length" not in said:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, found, answer.read()
        finally:
            connection.close()

    def enter(self) -> None:
        """Spend the token."""
        status, headers, _ = self.request("GET", f"/?token={TOKEN.replace(' ', '%20')}")
        assert (status, headers["location"]) == (303, "/")
        self.cookie = headers["set-cookie"].partition(";")[0].partition("=")[2]

    def call(self, method: str, **params: Any) -> tuple[int, Any]:
        body = json.dumps({"id": 1, "method": method, "params": params}).encode()
        status, headers, data = self.request("POST", "/call", body)
        return status, json.loads(data) if "json" in headers["content-type"] else data


@pytest.fixture
def start() -> Iterator[Callable[..., Client]]:
    """Start a server for a session, with a client that has not entered yet."""
    running = []

    def begin(session: Session | None = None, limits: Limits | None = None) -> Client:
        opened = listen()
        client = Client(opened.getsockname()[1])
        app = application(session or Session(), TOKEN, client.host, limits)
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
