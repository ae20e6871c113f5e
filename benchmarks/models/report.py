"""The tables of a run: whole models, the attention interface alone, and the products around it."""

from __future__ import annotations

from statistics import median

from benchmarks.results.record import Entry, Result, Run
from benchmarks.results.samples import medians, ratio
from benchmarks.results.tables import Table, three_digits

__all__ = ["tables"]

_WHOLE = (
    "Small transformers models with random weights, float32. x: how many times as long the other "
    'implementation takes, "sdpa", or "eager" where sdpa has no sinks. decoding: from the first '
    "generated token on; where tokens are generated, what follows is of decoding alone. products: "
    "the linear layers; outside: all but the attention interface; processor: what all threads used "
    "of it, over the whole run."
)
_INTERFACE = (
    "One call of the attention interface in the same runs, the mean over layers of the median of "
    "each. first: that of the layer that is called first. Training counts the interface forward "
    "only."
)
_WHOLE_COLUMNS = ("model", ">ms", ">x", ">decoding x", ">products x", ">outside x", ">processor x")
_INTERFACE_COLUMNS = ("model", ">us", ">other us", ">x", ">first us", ">other us", ">x")


def tables(run: Run) -> list[Table]:
    """Whole models, and the attention interface alone."""
    return [
        Table(_WHOLE, _WHOLE_COLUMNS, [_whole(result) for result in run.results]),
        Table(_INTERFACE, _INTERFACE_COLUMNS, [_interface(result) for result in run.results]),
    ]


def _whole(result: Result) -> tuple[str, ...]:
    of, other, name = _entries(result)
    parts = ("total", "decoding", "products", "outside", "processor")
    return name, _time(of, "qkv: total", 1e3), *(_ratio(of, other, part) for part in parts)


def _interface(result: Result) -> tuple[str, ...]:
    of, other, name = _entries(result)
    row = [name]
    for part in ("interface", "first layer"):
        row += [_time(of, f"{who}: {part}", 1e6) for who in ("qkv", other)]
        row.append(_ratio(of, other, part))
    return tuple(row)


def _entries(result: Result) -> tuple[dict[str, Entry], str, str]:
    """Entries by their names, the other implementation, and the row's name in tables."""
    of = {entry.contender: entry for entry in result.entries}
    other = next((name.partition(": ")[0] for name in of if not name.startswith("qkv")), "")
    name = f"{result.workload} ({other})" if other not in ("", "sdpa") else result.workload
    return of, other, name


def _time(of: dict[str, Entry], name: str, unit: float) -> str:
    rounds = medians(of[name]) if name in of else {}
    return three_digits(median(rounds.values()) * unit) if rounds else ""


def _ratio(of: dict[str, Entry], other: str, part: str) -> str:
    names = f"qkv: {part}", f"{other}: {part}"
    if not all(name in of for name in names):
        return ""
    found = ratio(of[names[0]], of[names[1]])
    return "" if found is None else f"{found:.2f}"
