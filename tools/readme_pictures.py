"""Draws the two pictures of README.md: where one word of a real model reads, and a chart of speed.

The first is computed from the sample that qkv ships, the second read from the tables in docs/:
python tools/readme_pictures.py
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

import qkv
from qkv.samples.real import real_sample

DOCS = Path(__file__).resolve().parent.parent / "docs"

STYLE = """<style>
text { font: 15px system-ui, sans-serif; fill: #1d2733 } .small { font-size: 12px; fill: #5c6773 }
.title { font-weight: 600 } .back { fill: #fff } .key { fill: #1b6ca8 } .other { fill: #b8bec6 }
.word { font: 14px ui-monospace, Consolas, monospace }
.query { fill: none; stroke: #b3450b; stroke-width: 2 }
.one { stroke: #5c6773; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e8ebee } .small { fill: #a5adb5 } .back { fill: #14181c } .key { fill: #2f87c8 }
  .other { fill: #4e5760 } .query { stroke: #f08a4b } .one { stroke: #a5adb5 }
}
</style>"""

HEAD, QUERY = 3, 75
WIDTH, LINE, LETTER = 760, 30, 8.4
"""Pixels of a line of text, between two lines, and of a letter."""


def head_picture() -> str:
    """The words of the sample, shaded by the weight that one query gives them."""
    sample = real_sample()
    record = qkv.inspect(sample.q, sample.k, sample.v)
    weights = np.asarray(record.weights[HEAD, QUERY]).reshape(-1)
    x, y = 16.0, 62.0
    shapes = []
    for n, token in enumerate(sample.tokens):
        if token in ("[CLS]", "[SEP]"):
            continue
        is_part = token.startswith("##") or re.fullmatch(r"[.,;:!?]", token)
        word = token.removeprefix("##")
        width = LETTER * len(word) + 4
        if not is_part:
            x += 5
        if x + width > WIDTH - 16:
            x, y = 16.0, y + LINE
        box = f'x="{x:.1f}" y="{y - 17:.0f}" width="{width:.1f}" height="23" rx="4"'
        shapes.append(f'<rect class="key" {box} opacity="{weights[n] ** 0.5:.3f}"/>')
        if n == QUERY:
            shapes.append(f'<rect class="query" {box}/>')
        shapes.append(f'<text class="word" x="{x + 2:.1f}" y="{y:.0f}">{escape(word)}</text>')
        x += width
    best = int(np.argmax(weights * (np.arange(len(weights)) > 0)))
    title = (
        f"Head {HEAD} of a layer of all-MiniLM-L6-v2: \u201c{sample.tokens[QUERY]}\u201d gives "
        f"{weights[best]:.0%} of its weight to \u201c{sample.tokens[best]}\u201d"
    )
    caption = "The bluer a word, the larger its weight (shading: its square root). Layer 1 of 6."
    shapes.append(f'<text class="small" x="16" y="{y + 28:.0f}">{caption}</text>')
    return _svg(title, y + 44, shapes)


class Bar(NamedTuple):
    """What a workload of the benchmark is called here."""

    label: str
    workload: str


BARS = (
    Bar("4,096 tokens, float32", "fp32-4096-d64"),
    Bar("the same, causal", "fp32-4096-d64-causal"),
    Bar("4,096 tokens, bfloat16, causal", "bf16-4096-d64-causal"),
    Bar("ALiBi, causal, 4,096 tokens", "alibi-4096-causal"),
    Bar("forward and backward, causal", "train-2048-d64-causal"),
    Bar("one query, 32,768 keys", "decode-fp32"),
)


def speed_picture() -> str:
    """Bars of how many times as long torch takes, and the quickest of all other contenders."""
    text = (DOCS / "performance.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) \|.*\| ([^|]*) \|$", text, re.MULTILINE))
    shapes, y = [], 62.0
    scale, left = 44.0, 270.0
    for label, workload in BARS:
        parts = (part.rsplit(" ", 1) for part in rows[workload].split(", "))
        found = {name: float(ratio) for name, ratio in parts}
        other = min((r, n) for n, r in found.items() if n != "torch")
        shapes.append(f'<text x="16" y="{y + 12:.0f}">{label}</text>')
        for n, (ratio, name) in enumerate(((found["torch"], "torch"), other)):
            width, top = min(ratio, 9.5) * scale, y - 3 + 13 * n
            kind = "key" if n == 0 else "other"
            shapes.append(
                f'<rect class="{kind}" x="{left}" y="{top}" width="{width:.0f}" height="11"/>'
                f'<text class="small" x="{left + width + 5:.0f}" y="{top + 10}">'
                f"{name} {ratio:.2f}</text>"
            )
        y += 38
    one = left + scale
    shapes.append(f'<line class="one" x1="{one}" x2="{one}" y1="50" y2="{y - 12:.0f}"/>')
    shapes.append(f'<text class="small" x="{one - 14:.0f}" y="{y + 3:.0f}">qkv</text>')
    return _svg("How many times as long others take (two cores of an AMD Zen 4)", y + 14, shapes)


def _svg(title: str, height: float, shapes: list[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title>",
        STYLE,
        f'<rect class="back" width="{WIDTH}" height="{height:.0f}"/>',
        f'<text class="title" x="16" y="30">{escape(title)}</text>',
        *shapes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    (DOCS / "readme-head.svg").write_text(head_picture(), encoding="utf-8")
    (DOCS / "readme-speed.svg").write_text(speed_picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
