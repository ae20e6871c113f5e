"""The latency table: what it says of given times, and that a wrong call is not timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from benchmarks.__main__ import main
from benchmarks.latency import front_ends, session, worker
from benchmarks.latency.rows import BASE, LAYERS, STEP_STARTS, STEPS, rows
from benchmarks.latency.session import Settings
from benchmarks.results import record, report, tables
from benchmarks.results.record import Entry, Result, Run, Turn
from qkv.errors import ArgumentError
from qkv.variants import ALL


def entry(name: str, *seconds: float) -> Entry:
    return Entry(name, "1", "timed", turns=[Turn(i, None, [s]) for i, s in enumerate(seconds)])


def run_of(*entries: Entry) -> Run:
    machine = dict.fromkeys(("processor", "isa", "system", "python", "qkv"), "")
    settings = {"kind": session.KIND, "threads": 1, "rounds": 3}
    result = Result("ALiBi", "ALiBi", session.KIND, 0, "seconds", None, list(entries))
    return Run({**machine, "packages": {}, "peaks": {}, "cores": 2}, settings, [0.0], [result])


def cells(run: Run, table: int) -> dict[str, str]:
    found = report.tables(run)[table]
    return dict(zip(found.columns, found.rows[0], strict=True))


def test_every_variant_has_a_row_and_the_base_is_first() -> None:
    names = [row.name for row in rows()]
    assert names[0] == BASE.name
    assert {variant.__name__ for variant in ALL} <= set(names)


def test_a_call_is_held_against_the_causal_call_and_its_kernel() -> None:
    """Kernels of 20 and 10 us by hand: (130 - 10) / 60 = 2."""
    made = run_of(
        entry("NumPy: base", 60e-6, 60e-6, 90e-6),
        entry("NumPy: base many", 140e-6, 140e-6, 170e-6),
        entry("NumPy: call", 130e-6, 130e-6, 190e-6),
        entry("NumPy: call many", 290e-6, 290e-6, 350e-6),
    )
    assert [cells(made, table)[">NumPy"] for table in (0, 1)] == ["130", "2.00"]
    assert cells(made, 2)[">kernel"] == "20"


def test_a_kernel_counts_up_to_two_causal_kernels() -> None:
    """A kernel of 900 us beside one of 10 us is work of Python: (1000 - 20) / 70 = 14."""
    made = run_of(
        entry("NumPy: base", 70e-6),
        entry("NumPy: base many", 150e-6),
        entry("NumPy: call", 1000e-6),
        entry("NumPy: call many", 8200e-6),
    )
    assert cells(made, 1)[">NumPy"] == "14.00"


def test_steps_are_held_against_a_length_seen_before() -> None:
    kinds = {"new first": 900e-6, "new later": 100e-6, "seen first": 300e-6, "seen later": 50e-6}
    steps = [entry(f"torch: {session.STEP}{kind}", seconds) for kind, seconds in kinds.items()]
    made = run_of(entry("torch: base", 1e-6), entry("torch: call", 1e-6), *steps)
    tables = len(report.tables(made))
    shown = [cells(made, table)[">torch"] for table in range(tables - 4, tables)]
    assert shown == ["50", "18.00", "2.00", "6.00"]


def test_the_tables_fit_into_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row and front end, with numbers of five digits: no cell is cut, no row is folded."""
    kinds = ["base", "call", "inspect", "gradient"]
    kinds += [f"{kind} many" for kind in kinds]
    steps = ("new first", "new later", "seen first", "seen later")
    kinds += [f"{session.STEP}{kind}" for kind in steps]
    made = run_of()
    made.results[:] = [Result(r.name, r.name, session.KIND, 0, "seconds", None) for r in rows()]
    for result in made.results:
        for front in front_ends.FRONT_ENDS:
            for kind in kinds:
                seconds = 0.098765 if kind.endswith("many") else 0.012345
                result.entries.append(entry(f"{front.name}: {kind}", seconds))
    file = str(tmp_path / "run.json")
    record.save(made, file)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--load", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    tables = len(report.tables(made))
    for row in rows():
        assert sum(line.startswith(f"{row.name}  ") for line in lines) == tables


def test_names_choose_rows_by_their_beginning() -> None:
    assert [row.name for row in session.choose(["Causal | "])] == ["Causal | Prefix"]
    assert session.choose([]) == rows()
    with pytest.raises(ArgumentError, match="no variant 'Alibi'"):
        session.choose(["Alibi"])


@pytest.mark.parametrize("front", ["NumPy", "torch transposed", "Hugging Face"])
def test_one_row_is_measured_in_every_kind(front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="not installed")
    monkeypatch.setattr(worker, "STEP_STARTS", STEP_STARTS[:1])
    answer = worker.answer({"front": front, "row": "Causal, window", "rounds": 2, "seconds": 0.0})
    assert answer["state"] == "ready", answer
    assert {"base", "call"} <= set(answer["calls"])
    assert set(answer["steps"]) == {"new first", "new later", "seen first", "seen later"}
    assert all(len(times) == 2 and min(times) > 0 for times in answer["calls"].values())


def test_new_lengths_are_new_and_come_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def noted(query: Any, key: Any, value: Any, *variants: Any, **options: Any) -> Any:
        if options.get("backend") is None:
            seen.append(key.shape[2])
        return qkv_attention(query, key, value, *variants, **options)

    qkv_attention = qkv.attention
    monkeypatch.setattr(qkv, "attention", noted)
    worker._steps(front_ends.front_end("NumPy"), BASE)
    _, counts = np.unique(seen, return_counts=True)
    assert set(counts[2:]) == {2 * LAYERS}
    assert len(counts) == 2 + len(STEP_STARTS) * STEPS


def test_a_wrong_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = qkv.attention

    def forgets(query: Any, key: Any, value: Any, *variants: Any, **options: Any) -> Any:
        return right(query, key, value, *(variants if "backend" in options else ()), **options)

    monkeypatch.setattr(qkv, "attention", forgets)
    answer = worker.answer({"front": "NumPy", "row": BASE.name, "rounds": 1, "seconds": 0.0})
    assert answer["state"] == "failed"
    assert "out is off by" in answer["detail"]


def test_what_a_front_end_cannot_say_is_refused() -> None:
    pytest.importorskip("transformers", reason="not installed")
    answer = worker.answer(
        {"front": "Hugging Face", "row": "Segments", "rounds": 1, "seconds": 0.0}
    )
    assert answer["state"] == "refused"


def test_a_front_end_that_is_not_installed_is_absent() -> None:
    one = front_ends.FrontEnd("x", "no-such-package", np.asarray, front_ends._attention, np.asarray)
    results = [Result("Causal", "Causal", session.KIND, 0, "seconds", None)]
    session._front_end(one, results, Settings(1))
    assert results[0].entries == [Entry("x", None, "absent", "no-such-package is not installed")]


def test_a_bar_in_a_name_does_not_end_a_cell() -> None:
    rows_of_text = list(tables.markdown(tables.Table("", ("who",), [("Causal | Prefix",)])))
    assert rows_of_text[-1] == r"| Causal \| Prefix |"
