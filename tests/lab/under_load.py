"""`python tests/lab/under_load.py`: a server under load, its memory, and how long it takes to stop.

Two hundred requests in flight, readers that read nothing, jobs that are stopped in the middle, six
files of 200 MB at once, and Ctrl-C in the middle of a job. Prints what was counted.
"""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
from lab_client import Client

OCTETS: dict[str, str | None] = {"Content-Type": "application/octet-stream"}


class Load:
    """A server of its own process, and a client that has entered."""

    def __init__(self) -> None:
        answers = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        code = answers + "from qkv.cli import main; main(['lab', '--model', 'tiny', '--no-open'])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        self.client = Client(int(address.split(":")[2].split("/")[0]))
        _, headers, _ = self.client.request("GET", "/?" + address.split("?")[1])
        self.client.cookie = headers["set-cookie"].partition(";")[0].partition("=")[2]

    def memory(self, field: str = "VmRSS") -> float:
        """MiB that the server takes now, or took at most (VmHWM)."""
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024

    def jobs(self, stop: int | None = None) -> dict[str, Any]:
        body = self.client.request("POST", "/job", json.dumps({"stop": stop}).encode())[2]
        found: dict[str, Any] = json.loads(body)["result"]
        return found

    def connection(self, path: str, kind: str, length: int) -> socket.socket:
        """A connection that has sent the head of a request."""
        client = self.client
        head = [
            f"POST {path} HTTP/1.1", f"Host: {client.host}", client.cookie_line,
            f"Origin: http://{client.host}", "Sec-Fetch-Site: same-origin",
            f"Content-Type: {kind}", f"Content-Length: {length}", "", "",
        ]  # fmt: skip
        connection = socket.create_connection(("127.0.0.1", client.port))
        connection.sendall("\r\n".join(head).encode())
        return connection


def long_file() -> bytes:
    rows, file = np.zeros((4, 40_000, 64), np.float32), io.BytesIO()
    np.savez_compressed(file, q=rows, k=rows, v=rows)
    return file.getvalue()


def said(what: str, load: Load, began: float, more: object = "") -> None:
    seconds = time.monotonic() - began
    now, most = load.memory(), load.memory("VmHWM")
    print(f"{what:44} {seconds:6.1f} s  now {now:5.0f} MiB  at most {most:5.0f} MiB  {more}",
          flush=True)  # fmt: skip


def main() -> None:
    """Run all of it."""
    load = Load()
    began = time.monotonic()
    said("the server has begun", load, began)

    body = json.dumps({"id": 1, "method": "model", "params": {}}).encode()
    slow = [load.connection("/call", "application/json", len(body)) for _ in range(50)]
    for connection in slow:
        connection.sendall(body)
    methods = ("model", "head", "errata", "code", "example", "exercises")
    began = time.monotonic()
    with ThreadPoolExecutor(200) as pool:
        calls = [pool.submit(load.client.call, methods[i % len(methods)]) for i in range(1000)]
        ended = Counter(call.result()[0] for call in calls)
    said("1000 calls, 200 in flight, 50 slow readers", load, began, dict(ended))

    began = time.monotonic()
    sockets = [load.connection("/file", "application/octet-stream", 200_000_000) for _ in range(6)]
    answers: Counter[str] = Counter()

    def send(connection: socket.socket) -> None:
        connection.settimeout(120)
        with suppress(OSError):
            for _ in range(200):
                connection.sendall(bytes(1_000_000))
        try:
            answers[connection.recv(12).decode()[-3:]] += 1
        except OSError:
            answers["closed"] += 1

    threads = [threading.Thread(target=send, args=(connection,)) for connection in sockets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said("six files of 200 MB at once", load, began, dict(answers))

    data, times = long_file(), []
    for _ in range(5):
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(load.client.request, "POST", "/file", data, OCTETS)
            while not (running := load.jobs()["running"]):
                time.sleep(0.05)
            time.sleep(1)
            began = time.monotonic()
            load.jobs(running[0]["number"])
            status = call.result()[0]
            while load.jobs()["running"] or load.jobs()["waiting"]:
                time.sleep(0.01)
            times.append(time.monotonic() - began)
    said("five long jobs stopped in the middle", load, began,
         f"{status}, {max(times):.2f} s to stop at most")  # fmt: skip

    caller = threading.Thread(
        target=lambda: quietly(load.client, data), daemon=True
    )  # The server ends before it answers.
    caller.start()
    while not load.jobs()["running"]:
        time.sleep(0.05)
    began = time.monotonic()
    load.process.send_signal(signal.SIGINT)
    _, errors = load.process.communicate(timeout=120)
    print(f"Ctrl-C in the middle of a job, with 50 slow readers: {time.monotonic() - began:.1f} s, "
          f"code {load.process.returncode}, {len(errors.splitlines())} lines of error")  # fmt: skip


def quietly(client: Client, data: bytes) -> None:
    with suppress(OSError):
        client.request("POST", "/file", data, OCTETS)


if __name__ == "__main__":
    main()
