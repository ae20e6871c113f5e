"""Draws the pictures of docs/lab.md: panels of the lab, from the file that `qkv lab` exports.

Needs playwright and a chromium: python tools/lab_screenshots.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).resolve().parent.parent / "docs"

SHOTS: dict[str, tuple[str, Literal["light", "dark"], int, int]] = {
    "heatmap": ("heatmap&mask=causal&token=2&key=1", "light", 1180, 760),
    "pipeline": ("pipeline&step=9&token=1", "dark", 1180, 760),
    "tour": ("tour&tour=8", "light", 1180, 900),
    "inspect": ("inspect&layer=1&head=1&score=induction&query=40&kkey=9", "light", 1180, 2150),
    "scaling": ("scaling&dk=64", "dark", 1180, 900),
}
"""Name of the picture: address of the view, theme, width and height."""

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]


def main() -> None:
    chromium = shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "lab.html"
        export = [sys.executable, "-m", "qkv", "lab", "--model", "tiny", "--export", str(page_file)]
        subprocess.run(export, check=True)
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        for name, (view, theme, width, height) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": height},
                color_scheme=theme,
                reduced_motion="reduce",
            )
            page.goto(f"{page_file.as_uri()}#{view}")
            page.wait_for_selector('canvas[data-missing="0"]' if name == "inspect" else "main")
            page.wait_for_timeout(300)
            page.screenshot(path=DOCS / f"lab-{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
