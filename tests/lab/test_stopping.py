"""Long jobs: they are stopped, refused before they begin, and do not hold the process."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab_client import Client

import qkv
from qkv.lab.serving.application import Limits
from qkv.lab.session import Session

OCTETS: dict[str, str | None] = {"Content-Type": "application/octet-stream"}


def npz(q_len: int, kv_len: int, dim: int = 1) -> bytes:
    file = io.BytesIO()
    rows = [np.zeros((length, dim), np.float32) for length in (q_len, kv_len, kv_len)]
    np.savez_compressed(file, q=rows[0], k=rows[1], v=rows[2])
    return file.getvalue()


def endless(*_: Any) -> None:
    while True:
        time.sleep(0.01)


def waits(client: Client, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The state of the jobs as soon as a condition holds."""
    for _ in range(600):
        status, _, body = client.request("POST", "/job", b'{"stop": null}')
        assert status == 200
        state: dict[str, Any] = json.loads(body)["result"]
        if condition(state):
            return state
        time.sleep(0.05)
    raise AssertionError(state)


def test_a_job_is_stopped_and_the_next_one_runs(start: Callable[..., Client]) -> None:
    session = Session()
    session._methods["scaling"] = endless
    client = start(session)
    client.enter()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.call, "scaling")
        state = waits(client, lambda state: bool(state["running"]))
        second = pool.submit(client.call, "mechanisms")
        waits(client, lambda state: state["waiting"] == 1)
        (running,) = state["running"]
        assert running["name"] == "scaling"
        client.request("POST", "/job", json.dumps({"stop": running["number"]}).encode())
        status, answer = first.result(timeout=60)
        assert (status, answer["error"]["message"]) == (409, "it was stopped.")
        assert second.result(timeout=60)[0] == 200
    assert waits(client, lambda state: not state["running"])["waiting"] == 0


def test_a_job_whose_reader_has_gone_ends(start: Callable[..., Client]) -> None:
    session = Session()
    session._methods["scaling"] = endless
    client = start(session)
    client.enter()
    body = json.dumps({"id": 1, "method": "scaling", "params": {}}).encode()
    head = [
        "POST /call HTTP/1.1", f"Host: {client.host}", client.cookie_line,
        f"Origin: http://{client.host}", "Sec-Fetch-Site: same-origin",
        "Content-Type: application/json", f"Content-Length: {len(body)}", "", "",
    ]  # fmt: skip
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall("\r\n".join(head).encode() + body)
        waits(client, lambda state: bool(state["running"]))
    waits(client, lambda state: not state["running"] and not state["waiting"])


def test_a_file_of_too_many_pairs_is_refused_before_any_is_computed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be computed")

    monkeypatch.setattr(qkv, "inspect", computed)
    status, _, body = client.request("POST", "/file", npz(7_500_000, 7_500_000), OCTETS)
    assert status == 422
    assert "5.62e+13 pairs" in json.loads(body)["error"]["message"]


def test_an_empty_file_is_a_clear_error(client: Client) -> None:
    status, _, body = client.request("POST", "/file", npz(0, 0), OCTETS)
    assert status == 400
    assert "no numbers to show" in json.loads(body)["error"]["message"]


def begun_file(client: Client) -> bytes:
    """The head of a file of 200 MB, and a few bytes of it."""
    head = [
        "POST /file HTTP/1.1", f"Host: {client.host}", client.cookie_line,
        f"Origin: http://{client.host}", "Sec-Fetch-Site: same-origin",
        "Content-Type: application/octet-stream", "Content-Length: 200000000", "", "",
    ]  # fmt: skip
    return "\r\n".join(head).encode() + b"a few bytes"


def test_a_second_file_is_refused_before_it_is_read(start: Callable[..., Client]) -> None:
    client = start(limits=Limits(idle_seconds=600))
    client.enter()
    first, second = (socket.create_connection(("127.0.0.1", client.port), 60) for _ in range(2))
    with first, second:
        first.sendall(begun_file(client))
        waits(client, lambda state: True)
        second.sendall(begun_file(client))
        assert second.recv(100).startswith(b"HTTP/1.1 503")


def test_a_file_of_which_nothing_more_comes_is_answered(start: Callable[..., Client]) -> None:
    client = start(limits=Limits(idle_seconds=0.5))
    client.enter()
    with socket.create_connection(("127.0.0.1", client.port), 60) as connection:
        connection.sendall(begun_file(client))
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one child alone")
def test_a_signal_ends_a_server_in_the_middle_of_a_job(tmp_path: Path) -> None:
    """A job that no Python is run in, with a client that reads nothing; and no traceback."""
    code = (
        "import time, threading, qkv.lab.session as s, ctypes\n"
        "s.Session._model = lambda *_: ctypes.CDLL(None).sleep(600)\n"
        "from qkv.cli import main\nmain(['lab', '--no-open'])"
    )
    answers = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    child = subprocess.Popen(
        [sys.executable, "-c", answers + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        port = int(address.split(":")[2].split("/")[0])
        client = Client(port)
        _, headers, _ = client.request("GET", "/?" + address.split("?")[1])
        client.cookie = headers["set-cookie"].partition(";")[0].partition("=")[2]
        caller = threading.Thread(target=lambda: _quietly(client.call, "model"), daemon=True)
        caller.start()
        waits(client, lambda state: bool(state["running"]))
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
        assert errors == ""
    finally:
        child.kill()


def _quietly(function: Callable[..., Any], *arguments: Any) -> None:
    with suppress(OSError):
        function(*arguments)
