"""A run as a picture: one bar for each contender, as long as its share of the machine's peak."""

from __future__ import annotations

from html import escape
from textwrap import wrap

from benchmarks.results.record import Entry, Result, Run
from benchmarks.results.report import headline
from benchmarks.results.samples import Summary, ratio, summary
from benchmarks.results.tables import three_digits

__all__ = ["svg"]

_WIDTH, _LEFT, _RIGHT, _SCALE = 980, 250, 230, 5.0
"""Pixels: of the picture, left and right of the longest bar, and of one per cent of the peak."""
_LINE, _GAP, _TOP = 18, 22, 32
_SMALL, _SMALL_LINE = 160, 14
"""Letters of a line of the header that fit, and its height."""

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #222 }
.title { font-weight: 600 } .small { font-size: 10px; fill: #666 }
rect { fill: #b8bec6 } .lead { fill: #1b6ca8 } line { stroke: #999; stroke-dasharray: 2 3 }
.back { fill: #fff }
@media (prefers-color-scheme: dark) {
  text { fill: #eee } .small { fill: #aaa } rect { fill: #5a626c } .lead { fill: #5bb0ec }
  .back { fill: #16181b }
}
"""


def svg(run: Run) -> str:
    """The picture, in light and dark; workloads without a peak are left out."""
    parts: list[str] = []
    lines = [line for label in headline(run)[::3] for line in wrap(label, _SMALL)]
    y = top = _TOP + _SMALL_LINE * len(lines)
    for result in run.results:
        timed = [(e, s) for e in result.entries if (s := summary(result, e)) and s.share]
        if timed:
            parts += _group(result, timed, y)
            y += _GAP + _LINE * len(timed) + _GAP // 2
    marks = "".join(_mark(percent, top, y) for percent in (25, 50, 75, 100))
    title = [
        f'<text class="small" x="10" y="{18 + _SMALL_LINE * i}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 10}" role="img">',
            f"<title>{escape('Share of the peak of the machine')}</title><style>{_STYLE}</style>",
            f'<rect class="back" width="{_WIDTH}" height="{y + 10}"/>',
            *title,
            marks,
            *parts,
            "</svg>\n",
        ]
    )


def _group(result: Result, timed: list[tuple[Entry, Summary]], y: int) -> list[str]:
    lead = result.entries[0]
    name = f"{result.workload} · {result.summary} · {result.ceiling}"
    lines = [f'<text class="title" x="10" y="{y + 14}">{escape(name)}</text>']
    for i, (entry, found) in enumerate(timed):
        times = ratio(lead, entry)
        top = y + _GAP + _LINE * i
        share = 100 * (found.share or 0.0)
        long = min(share, (_WIDTH - _LEFT - _RIGHT) / _SCALE) * _SCALE
        label = f"{share:.0f} %, {three_digits(found.seconds * 1e3)} ms"
        if entry is not lead and times is not None:
            label += f", {times:.2f} times"
        kind = "lead" if entry.contender.startswith("qkv") else "other"
        size = f'width="{long:.1f}" height="{_LINE - 5}"'
        lines += [
            _text(_LEFT - 8, top + 12, entry.contender, anchor="end"),
            f'<rect class="{kind}" x="{_LEFT}" y="{top + 2}" {size} rx="2"/>',
            _text(_LEFT + long + 6, top + 12, label),
        ]
    return lines


def _text(x: float, y: int, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _mark(percent: int, top: int, bottom: int) -> str:
    x = _LEFT + percent * _SCALE
    return (
        f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}"/>'
        f'<text class="small" x="{x}" y="{top - 4}" text-anchor="middle">{percent} %</text>'
    )
