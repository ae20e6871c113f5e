"""Every rule of the server: who may ask, how much, and what a page is allowed to do."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
import socket
import struct
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab_client import TOKEN, Client

import qkv.files
from qkv.lab.serving.application import Limits
from qkv.lab.serving.guard import POLICY
from qkv.lab.serving.server import listen
from qkv.lab.session import Session
from qkv.lab.sources.source import Source

OCTETS = {"Content-Type": "application/octet-stream"}
ASK = json.dumps({"id": 1, "method": "errata"}).encode()


def test_it_listens_on_this_machine_alone() -> None:
    with listen() as found:
        assert found.getsockname()[0] == "127.0.0.1"
        assert found.getsockname()[1] != 0


def test_a_port_that_is_taken_is_complained_of() -> None:
    with listen() as found:
        found.listen()
        with pytest.raises(qkv.ArgumentError, match="cannot be used"):
            listen(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "localhost:{port}", "127.0.0.1", "", None]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_foreign_host_is_refused(client: Client, host: str | None, method: str) -> None:
    said = None if host is None else host.format(port=client.port)
    path = "/" if method == "GET" else "/call"
    status, _, _ = client.request(method, path, ASK, {"Host": said})
    # Without any Host the server itself says that this is no HTTP/1.1.
    assert status in ((400, 403) if host is None else (403,))


def test_another_name_of_this_machine_is_told_the_address(client: Client) -> None:
    localhost = {"Host": f"localhost:{client.port}"}
    status, _, body = client.request("GET", "/", headers=localhost)
    assert status == 403
    assert f"http://{client.host}/" in body.decode()


def test_two_hosts_are_refused(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw:
        lines = f"GET / HTTP/1.1\r\nHost: {client.host}\r\nHost: evil.example\r\n"
        raw.sendall(f"{lines}{client.cookie_line}\r\n\r\n".encode())
        assert raw.recv(4096).split()[1] in (b"400", b"403")


@pytest.mark.parametrize("path", ["/", "/lab.js", "/lab.css", "/call", "/nothing", "/?token=wrong"])
def test_without_the_token_nothing_is_answered(start: Callable[..., Client], path: str) -> None:
    client = start()
    assert client.request("GET", path)[0] == 401
    assert client.request("POST", "/call", ASK)[0] == 401
    client.cookie = "wrong"
    assert client.request("GET", path)[0] == 401


def test_the_token_opens_once(start: Callable[..., Client]) -> None:
    client = start()
    spent = f"/?token={TOKEN.replace(' ', '%20')}"
    # A request that is refused for its Host does not spend it.
    assert client.request("GET", spent, headers={"Host": "evil.example"})[0] == 403
    status, headers, _ = client.request("GET", spent)
    assert (status, headers["location"]) == (303, "/")
    cookie = headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert TOKEN not in headers["set-cookie"]
    assert client.request("GET", spent)[0] == 401
    client.cookie = headers["set-cookie"].partition(";")[0].partition("=")[2]
    assert client.request("GET", "/")[0] == 200
    # Who has the cookie may open the printed address again.
    status, headers, _ = client.request("GET", spent)
    assert (status, "set-cookie" in headers) == (303, False)


def test_a_browser_that_was_closed_may_come_back(start: Callable[..., Client]) -> None:
    """The cookie is kept by the browser, and that of another lab in it has another name."""
    first, second = start(), start()
    names = []
    for client in (first, second):
        _, headers, _ = client.request("GET", f"/?token={TOKEN.replace(' ', '%20')}")
        name, _, rest = headers["set-cookie"].partition("=")
        seconds = re.search(r"max-age=(\d+)", rest.lower())
        assert seconds is not None
        assert int(seconds[1]) >= 24 * 3600
        names.append(name)
        client.cookie = rest.partition(";")[0]
    assert names[0] != names[1]
    both = "; ".join(f"{name}={c.cookie}" for name, c in zip(names, (first, second), strict=True))
    for client in (first, second):
        assert client.request("GET", "/", headers={"Cookie": both})[0] == 200
    # The cookie of one opens no other.
    second.cookie = first.cookie
    status, _, said = second.request("GET", "/")
    assert status == 401
    assert f"http://{second.host}/ opens the lab in the same browser" in said.decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": None},
        {"Origin": "https://127.0.0.1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
    ],
)
@pytest.mark.parametrize("path", ["/call", "/file"])
def test_a_post_from_another_page_is_refused(
    client: Client, wrong: dict[str, str | None], path: str
) -> None:
    assert client.request("POST", path, ASK, wrong)[0] == 403
    assert client.request("POST", "/call", ASK)[0] == 200


def test_no_other_origin_is_invited(client: Client) -> None:
    for method, path in (("GET", "/"), ("POST", "/call"), ("OPTIONS", "/call")):
        _, headers, _ = client.request(method, path, ASK, {"Origin": "http://evil.example"})
        assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/lab.js"), ("POST", "/call"), ("GET", "/nothing"), ("PUT", "/")],
)
def test_every_answer_has_the_policy(client: Client, method: str, path: str) -> None:
    for cookie in (client.cookie, None):
        client.cookie = cookie
        _, headers, _ = client.request(method, path, ASK)
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
    assert POLICY == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def test_the_file_table_is_fixed(client: Client) -> None:
    assert client.request("GET", "/")[1]["content-type"] == "text/html; charset=utf-8"
    assert client.request("GET", "/lab.js")[1]["content-type"] == "text/javascript; charset=utf-8"
    assert client.request("GET", "/lab.css")[1]["content-type"] == "text/css; charset=utf-8"
    for path in (
        "/../session.py", "/%2e%2e/session.py", "/..%2fsession.py", "/static/lab.js", "//lab.js",
        "/lab.js/", "/lab.js/../../server.py", "/etc/passwd", "/..\\server.py", "/lab.js%00",
    ):  # fmt: skip
        assert client.request("GET", path)[0] == 404, path


def test_bodies_of_other_types_are_refused(client: Client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert client.request("POST", "/call", ASK, {"Content-Type": kind})[0] == 415
        assert client.request("POST", "/file", ASK, {"Content-Type": kind})[0] == 415
        assert client.request("POST", "/page", b'{"view":{}}', {"Content-Type": kind})[0] == 415


def test_a_view_is_saved_as_a_page(client: Client) -> None:
    own = "</script><script>alert(1)</script>"
    body = json.dumps({"view": {"panel": "heatmap", "token": 3, "own": own}}).encode()
    status, headers, data = client.request("POST", "/page", body)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    page = data.decode()
    assert own not in page
    carried = re.search(r'<script type="application/json" id="qkv-data">(.*?)</script>', page, re.S)
    assert carried is not None
    view = json.loads(carried[1])["view"]
    assert (view["panel"], view["token"], view["own"]) == ("heatmap", 3, own)
    client.cookie = "wrong"
    assert client.request("POST", "/page", body)[0] == 401


NO_JSON = b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000
REFUSED = {
    "/call": (b'{"id":1}', b'{"id":"1","method":"errata"}',
              b'{"id":1,"method":"errata","params":[]}'),
    "/page": (b"{}", b'{"view":[]}', b'{"view":{"own":[1]}}', b'{"view":{"n":NaN}}',
              b'{"view":{"n":1e999}}', b'{"view":null}'),
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"), [(path, body) for path in REFUSED for body in (*NO_JSON, *REFUSED[path])]
)
def test_what_is_no_call_or_view_is_a_clear_error(client: Client, path: str, body: bytes) -> None:
    status, _, data = client.request("POST", path, body)
    answer = json.loads(data)
    assert (status, answer["ok"]) == (400, False)
    assert answer["error"]["message"]


def test_oversize_is_413(start: Callable[..., Client]) -> None:
    client = start(limits=Limits(call_bytes=1000, file_bytes=1000))
    client.enter()
    for path, kind in (("/call", {}), ("/page", {}), ("/file", OCTETS)):
        assert client.request("POST", path, b" " * 1001, kind)[0] == 413
        # What is said of the length is not believed: here the body comes in chunks.
        chunked = b"3e9\r\n" + b" " * 1001 + b"\r\n0\r\n\r\n"
        headers = {**kind, "Transfer-Encoding": "chunked", "Content-Length": None}
        assert client.request("POST", path, chunked, headers)[0] == 413


def test_lengths_are_capped_with_422(client: Client) -> None:
    status, answer = client.call("intervene", prompt="x" * 20_001)
    assert (status, answer["ok"]) == (422, False)


def test_cookies_of_other_programs_hide_none(client: Client) -> None:
    own = f"qkv-lab-{client.port}={client.cookie}"
    others = ('seen={"times": 3}', "user=J\xf6rg", "open[tab]=2", "no value", "a=b c", 'cut="x')
    for other in others:
        for both in (f"{other}; {own}", f"{own}; {other}"):
            assert client.request("GET", "/", headers={"Cookie": both})[0] == 200
        assert client.request("GET", "/", headers={"Cookie": f"{other}; {own}x"})[0] == 401


def test_a_body_that_breaks_off_is_no_failure_of_the_server(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.ERROR, "uvicorn.error")
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
    for path, kind in (("/call", "application/json"), ("/file", OCTETS["Content-Type"])):
        lines = (
            f"POST {path} HTTP/1.1", f"Host: {client.host}", f"Origin: http://{client.host}",
            client.cookie_line, f"Content-Type: {kind}", "Content-Length: 9", "", "",
        )  # fmt: skip
        with socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw:
            raw.sendall("\r\n".join(lines).encode() + b"{")
    assert client.call("errata")[0] == 200
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "params", "status"),
    [
        ("nothing", {}, 404),
        ("open", {"what": "nothing"}, 400),
        ("open", {"text": "a text"}, 422),
        ("head", {"layer": True}, 400),
        ("head", {"layer": 10**9}, 400),
        ("tile", {"reduce": "x"}, 400),
        ("code", {"mechanism": "../x"}, 400),
    ],
)
def test_wrong_parameters_are_clear_errors(
    client: Client, method: str, params: dict[str, Any], status: int
) -> None:
    found, answer = client.call(method, **params)
    assert (found, answer["ok"], answer["id"]) == (status, False, 1)
    assert answer["error"]["message"].endswith(".")


def test_questions_about_what_is_not_shown_any_more_are_answered_409(client: Client) -> None:
    def about(shown: Any) -> tuple[int, Any]:
        asked = {"id": 1, "method": "model", "params": {}, "shown": shown}
        status, _, data = client.request("POST", "/call", json.dumps(asked).encode())
        return status, json.loads(data)

    assert about(1)[0] == about(None)[0] == 200
    shown = client.call("open", what="tiny")[1]["result"]["data"]["shown"]
    status, answer = about(1)
    assert (status, answer["error"]["action"]) == (409, "Load this page once more to see it.")
    assert about(shown)[0] == 200
    assert [about(each)[0] for each in (True, "1", 1.5)] == [400, 400, 400]


def test_a_page_is_not_saved_with_what_another_page_has_opened(client: Client) -> None:
    def saved(**said: Any) -> tuple[int, bytes]:
        body = json.dumps({"view": {"panel": "inspect"}, **said}).encode()
        status, _, data = client.request("POST", "/page", body)
        return status, data

    assert saved(shown=1)[0] == 200
    shown = client.call("open", what="tiny")[1]["result"]["data"]["shown"]
    status, data = saved(shown=1)
    assert status == 409
    assert json.loads(data)["error"]["action"] == "Load this page once more to see it."
    assert saved(shown=shown)[0] == saved()[0] == 200
    assert saved(shown="1")[0] == 400


def test_a_text_is_not_read_by_a_model_that_another_page_has_opened(client: Client) -> None:
    def opened(shown: int, **what: str) -> tuple[int, Any]:
        asked = {"id": 1, "method": "open", "params": what, "shown": shown}
        status, _, data = client.request("POST", "/call", json.dumps(asked).encode())
        return status, json.loads(data)

    first = opened(1, what="tiny")[1]["result"]["data"]["shown"]
    second = opened(first, what="language")[1]["result"]["data"]["shown"]
    status, answer = opened(first, text="the cat sat")
    assert (status, answer["error"]["action"]) == (409, "Load this page once more to see it.")
    assert opened(second, text="the cat sat")[0] == 200
    # What comes with qkv is opened whatever is shown.
    assert opened(first, what="tiny")[0] == 200


def _npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _bomb() -> bytes:
    """A few kilobytes that say that they unpack to 48 MiB, and do."""
    file = io.BytesIO()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (2048, 2048)}
    )
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in "qkv":
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(header.getvalue())
                member.write(bytes(1 << 24))
    return file.getvalue()


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('a pickle was loaded')",))


def test_pickles_and_bombs_are_refused(start: Callable[..., Client]) -> None:
    client = start(limits=Limits(file_bytes=1 << 20))
    client.enter()
    objects = np.array([Trap()], dtype=object)
    claims = json.dumps({n: {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
                         for n in "qkv"}).encode()  # fmt: skip
    for hostile in (
        pickle.dumps(Trap()),
        _npz(q=objects, k=objects, v=objects),
        _bomb(),
        struct.pack("<Q", len(claims)) + claims,
        b"PK\x03\x04" + bytes(100),
        b"",
    ):
        status, _, data = client.request("POST", "/file", hostile, OCTETS)
        answer = json.loads(data)
        assert (status, answer["ok"]) == (400, False), answer
    assert client.call("errata")[0] == 200


def test_a_file_is_opened_from_its_bytes(client: Client, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 6, 4)).astype(np.float32)
    path = tmp_path / "a.safetensors"
    qkv.files.write_arrays(path, q, k, v, tokens=["</script>"] * 6)
    status, _, data = client.request("POST", "/file", path.read_bytes(), OCTETS)
    assert status == 200
    assert "inspect" in json.loads(data)["result"]["data"]["panels"]
    _, answer = client.call("model")
    assert answer["result"]["layers"][0]["num_heads"] == 2
    assert answer["result"]["tokens"] == ["</script>"] * 6
    _, answer = client.call("weight", layer=0, head=1, query=2, key=3)
    exact = np.exp(q[1, 2] @ k[1].T / 2)
    assert answer["result"]["weight"] == pytest.approx(exact[3] / exact.sum(), rel=1e-5)
    # The page names no paths: what it sends is a file's bytes or nothing.
    assert client.request("POST", "/file", str(path).encode(), OCTETS)[0] == 400


def test_a_tile_comes_as_bytes(client: Client) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 40, 8)).astype(np.float32)
    client.request("POST", "/file", _npz(q=q, k=k, v=v), OCTETS)
    status, data = client.call("tile", layer=0, head=0, level=0, row=0, column=0, reduce="max")
    assert status == 200
    (length,) = struct.unpack("<I", data[:4])
    header = json.loads(data[4 : 4 + length])
    assert header["buffers"] == [{"dtype": "float32", "shape": [40, 40]}]
    found = np.frombuffer(data[4 + length :], "<f4").reshape(40, 40)
    scores = q.astype(float) @ k.T / np.sqrt(8)
    exact = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(found, exact / exact.sum(1, keepdims=True), atol=1e-6)


class SlowSession(Session):
    """A session whose long jobs wait until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.together = self.most_together = 0

    def answer(self, method: str, params: Any = None, about: int | None = None) -> Any:
        if method != "scaling":
            return super().answer(method, params, about)
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        self.go.wait(30)
        self.together -= 1
        return super().answer("errata")


def test_one_heavy_job_at_a_time_and_a_bounded_queue(start: Callable[..., Client]) -> None:
    session = SlowSession()
    client = start(session, Limits(waiting=2))
    client.enter()
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(client.call, "scaling") for _ in range(6)]
        while sum(call.done() for call in calls) < 3:
            # Light questions are answered meanwhile.
            assert client.call("errata")[0] == 200
        session.go.set()
        statuses = sorted(call.result()[0] for call in calls)
    assert statuses == [200, 200, 200, 503, 503, 503]
    assert session.most_together == 1


@pytest.mark.slow
def test_a_thousand_requests_by_fifty_clients(start: Callable[..., Client]) -> None:
    client = start()
    client.enter()
    asked: list[tuple[str, dict[str, Any]]] = [
        ("errata", {}), ("code", {"mechanism": "linear"}), ("example", {}), ("exercises", {}),
    ]  # fmt: skip
    asked = [*(4 * asked), ("mechanisms", {})]
    expected = [client.call(method, **params)[1]["result"] for method, params in asked]

    def ask(number: int) -> bool:
        method, params = asked[number % len(asked)]
        status, answer = client.call(method, **params)
        return status == 200 and answer["result"] == expected[number % len(asked)]

    with ThreadPoolExecutor(50) as pool:
        assert all(pool.map(ask, range(1000)))


def test_what_fails_unexpectedly_tells_nothing_of_the_machine(
    start: Callable[..., Client], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Session):
        def answer(self, method: str, params: Any = None, about: int | None = None) -> Any:
            raise RuntimeError("/home/somebody/secret")

    client = start(Broken())
    client.enter()
    status, answer = client.call("errata")
    assert (status, answer["ok"]) == (500, False)
    assert "secret" not in json.dumps(answer)
    assert "secret" in caplog.text


def test_tokens_cannot_end_the_element_that_they_are_in(start: Callable[..., Client]) -> None:
    hostile = "</script><script>alert(1)</script>\u2028\u2029<!--"
    client = start(Session(Source(hostile)))
    client.enter()
    _, _, data = client.request("GET", "/")
    page = data.decode()
    assert "<script>alert" not in page
    assert "\u2028" not in page
    inside = page.partition('id="qkv-data">')[2].partition("</script>")[0]
    assert json.loads(inside)["title"] == f"{hostile}: qkv lab"


def test_the_command_prints_its_address_and_ends_quietly() -> None:
    import signal

    ran = subprocess.Popen(
        [sys.executable, "-m", "qkv", "lab", "--no-open"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ran.stdout is not None
    line = ran.stdout.readline()
    assert line.startswith("http://127.0.0.1:")
    ran.send_signal(signal.SIGINT)
    out, err = ran.communicate(timeout=120)
    assert (out, err, ran.returncode) == ("", "", 0)


@pytest.mark.skipif(sys.platform == "win32", reason="there another process may not take the port")
def test_a_port_is_free_again_when_the_server_ends() -> None:
    """The port that the system chose is free, although a browser was connected.

    So `--port` of the address in the browser's history opens the lab again.
    """
    opened = listen()
    opened.listen()
    port = opened.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as browser:
        # Who closes first holds the connection for a minute.
        opened.accept()[0].close()
        opened.close()
        assert browser.recv(1) == b""
    again = listen(port)
    assert again.getsockname()[1] == port
    again.listen()
    with pytest.raises(qkv.ArgumentError, match=f"port {port} of 127.0.0.1 cannot be used"):
        listen(port)
    again.close()
