"""The site that `mkdocs build` wrote: what axe finds, and what is shown for a missing page."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import AXE

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[3]
SITE = ROOT / "site"

PAGES = (
    "index.html", "guides/learn-and-teach.html", "mechanisms/index.html", "mechanisms/flash.html",
    "api/attention.html", "notebooks/a_student.html", "exercises.html", "live-lab.html",
    "model-types.html", "404.html",
)  # fmt: skip

FAULTS = """async () => {
    const found = await axe.run(document, { resultTypes: ["violations"] });
    return found.violations.map(
        (each) => `${each.id}: ${each.nodes.map((node) => node.html.slice(0, 200)).join(" | ")}`);
}"""


class Host(http.server.SimpleHTTPRequestHandler):
    """Serves a folder below /project/, and its 404.html for what is not there."""

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.removeprefix("/project"))

    def send_error(self, code: int, *others: Any) -> None:
        body = (SITE / "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said: Any) -> None:
        """Nothing of the requests is printed."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not (SITE / "index.html").is_file():
        pytest.skip("there is no site/; `mkdocs build` of the docs extra writes it")
    host = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Host, directory=str(SITE))
    )
    threading.Thread(target=host.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{host.server_port}/project/"
    host.shutdown()
    host.server_close()


@pytest.mark.parametrize(("theme", "width"), [("light", 390), ("dark", 1440), ("light", 1440)])
def test_axe_finds_nothing(chromium: Any, address: str, theme: str, width: int) -> None:
    settings = {"color_scheme": theme, "reduced_motion": "reduce"}
    context = chromium.new_context(viewport={"width": width, "height": 900}, **settings)
    page, axe = context.new_page(), AXE.read_text("utf-8")
    faults = {}
    for name in PAGES:
        page.goto(address + name)
        page.evaluate(axe)
        found = page.evaluate(FAULTS)
        if page.evaluate("document.documentElement.scrollWidth") > width:
            found.append("it is wider than the window")
        if found:
            faults[name] = found
    context.close()
    assert faults == {}


def test_a_wide_table_is_scrolled_by_keyboard(chromium: Any, address: str) -> None:
    context = chromium.new_context(viewport={"width": 390, "height": 900})
    page = context.new_page()
    page.goto(address + "model-types.html")
    table = page.locator(".md-typeset__scrollwrap[tabindex='0']").first
    table.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.activeElement.scrollLeft > 0")
    context.close()


@pytest.mark.parametrize("missing", ["missing.html", "some/missing/page", "api/missing/"])
def test_a_missing_page_leads_back(chromium: Any, address: str, missing: str) -> None:
    context = chromium.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.resource_type))
    answer = page.goto(address + missing)
    assert answer.status == 404
    assert set(asked) <= {"document", "fetch", "other"}, "it loads nothing that may be elsewhere"
    links = page.locator("main a")
    page.wait_for_function(
        "start => [...document.links].every((link) => link.href.startsWith(start))", arg=address
    )
    targets = links.evaluate_all("all => all.map((each) => each.href)")
    assert len(targets) >= 3
    for target in targets:
        assert context.request.get(target).ok, target
    links.first.click()
    page.wait_for_url(address + "index.html")
    context.close()
