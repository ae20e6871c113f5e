"""A run as JSON, as tables, as a page and as a picture."""

from __future__ import annotations

import builtins
import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.results import compare, record, report
from benchmarks.results.picture import svg
from benchmarks.results.record import Entry, Result, Run, Turn
from benchmarks.results.tables import three_digits
from qkv.errors import FileError

MACHINE = {
    "processor": "A <fast> one",
    "cores": 2,
    "isa": "avx512",
    "caches": {"L1": "48K"},
    "memory_bytes": 2**34,
    "system": "Linux",
    "python": "3.11",
    "qkv": "1.0",
    "packages": {"torch": "2.13"},
    "peaks": {"FMA": 1e11},
}


def timed(name: str, seconds: float, ceiling: float | None = 1e11) -> Entry:
    turns = [Turn(i, ceiling, [seconds, seconds]) for i in range(3)]
    return Entry(name, "1", "timed", "", "out", 1e-7, 4e-7, turns)


def run(qkv: float = 0.001, load: float = 0.0) -> Run:
    prefill = Result("fp32-1024", "float32, causal", "time", 80_000_000, "operations", "FMA")
    prefill.entries = [
        timed("qkv", qkv),
        timed("torch", 0.002),
        Entry("openvino", "1", "wrong", "out is off by 3.0e-01; the bound is 5.8e-07", "out", 0.3),
        Entry("jax", None, "absent", "jax is not installed"),
    ]
    memory = Result("memory-16k", "float32", "memory", 0, "bytes", None)
    memory.entries = [
        Entry("qkv", "1", "timed", extra_bytes=2**20),
        Entry("torch", "1", "timed", extra_bytes=3 * 2**20),
        Entry("jax", None, "absent", "jax is not installed"),
    ]
    settings = {"threads": 2, "rounds": 3, "seconds": 0.1, "least": 3}
    return Run(MACHINE, settings, [load, load], [prefill, memory])


# --- JSON ----------------------------------------------------------------------------------------


def test_the_form_of_the_json_does_not_change_unnoticed() -> None:
    """Whoever changes this raises SCHEMA."""
    document = json.loads(record.to_json(run()))
    assert document["schema"] == record.SCHEMA == 2
    assert set(document) == {"machine", "settings", "load", "results", "schema"}
    result = document["results"][0]
    assert set(result) == {
        "workload", "summary", "measure", "work", "unit", "ceiling", "entries",
    }  # fmt: skip
    assert set(result["entries"][0]) == {
        "contender", "version", "state", "detail", "output", "error", "bound", "turns",
        "extra_bytes",
    }  # fmt: skip
    assert result["entries"][0]["turns"][0] == {
        "round": 0, "ceiling": 1e11, "seconds": [0.001, 0.001], "waits": 0,
    }  # fmt: skip


def test_a_saved_run_comes_back_as_it_was(tmp_path: Path) -> None:
    file = str(tmp_path / "run.json")
    record.save(run(), file)
    assert record.load(file) == run()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "results": []}', "\x00", "null"]
)
def test_what_is_no_saved_run_is_said_to_be_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(FileError, match="saved run"):
        record.load(str(file))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        record.load(str(tmp_path / "none.json"))


# --- tables --------------------------------------------------------------------------------------


def test_a_row_has_rate_share_time_and_ratios() -> None:
    prefill, memory = report.rows(run())
    assert prefill == ("fp32-1024", "80 GFLOP/s", "80%", "1", "torch 2.00, openvino wrong")
    assert memory == ("memory-16k", "1.0 MiB more", "", "", "torch 3.00")


def test_without_the_first_there_are_times_instead_of_ratios() -> None:
    refused = run()
    refused.results[0].entries[0] = Entry("qkv", "1", "refused", "not yet")
    assert report.rows(refused)[0] == (
        "fp32-1024", "refused", "", "", "torch 2 ms, openvino wrong",
    )  # fmt: skip


def test_details_show_everybody() -> None:
    cells = report.details(run().results[0])
    assert [row[0] for row in cells] == ["qkv", "torch", "openvino", "jax"]
    assert cells[1] == ("torch", "2", "40 GFLOP/s", "40%", "2.00", "0%", "0.25")
    assert cells[2][2] == "wrong"
    assert all(len(row) == len(report.DETAIL_COLUMNS) for row in cells)


def test_bytes_are_not_called_operations() -> None:
    decode = Result("decode", "", "time", 10**8, "bytes", "read", [timed("qkv", 0.004)])
    assert report.rows(Run(MACHINE, {"threads": 2, "rounds": 3}, [0.0], [decode]))[0][1] == (
        "25 GB/s"
    )


def test_a_reason_is_given_once_for_all_workloads() -> None:
    assert report.notes(run()) == [
        "openvino wrong: out is off by 3.0e-01; the bound is 5.8e-07 (fp32-1024)",
        "jax absent: jax is not installed (fp32-1024, memory-16k)",
    ]


def test_a_machine_is_quiet_or_not() -> None:
    assert report.headline(run())[-1].startswith("A quiet machine")
    assert report.headline(run(load=1.5))[-1].startswith("Not a quiet machine: load 1.50")
    unsteady = run()
    unsteady.results[0].entries[0].turns[1] = Turn(1, 0.8e11, [0.001])
    assert report.headline(unsteady)[-1].startswith("Not a quiet machine")
    assert report.headline(unsteady)[-1].endswith("at most 20%.")
    unsteady.results[0].entries[0].turns[1] = Turn(1, 1e11, [0.001], 2)
    assert report.headline(unsteady)[-1].startswith("A quiet machine")
    assert report.headline(unsteady)[-1].endswith("1 of 6 turns waited for the peak.")


def test_memory_may_be_busy_on_a_quiet_machine() -> None:
    entry = timed("qkv", 0.004)
    entry.turns[1] = Turn(1, 0.5 * entry.turns[0].ceiling, [0.004])
    decode = Result("decode", "", "time", 10**8, "bytes", "read", [entry])
    busy = run()
    busy.results.append(decode)
    assert report.headline(busy)[-1].startswith("A quiet machine but for its memory: load")
    assert report.headline(busy)[-1].endswith("reading memory moved by 50%.")
    busy.results[0].entries[0].turns[1] = Turn(1, 0.8e11, [0.001])
    assert report.headline(busy)[-1].startswith("Not a quiet machine: load")


def test_a_page_is_changed_between_its_marks_only() -> None:
    text = "# Speed\n\n<!-- benchmarks -->\nold\n<!-- end of benchmarks -->\n\nAfter.\n"
    page = report.page(text, run())
    assert page.startswith("# Speed\n\n<!-- benchmarks -->\n")
    assert page.endswith("<!-- end of benchmarks -->\n\nAfter.\n")
    assert "old" not in page
    assert "| fp32-1024 | 80 GFLOP/s | 80% | 1 | torch 2.00, openvino wrong |" in page
    assert report.page(page, run()) == page


def test_the_picture_is_xml_with_a_bar_for_each_time() -> None:
    tree = ElementTree.fromstring(svg(run()))
    bars = [e for e in tree.iter() if e.get("class") in ("lead", "other")]
    assert [bar.get("width") for bar in bars] == ["400.0", "200.0"]
    texts = [e.text for e in tree.iter() if e.tag.endswith("text")]
    assert "80 %, 1 ms" in texts
    assert "40 %, 2 ms, 2.00 times" in texts
    assert any(text and "A <fast> one" in text for text in texts)


# --- two runs ------------------------------------------------------------------------------------


def test_two_runs_are_compared_by_their_share_of_the_peak() -> None:
    """The later one ran on a machine of half the speed, and took as long."""
    before, after = run(), run()
    for entry in after.results[0].entries:
        entry.turns = [Turn(t.round, 0.5e11, t.seconds) for t in entry.turns]
    first, second = compare.rows(before, after)
    assert first == ("fp32-1024", "1", "1", "80%", "160%", "2.00", "0%")
    assert second[0] == "fp32-1024 (torch)"


def test_what_only_one_run_has_is_left_out() -> None:
    before, after = run(), run()
    before.results = before.results[1:]
    assert compare.rows(before, after) == []


def test_an_interruption_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when a file was opened and not yet written."""
    path = tmp_path / "run.json"
    record.save(run(), str(path))

    class Interrupted:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Interrupted:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, _: object) -> None:
            raise KeyboardInterrupt

    opened = open

    def interrupted(file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        made = opened(file, mode, *more, **named)
        return made if mode == "r" else Interrupted(made)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", interrupted)
        patched.setattr(io, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            record.save(run(0.5), str(path))
    assert record.load(str(path)) == run()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.00751, "0.00751"), (12.34, "12.3"), (999.4, "999"), (999.6, "1000"), (1234.5, "1234")],
)
def test_times_are_written_without_exponents(number: float, text: str) -> None:
    assert three_digits(number) == text
