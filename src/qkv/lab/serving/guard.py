"""Who may ask the lab's server, and how much: rules that hold before any answer is computed.

The page is served to one browser on this machine. Other pages that this browser shows, other users
of the machine and names that resolve to it are outsiders: the `Host` must be the address that was
printed, a cookie must come with each request, and a POST must come from the page itself.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from hmac import compare_digest
from typing import Any
from urllib.parse import parse_qs

from starlette.responses import PlainTextResponse, Response

__all__ = ["COOKIE", "POLICY", "Guard"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

COOKIE = "qkv-lab"
"""The port follows in the name, since browsers send cookies of a host to all of its ports."""

_COOKIE_SECONDS = 30 * 24 * 3600
"""A browser that was closed may come back for so long; no other server knows the cookie."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}


class Guard:
    """An ASGI application around another, which lets through what the rules allow.

    Parameters
    ----------
    app : ASGI application
    token : str
        Opens the page once; its first use sets a cookie that opens it from then on. `renew` makes
        another.

    Attributes
    ----------
    host : str
        What each request must have as its `Host`, such as "127.0.0.1:8123".
    """

    def __init__(self, app: Any, token: str, host: str) -> None:
        self._app = app
        self._token: str | None = token
        self._token_lock = threading.Lock()
        self._cookie = secrets.token_urlsafe(32)
        self.host = host

    def renew(self) -> str:
        """Make a new token, which opens the page once; an earlier one no longer does.

        May be called in any thread.
        """
        token = secrets.token_urlsafe(32)
        with self._token_lock:
            self._token = token
        return token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on to the application."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS.items()]
            await send(message)

        refusal = self._refusal(scope)
        answer = self._app if refusal is None else refusal
        await answer(scope, receive, with_headers)

    @property
    def _name(self) -> str:
        return f"{COOKIE}-{self.host.rpartition(':')[2]}"

    def _refusal(self, scope: Scope) -> Response | None:
        """The response to a request that is refused; None if the request may pass."""
        if _all(scope, b"host") != [self.host.encode()]:
            wrong = f"This is not the address of the lab. Open http://{self.host}/ in its place.\n"
            return PlainTextResponse(wrong, 403)
        if scope["method"] == "POST" and not self._is_from_page(scope):
            return PlainTextResponse("Only the page of the lab may ask.\n", 403)
        known = self._has_cookie(scope)
        if scope["method"] == "GET" and scope["path"] == "/" and scope["query_string"]:
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
            if len(given) == 1 and self._spend(given[0]):
                return self._redirect(cookie=True)
            if known:
                return self._redirect(cookie=False)
        if not known:
            return PlainTextResponse(
                "Open the lab with the address that qkv lab has printed. It works once; after "
                f"that, http://{self.host}/ opens the lab in the same browser. For another "
                "browser, press Enter in the terminal in which qkv lab runs: it prints a new "
                "address. Without a terminal, start qkv lab again.\n",
                401,
            )
        return None

    def _is_from_page(self, scope: Scope) -> bool:
        same_site = _all(scope, b"sec-fetch-site") in ([], [b"same-origin"])
        return same_site and _all(scope, b"origin") == [f"http://{self.host}".encode()]

    def _spend(self, given: str) -> bool:
        """Whether this is the token and has not been used; it counts as used from now on."""
        with self._token_lock:
            token = self._token
            if token is None or not compare_digest(given.encode(), token.encode()):
                return False
            self._token = None
        return True

    def _has_cookie(self, scope: Scope) -> bool:
        # A browser sends the cookies of all programs at this address, in whatever form these gave
        # them, and one that http.cookies does not read would hide those after it.
        cookies = b";".join(_all(scope, b"cookie")).split(b";")
        pairs = [cookie.strip().partition(b"=") for cookie in cookies]
        name, known = self._name.encode(), self._cookie.encode()
        return any(given == name and compare_digest(value, known) for given, _, value in pairs)

    def _redirect(self, *, cookie: bool) -> Response:
        response = Response(status_code=303, headers={"location": "/"})
        if cookie:
            response.set_cookie(
                self._name,
                self._cookie,
                max_age=_COOKIE_SECONDS,
                httponly=True,
                samesite="strict",
                path="/",
            )
        return response


def _all(scope: Scope, name: bytes) -> list[bytes]:
    """The values of all headers with this name."""
    return [value for key, value in scope["headers"] if key == name]
