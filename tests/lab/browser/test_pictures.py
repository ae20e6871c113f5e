"""Pictures that the page saves, read as files: SVG as XML, PNG by its header and its pixels."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import qkv
from qkv.samples import shared_example

pytestmark = pytest.mark.browser

SVG = "{http://www.w3.org/2000/svg}"


def saved(page: Any, title: str, kind: str, folder: Path) -> Path:
    """The file that the button gives."""
    with page.expect_download() as download:
        page.click(f'button[aria-label="Save {title} as {kind.upper()}"]')
    path = folder / download.value.suggested_filename
    download.value.save_as(path)
    assert path.name.startswith("qkv-")
    assert path.suffix == f".{kind}"
    return path


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    assert not [each for each in root.iter() if each.get("class") or each.get("style")]
    return ["".join(each.itertext()) for each in root.iter(f"{SVG}text")]


def size_of(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(set(data)) > 100
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_heatmap(lab: Any, tmp_path: Path) -> None:
    page = lab.open("heatmap", mask="causal")
    written = texts(saved(page, "weights matrix", "svg", tmp_path))
    example = shared_example()
    weights = np.asarray(qkv.inspect(example.q, example.k, example.v, qkv.Causal()).weights[...])
    for token in example.tokens:
        assert written.count(token) == 2
    shown = [f"{x:.4f}" for x in weights[np.tri(5, dtype=bool)] if x != 1]
    assert not set(shown) - set(written)
    width, height = size_of(saved(page, "weights matrix", "png", tmp_path))
    assert min(width, height) > 300


def test_entropies_of_all_heads(lab: Any, tmp_path: Path) -> None:
    page = lab.open("inspect")
    title = "entropy: layers down, heads across"
    path = saved(page, title, "svg", tmp_path)
    shown = {f"{x:.4f}" for x in lab.grid(title).ravel()}
    assert shown <= set(texts(path))
    assert {"layer 0", "layer 1"} <= set(texts(path))
    size_of(saved(page, title, "png", tmp_path))


def test_the_scaling_curve(lab: Any, tmp_path: Path) -> None:
    page = lab.open("scaling")
    path = saved(page, "Entropy, nats", "svg", tmp_path)
    lines = [each.get("points") or "" for each in ElementTree.parse(path).iter(f"{SVG}polyline")]
    assert len(lines) == 2
    assert all(len(points.split()) >= 11 for points in lines)
    assert {"d_k", "log 5"} <= set(texts(path))
    assert all(
        each.get("stroke", "none") != "none"
        for each in ElementTree.parse(path).iter(f"{SVG}polyline")
    )
    size_of(saved(page, "Entropy, nats", "png", tmp_path))


def test_the_schedule_of_tiles(lab: Any, tmp_path: Path) -> None:
    """Five tokens in blocks of two, causal: three blocks on the diagonal are cut by the mask."""
    page = lab.open("tiles", mask="causal", block=2)
    path = saved(page, "Tiles of 2 × 2", "svg", tmp_path)
    # The last block on the diagonal holds one pair, which is allowed.
    assert {"4 full", "2 partial", "3 skipped"} <= set(texts(path))
    assert "4 full" in page.get_attribute(".schedule", "aria-label")
    size_of(saved(page, "Tiles of 2 × 2", "png", tmp_path))


def test_the_map_of_a_head(lab: Any, tmp_path: Path) -> None:
    page = lab.open("inspect", layer=1, head=1)
    page.wait_for_selector('canvas[data-missing="0"]')
    title = "Weights of layer 1, head 1"
    path = saved(page, title, "svg", tmp_path)
    assert {title, "keys, 64", "queries, 64"} <= set(texts(path))
    (image,) = ElementTree.parse(path).iter(f"{SVG}image")
    assert (image.get("href") or "").startswith("data:image/png;base64,")
    size_of(saved(page, title, "png", tmp_path))


def test_hostile_tokens_are_text_in_pictures(opened: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(3, 2))
    tokens = ['"><script>alert(1)</script>', "&lt;", "]]>"]
    path = tmp_path / "page.html"
    path.write_text(qkv.explain(x, x, x, tokens=tokens).to_html(), encoding="utf-8")
    lab = opened(path)
    page = lab.open("heatmap")
    written = saved(page, "weights matrix", "svg", tmp_path)
    assert not list(ElementTree.parse(written).iter(f"{SVG}script"))
    assert {"&lt;", "]]>"} <= set(texts(written))
    assert lab.errors == []
