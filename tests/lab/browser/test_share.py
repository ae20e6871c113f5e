"""What is shared shows the same somewhere else: as the end of an address, and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
import qkv.files
import qkv.lab
from qkv.lab.sources.source import open_file

pytestmark = pytest.mark.browser


def saved(page: Any, folder: Path) -> Path:
    """The page that the button writes."""
    page.click('header button:has-text("Share")')
    with page.expect_download() as download:
        page.click('button:has-text("Save the page")')
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    return path


def elsewhere(page: Any, address: str) -> Any:
    """Another page of the same browser."""
    other = page.context.new_page()
    other.errors = []
    other.on("pageerror", lambda error: other.errors.append(str(error)))
    other.on("console", lambda m: m.type == "error" and other.errors.append(m.text))
    other.goto(address)
    return other


def weights_of(page: Any) -> np.ndarray:
    page.wait_for_selector('main[data-panel="heatmap"]')
    found = page.eval_on_selector_all(
        'table[aria-label="weights matrix"] tbody tr',
        "rows => rows.map((row) => [...row.querySelectorAll('data.num')].map((x) => x.value))",
    )
    assert found
    return np.array(found, float)


@pytest.mark.parametrize("again", [False, True])
def test_a_page_that_was_saved_opens_at_the_view(lab: Any, tmp_path: Path, again: bool) -> None:
    """A page that was saved from a saved page opens there, too."""
    page = lab.open("heatmap", token=3, mask="causal")
    weights = weights_of(page)
    path = saved(page, tmp_path)
    assert path.name == "qkv-heatmap.html"
    other = elsewhere(page, path.as_uri())
    if again:
        path = saved(other, tmp_path)
        other = elsewhere(page, path.as_uri())
    np.testing.assert_array_equal(weights_of(other), weights)
    assert other.is_checked('label:has-text("causal") input')
    assert not other.errors
    other.close()


def test_an_address_opens_its_view_in_a_page_that_opens_with_another(
    lab: Any, tmp_path: Path
) -> None:
    page = lab.open("heatmap", token=3, mask="causal")
    path = saved(page, tmp_path)
    page.keyboard.press("Escape")
    page = lab.open("heatmap")
    unmasked = weights_of(page)
    page.click('header button:has-text("Share")')
    part = page.inner_text(".sharedpart code")
    other = elsewhere(page, path.as_uri() + part)
    np.testing.assert_array_equal(weights_of(other), unmasked)
    assert other.is_checked('label:has-text("none") input')
    assert other.query_selector('[data-cell="0,0"]')
    # What is changed there is in its address, as always.
    other.click('label:has-text("window")')
    other.wait_for_function("() => location.hash.includes('mask=window')")
    other.reload()
    assert other.is_checked('label:has-text("window") input')
    other.close()


def test_a_head_of_the_server_is_in_the_page(served: Any, tmp_path: Path) -> None:
    page = served.open("inspect", layer=1, head=2, query=20)
    page.wait_for_selector('canvas[data-missing="0"]')
    query = page.inner_text('.readout [data-name="query"]')
    path = saved(page, tmp_path)
    other = elsewhere(page, path.as_uri())
    other.wait_for_selector('canvas[data-missing="0"]')
    assert other.inner_text('.readout [data-name="query"]') == query
    assert "head=2" not in other.url
    assert not other.errors
    other.close()


def test_numbers_of_a_file_are_in_the_address(
    chromium: Any, lab: Any, file_page: Path, tmp_path: Path
) -> None:
    """Another page of the lab, which knows nothing of the file, shows its weights."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 4, 3)).astype(np.float32)
    arrays = tmp_path / "a.safetensors"
    qkv.files.write_arrays(arrays, q, k, v)
    page_file = tmp_path / "own.html"
    page_file.write_text(qkv.lab.to_html(open_file(arrays)), encoding="utf-8")
    page = chromium.new_page()
    page.goto(page_file.as_uri() + "#heatmap&token=2")
    expected = qkv.inspect(*(x.astype(float) for x in (q, k, v))).weights[...]
    np.testing.assert_allclose(weights_of(page), expected, rtol=1e-12)
    page.click('header button:has-text("Share")')
    part = page.inner_text(".sharedpart code")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click('dialog[open] button:has-text("Copy")')
    page.wait_for_selector('dialog[open] [role="status"]:has-text("copied")')
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(part.rstrip("…"))
    page.close()
    other = elsewhere(lab.page, file_page.as_uri() + copied)
    np.testing.assert_allclose(weights_of(other), expected, rtol=1e-12)
    assert "token=2" in other.url
    other.close()


def test_an_address_that_was_cut_off_says_so(lab: Any) -> None:
    """The first example would else be taken for the numbers that were sent."""
    own = '[["a","b"],"1 2,3 4","1 0,0 1","1 2,3 4"]'
    page = lab.open("heatmap", ex="own", own=own)
    assert page.query_selector(".failure") is None
    page = lab.open("heatmap", ex="own", own=own[:-4])
    assert "The numbers in this address cannot be read" in page.inner_text(".failure")
    page.select_option(".examplebar select", "three")
    assert page.query_selector(".failure") is None
