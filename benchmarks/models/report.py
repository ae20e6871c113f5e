"""The table of a run: whole models, the attention interface alone, and the products around it."""

from __future__ import annotations

from statistics import median

from benchmarks.record import Entry, Result, Run
from benchmarks.samples import medians, ratio
from benchmarks.tables import Table

__all__ = ["tables"]

_TITLE = (
    "Small transformers models with random weights, float32. x: how many times as long the other "
    'implementation takes, "sdpa", or "eager" where sdpa has no sinks. decoding: from the first '
    "generated token on; where tokens are generated, all that follows is of decoding alone. layer: "
    "one call of the attention interface in us; first: that of the first layer; products: the "
    "linear layers; outside: all but the interface; processor: what all threads used of it, over "
    "the whole run. Training counts the interface forward only."
)
_COLUMNS = ("model", ">ms", ">x", ">decoding x", ">layer us", ">other us", ">x", ">first us",
            ">other us", ">x", ">products x", ">outside x", ">processor x")  # fmt: skip


def tables(run: Run) -> list[Table]:
    """One table."""
    return [Table(_TITLE, _COLUMNS, [_row(result) for result in run.results])]


def _row(result: Result) -> tuple[str, ...]:
    of = {entry.contender: entry for entry in result.entries}
    other = next((name.partition(": ")[0] for name in of if not name.startswith("qkv")), "")
    name = f"{result.workload} ({other})" if other not in ("", "sdpa") else result.workload
    row = [name, _time(of, "qkv: total", 1e3), _ratio(of, other, "total")]
    row.append(_ratio(of, other, "decoding"))
    for part in ("interface", "first layer"):
        row += [_time(of, f"{who}: {part}", 1e6) for who in ("qkv", other)]
        row.append(_ratio(of, other, part))
    return (*row, *(_ratio(of, other, part) for part in ("products", "outside", "processor")))


def _time(of: dict[str, Entry], name: str, unit: float) -> str:
    rounds = medians(of[name]) if name in of else {}
    return f"{median(rounds.values()) * unit:.3g}" if rounds else ""


def _ratio(of: dict[str, Entry], other: str, part: str) -> str:
    names = f"qkv: {part}", f"{other}: {part}"
    if not all(name in of for name in names):
        return ""
    found = ratio(of[names[0]], of[names[1]])
    return "" if found is None else f"{found:.2f}"
