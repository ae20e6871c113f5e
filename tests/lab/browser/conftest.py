"""A real Chromium, and the two pages that it looks at: a file from disk, and the local server's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

PANELS = (
    "start", "tour", "scaling", "pipeline", "heatmap", "count", "tiles", "mechanisms",
    "inspect", "language", "code", "errata", "exercises",
)  # fmt: skip

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><b>",
    "\u202eright\u2066",
    "\x1b[31m",
    "a\u2028b",
)
"""Tokens that somebody else chose; the file is opened with them."""

FOLLOW = """async (there) => {
    location.hash = there;
    for (let frame = 0; frame < 3; frame += 1) await new Promise(requestAnimationFrame);
}"""

AXE = Path(__file__).parents[3] / "lab" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or os.environ.get("CHROMIUM")
    if path is None:
        pytest.fail("there is no chromium; install Debian's package, or name one in CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class Lab:
    """One open page, and what happened in it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.asked: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        page.on("dialog", self._refuse)

    def _refuse(self, dialog: Any) -> None:
        self.errors.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def open(self, panel: str, **view: Any) -> Any:
        """Go to a panel as a link does."""
        there = f"#{panel}" + (f"&{urlencode(view)}" if view else "")
        if self.page.url.partition("#")[0] == self.address:
            self.page.evaluate(FOLLOW, there)
        else:
            self.page.goto(self.address + there)
        self.page.wait_for_selector(f'main[data-panel="{panel}"]')
        return self.page

    def numbers(self, selector: str) -> list[float]:
        """The numbers inside an element, with all their digits, as the DOM has them."""
        found = self.page.eval_on_selector_all(
            f"{selector} data.num", "all => all.map((each) => each.value)"
        )
        return [float(text) for text in found]

    def grid(self, title: str) -> np.ndarray:
        """The numbers of a grid, as rows."""
        rows = self.page.eval_on_selector_all(
            f'table[aria-label="{title}"] tbody tr',
            "rows => rows.map((row) => [...row.querySelectorAll('data.num')].map((x) => x.value))",
        )
        return np.array([[float(text) for text in row] for row in rows])

    def table(self, title: str) -> list[list[str]]:
        """The cells of a table as they are read."""
        found: list[list[str]] = self.page.eval_on_selector_all(
            f'[aria-label="{title}"] tbody tr',
            "rows => rows.map((row) => [...row.cells].map((cell) => cell.innerText.trim()))",
        )
        return found


@pytest.fixture(scope="session")
def file_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a small model, as `qkv lab --export` writes it."""
    folder = tmp_path_factory.mktemp("lab")
    path = folder / "lab.html"
    export = [sys.executable, "-m", "qkv", "lab", "--model", "tiny", "--export", str(path)]
    subprocess.run(export, check=True, capture_output=True)
    return path


@contextmanager
def lab_server(*arguments: str) -> Iterator[str]:
    """The address that `qkv lab` with these arguments prints; it opens once."""
    command = [sys.executable, "-u", "-m", "qkv", "lab", *arguments, "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        yield line[line.index("http://") :]
        process.terminate()


@contextmanager
def served_lab(chromium: Any, *arguments: str) -> Iterator[Lab]:
    """The page of `qkv lab` with these arguments, in a browser of its own."""
    with lab_server(*arguments) as address:
        context = chromium.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        page.goto(address)
        yield Lab(page, address.partition("?")[0])
        context.close()


@pytest.fixture(scope="session")
def server_address() -> Iterator[str]:
    """The address of a small model's page."""
    with lab_server("--model", "tiny") as address:
        yield address


@pytest.fixture(scope="session")
def server_context(chromium: Any, server_address: str) -> Iterator[Any]:
    """A browser that spent the token, and holds the cookie."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.goto(server_address)
    page.close()
    yield context
    context.close()


@pytest.fixture
def opened(chromium: Any, file_page: Path) -> Iterator[Any]:
    """Opens the file with settings of the browser: `opened(width=390, color_scheme="dark")`."""
    contexts = []

    def make(path: Path = file_page, width: int = 1280, height: int = 900, **settings: Any) -> Lab:
        settings.setdefault("reduced_motion", "reduce")
        context = chromium.new_context(viewport={"width": width, "height": height}, **settings)
        context.set_offline(True)
        contexts.append(context)
        return Lab(context.new_page(), path.as_uri())

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def lab(opened: Any) -> Iterator[Lab]:
    """The file, at a desk's width; errors in the page, and requests, fail the test."""
    page = opened()
    yield page
    assert page.errors == []
    outside = {url for url in page.asked if not url.startswith(("file:", "data:", "about:"))}
    assert outside == set()


@pytest.fixture
def served(server_context: Any, server_address: str) -> Iterator[Lab]:
    """The local page; errors in it, and requests to anywhere else, fail the test."""
    origin = server_address.partition("?")[0]
    page = Lab(server_context.new_page(), origin)
    yield page
    page.page.close()
    assert page.errors == []
    assert {url for url in page.asked if not url.startswith((origin, "data:", "about:"))} == set()
