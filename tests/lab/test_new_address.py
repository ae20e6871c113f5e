"""Enter, in the terminal of `qkv lab`, prints a new address that opens the page once."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from lab_client import Client

from qkv.cli.enter_key import is_interactive, on_enter

LAB = [sys.executable, "-m", "qkv", "lab", "--no-open"]
PATIENCE = 120
"""Seconds for what comes at once where nothing else runs."""
NEEDS_TERMINALS = pytest.mark.skipif(
    sys.platform == "win32", reason="no pseudo-terminals there, and no waiting for pipes"
)


def opened(client: Client, address: str) -> int:
    """The status of a browser without a cookie at an address."""
    parts = urlsplit(address)
    assert parts.netloc == client.host
    return client.request("GET", f"/?{parts.query}")[0]


def client_of(address: str) -> Client:
    port = urlsplit(address).port
    assert port is not None
    return Client(port)


def address_within(seconds: float, stream: int) -> str:
    """The next line of an address that is printed, empty if none comes."""
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], seconds)
        part = os.read(stream, 1) if ready else b""
        if not part:
            break
        line += part
    return line.decode().strip()


@contextmanager
def lab(**streams: Any) -> Iterator[tuple[subprocess.Popen[bytes], int, str]]:
    """A running server, what it prints to, and its first address."""
    ran = subprocess.Popen(LAB, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **streams)
    try:
        assert ran.stdout is not None
        out = ran.stdout.fileno()
        yield ran, out, address_within(PATIENCE, out)
    finally:
        ran.kill()
        ran.wait()
        for stream in (ran.stdin, ran.stdout, ran.stderr):
            if stream is not None:
                stream.close()


@NEEDS_TERMINALS
def test_enter_prints_an_address_that_opens_once() -> None:
    keyboard, terminal = os.openpty()
    with lab(stdin=terminal) as (ran, out, first):
        client = client_of(first)
        assert opened(client, first) == 303
        assert opened(client, first) == 401
        os.write(keyboard, b"\n")
        second = address_within(PATIENCE, out)
        assert second != first
        assert opened(client, first) == 401
        assert opened(client, second) == 303
        assert opened(client, second) == 401
        # An address that was not used is replaced by the next.
        os.write(keyboard, b"anything\n")
        third = address_within(PATIENCE, out)
        os.write(keyboard, b"\n")
        fourth = address_within(PATIENCE, out)
        assert opened(client, third) == 401
        # One that is refused for its Host is not spent.
        query = urlsplit(fourth).query
        assert client.request("GET", f"/?{query}", headers={"Host": "evil.example"})[0] == 403
        assert opened(client, fourth) == 303
        # Ctrl-C ends the server, in silence, while it waits for Enter.
        ran.send_signal(signal.SIGINT)
        _, said = ran.communicate(timeout=PATIENCE)
        assert (said, ran.returncode) == (b"", 0)
    os.close(keyboard)
    os.close(terminal)


@NEEDS_TERMINALS
@pytest.mark.parametrize("end", ["Ctrl-D", "nobody reads the answers"])
def test_the_end_of_the_input_ends_nothing_else(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, terminal = os.openpty()
    answers: list[str] = []

    def answer() -> None:
        answers.append("an address")
        if end != "Ctrl-D":
            raise BrokenPipeError

    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = set(threading.enumerate())
        on_enter(answer)
        (thread,) = set(threading.enumerate()) - before
        os.write(keyboard, b"\n")
        if end == "Ctrl-D":
            while not answers:
                time.sleep(0.01)
            os.write(keyboard, b"\x04")
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert answers == ["an address"]
    os.close(keyboard)


@NEEDS_TERMINALS
def test_input_that_is_no_terminal_is_not_read() -> None:
    with lab(stdin=subprocess.PIPE) as (ran, out, first):
        assert ran.stdin is not None
        ran.stdin.write(b"\n\n\n")
        ran.stdin.close()
        client = client_of(first)
        assert address_within(0.5, out) == ""
        assert opened(client, first) == 303
        assert ran.poll() is None


@pytest.mark.parametrize("stdin", [None, "closed", "a file"])
def test_without_a_terminal_nothing_waits(
    stdin: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open(os.devnull)  # noqa: SIM115
    if stdin == "closed":
        file.close()
    monkeypatch.setattr(sys, "stdin", None if stdin is None else file)
    before = set(threading.enumerate())  # Some may end meanwhile, which other tests began.
    on_enter(lambda: None)
    assert set(threading.enumerate()) <= before
    file.close()


class Console(ModuleType):
    """The functions of `msvcrt` that read a console, as its documentation has them."""

    def __init__(self, keys: str) -> None:
        super().__init__("msvcrt")
        self.keys = list(keys)
        self.looks = 0

    def kbhit(self) -> bool:
        """Whether a key waits; each key comes at the second look."""
        self.looks += 1
        return bool(self.keys) and self.looks % 2 == 0

    def getwch(self) -> str:
        return self.keys.pop(0)

    def get_osfhandle(self, descriptor: int) -> int:
        return 1000 + descriptor


class Kernel32:
    """`GetConsoleMode`, which fails for a handle that is not a console."""

    def __init__(self, is_console: bool) -> None:
        self.is_console = is_console
        self.asked: list[int | None] = []

    def GetConsoleMode(self, handle: ctypes.c_void_p, mode: object) -> int:
        self.asked.append(handle.value)
        return int(self.is_console)


def on_windows(patched: pytest.MonkeyPatch, console: Console, kernel32: Kernel32) -> None:
    patched.setitem(sys.modules, "msvcrt", console)
    patched.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    patched.setattr(sys, "platform", "win32")


@pytest.mark.skipif(sys.platform == "win32", reason="it stands in for the console of that system")
@pytest.mark.parametrize(
    ("keys", "expected"),
    [("\r\x1a", 1), ("\r\r\x1a\r", 2), ("typed\r\xe0H\x00;\r\x1a", 2), ("\n\x1a", 0)],
)
def test_enter_on_windows(keys: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of Windows stand in; nothing is read by `select` or from the descriptor."""
    console = Console(keys)
    answers: list[int] = []
    keyboard, terminal = os.openpty()
    with os.fdopen(terminal) as stdin, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", stdin)
        on_windows(patched, console, Kernel32(is_console=True))
        before = set(threading.enumerate())
        on_enter(lambda: answers.append(len(console.keys)))
        for thread in set(threading.enumerate()) - before:
            thread.join(PATIENCE)
            assert not thread.is_alive()
    os.close(keyboard)
    assert len(answers) == expected
    assert console.keys == list(keys.partition("\x1a")[2])


@pytest.mark.skipif(sys.platform == "win32", reason="it stands in for the console of that system")
@pytest.mark.parametrize("is_console", [True, False])
def test_nul_of_windows_is_no_terminal(is_console: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`isatty` is true of every device of characters there; only a console has a mode."""
    kernel32 = Kernel32(is_console)
    stdin = SimpleNamespace(isatty=lambda: True, fileno=lambda: 3)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", stdin)
        on_windows(patched, Console(""), kernel32)
        assert is_interactive() == is_console
    assert kernel32.asked == [1003]


@pytest.mark.slow
@NEEDS_TERMINALS
def test_a_job_in_the_background_is_not_stopped_by_what_others_are_typed() -> None:
    """A shell with jobs, whose terminal the server may not read while another job is in front."""
    keyboard, terminal = os.openpty()
    jobs = " ".join(f"'{word}'" for word in LAB) + " & echo $!; wait"
    # The terminal becomes that of the new session, as a shell has it.
    program = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execvp('sh', ['sh', '-mc', sys.argv[1]])"
    )
    shell = subprocess.Popen(
        [sys.executable, "-c", program, jobs],
        stdin=terminal,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert shell.stdout is not None
    with shell.stdout as out:
        server = int(out.readline())
        try:
            first = out.readline().decode().strip()
            os.write(keyboard, b"\n\n")
            time.sleep(0.3)
            assert opened(client_of(first), first) == 303
        finally:
            os.kill(server, signal.SIGKILL)
            shell.wait(PATIENCE)
            os.close(keyboard)
            os.close(terminal)


def test_it_says_how_to_get_an_address(start: Callable[..., Client]) -> None:
    status, _, said = start().request("GET", "/")
    assert status == 401
    assert "press Enter in the terminal" in said.decode()
