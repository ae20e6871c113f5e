"""The widget in JupyterLab, with a live kernel behind it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anywidget
import nbformat
import numpy as np
import pytest

import qkv
from qkv.samples import shared_example, tiny_model

from .conftest import Lab

pytestmark = pytest.mark.browser

SHOW = """
import qkv, qkv.lab
from qkv.samples import tiny_model

model = tiny_model()
ids = model.repeated_sequence()
record = qkv.ModelRecord("in a notebook", keep="weights")
record.texts = model.tokens(ids)
for layer, (q, k, v, said) in enumerate(model.attention_inputs(ids)):
    record.add(q, k, *said, name=f"layers.{layer}", tokens=[ids])
shown = qkv.lab.widget(record)
shown
"""
CELLS = (SHOW.strip(), "print('the panel is', shown.view['panel'])")
SECONDS = 120


@pytest.fixture(scope="module")
def notebook_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A notebook in a JupyterLab of its own, which asks nobody for news."""
    folder = tmp_path_factory.mktemp("jupyter")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "lab.ipynb")
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}",
        f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}",
        "--ServerApp.allow_root=True", "--LabApp.extension_manager=readonly",
    ]  # fmt: skip
    environment = {
        **os.environ,
        # Where packages of this environment put what a notebook loads.
        "JUPYTER_PATH": str(Path(anywidget.__file__).parents[4] / "share" / "jupyter"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        **{
            f"JUPYTER{name}_DIR": str(folder / name)
            for name in ("_CONFIG", "_DATA", "_RUNTIME", "LAB_WORKSPACES")
        },
    }
    log = folder / "log"
    with (
        log.open("wb") as file,
        subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process,
    ):
        origin = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + SECONDS
            while not answers(f"{origin}/api?token={token}"):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.5)
            yield f"{origin}/lab/tree/lab.ipynb?token={token}"
        finally:
            process.terminate()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False


def run_cell(page: Any, number: int) -> None:
    """Run a cell; JupyterLab forgets what it is told before the kernel has answered once."""
    prompt = page.locator(".jp-CodeCell .jp-InputPrompt").nth(number)
    asked = []
    for _ in range(30):
        # On a busy machine JupyterLab may ask something of its own before a cell can be clicked.
        for dialog in page.locator(".jp-Dialog").all():
            asked.append(dialog.inner_text())
            dialog.locator(".jp-mod-accept").click()
        page.locator(".jp-CodeCell .cm-content").nth(number).click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(2000)
        if prompt.inner_text().strip() != "[ ]:":
            return
    raise AssertionError(f"the kernel does not answer; JupyterLab asked {asked}")


def test_the_widget_asks_a_live_kernel(chromium: Any, notebook_address: str) -> None:
    context = chromium.new_context(
        viewport={"width": 1440, "height": 1400}, reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(1000 * SECONDS)
    lab = Lab(page, notebook_address)
    page.goto(notebook_address)
    page.wait_for_selector(".jp-NotebookPanel-toolbar")
    # The circle is empty when the kernel has nothing to do.
    page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]')
    run_cell(page, 0)
    widget = page.locator(".qkv-lab.in-notebook")
    widget.wait_for()

    # What the page opens with: the heads, which the kernel computes when it is asked.
    page.wait_for_selector('.qkv-lab main[data-panel="inspect"] .heads')
    model = tiny_model()
    ids = model.repeated_sequence()
    query, key, value, said = list(model.attention_inputs(ids))[1]
    record = qkv.inspect(query, key, value, *said)
    page.select_option('label:has(span:text-is("Layer")) select', "1")
    page.click('.heads td[data-row="1"][data-column="1"]')
    page.wait_for_selector('.kind:has-text("induction")')
    page.fill(".qkv-lab input[type=number]", "40")
    page.keyboard.press("Enter")
    page.wait_for_selector('.words [data-index="40"].here')
    page.wait_for_selector('canvas[data-missing="0"]')
    wanted = np.asarray(record.weights[1, 40])
    bars = lab.numbers('.bars[aria-label="Best keys"]')
    np.testing.assert_allclose(bars, -np.sort(-wanted)[: len(bars)], atol=1e-5)

    # Keys are the lab's: twice d would delete the cell, and a would add one.
    page.locator(".qkv-lab .words").focus()
    for key in ("d", "d", "a", "ArrowRight"):
        page.keyboard.press(key)
    page.wait_for_selector('.words [data-index="41"].here')
    assert page.locator(".jp-CodeCell").count() == len(CELLS)

    # Another panel: the page computes it, with the rows that Python gave.
    page.click('.qkv-lab nav a[href="#heatmap"]')
    page.wait_for_selector('table[aria-label="weights matrix"]')
    example = shared_example()
    weights = np.asarray(qkv.inspect(example.q, example.k, example.v).weights[...])
    np.testing.assert_allclose(lab.grid("weights matrix"), weights, rtol=1e-12)
    assert "#heatmap" not in page.url

    # And one that asks the kernel; then Python reads where the page is.
    page.click('.qkv-lab nav a[href="#mechanisms"]')
    page.wait_for_selector(".qkv-lab .multiples")
    run_cell(page, 1)
    page.wait_for_selector('.jp-OutputArea-output:has-text("the panel is mechanisms")')
    assert not [error for error in lab.errors if "qkv" in error]
    origin = notebook_address.partition("/lab/")[0]
    outside = [url for url in lab.asked if not url.startswith((origin, "data:", "blob:"))]
    assert outside == []
    context.close()
