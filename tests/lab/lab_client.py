"""A plain client of the lab's server, which sends any bytes."""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass, field
from typing import Any

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

    @property
    def cookie_line(self) -> str:
        return f"Cookie: qkv-lab-{self.port}={self.cookie}"

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str | None] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        said: dict[str, str | None] = {"Host": self.host, **self.default}
        if self.cookie is not None:
            said["Cookie"] = f"qkv-lab-{self.port}={self.cookie}"
        if method == "POST":
            said |= {"Origin": f"http://{self.host}", "Sec-Fetch-Site": "same-origin"}
            said["Content-Type"] = "application/json"
        said |= headers or {}
        if body is not None and "Content-Length" not in said:
            said["Content-Length"] = str(len(body))
        given = [f"{name}: {value}" for name, value in said.items() if value is not None]
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *given, "", ""]).encode("latin-1")
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            # In one piece: a server may refuse a request at its headers and close. A body that came
            # after it had read them would then be answered with a reset, and the reason be lost.
            connection.sendall(head + (body or b""))
            with http.client.HTTPResponse(connection, method=method) as answer:
                answer.begin()
                found = {name.lower(): value for name, value in answer.getheaders()}
                return answer.status, found, answer.read()

    def enter(self) -> None:
        """Spend the token."""
        status, headers, _ = self.request("GET", f"/?token={TOKEN.replace(' ', '%20')}")
        assert (status, headers["location"]) == (303, "/")
        self.cookie = headers["set-cookie"].partition(";")[0].partition("=")[2]

    def call(self, method: str, **params: Any) -> tuple[int, Any]:
        body = json.dumps({"id": 1, "method": method, "params": params}).encode()
        status, headers, data = self.request("POST", "/call", body)
        return status, json.loads(data) if "json" in headers["content-type"] else data
