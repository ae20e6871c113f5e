"""The rows of whole models: what is compared, what is timed, what is shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.models import session, worker
from benchmarks.models.rows import ROWS, Row, choose, row_of
from benchmarks.models.session import Settings, largest_difference
from benchmarks.models.worker import Clock, Worker
from benchmarks.results import report
from benchmarks.results.record import Entry, Result, Run, Turn
from qkv.errors import ArgumentError

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def small(name: str, **options: Any) -> Row:
    """A row with its model made small."""
    row = row_of(name)
    settings = {**row.model.settings, **SMALL}
    return replace(row, model=replace(row.model, settings=settings), length=20, **options)


# --- what is compared ----------------------------------------------------------------------------


def test_logits_are_compared_until_tokens_differ() -> None:
    """Row 0 differs in its second token. Its third logits follow from that token."""
    expected = {"tokens": np.array([[1, 2, 3], [4, 5, 6]]), "logits": np.ones((3, 2, 4))}
    found = {"tokens": np.array([[1, 7, 3], [4, 5, 6]]), "logits": np.ones((3, 2, 4))}
    found["logits"][2, 0] = 9.0
    assert largest_difference(found, expected) == 0.0
    found["logits"][1, 0, 0] = 1.25
    assert largest_difference(found, expected) == 0.25
    found["logits"][2, 1, 0] = 3.0
    assert largest_difference(found, expected) == 2.0


def test_what_is_not_finite_is_infinitely_wrong() -> None:
    assert largest_difference({"out": np.array([np.nan])}, {"out": np.ones(1)}) == np.inf


# --- what is timed -------------------------------------------------------------------------------


def test_parts_of_decoding_begin_with_the_first_single_row() -> None:
    calls = [(9, 0, 1.0, 4.0), (1, 0, 6.0, 0.5), (1, 1, 7.0, 0.25), (1, 0, 8.0, 0.75)]
    clock = Clock(calls=calls, products=[(2.0, 9.0), (6.5, 0.125), (7.5, 0.125)])
    assert clock.parts(0.0, 10.0, steps=True) == {
        "total": 10.0,
        "decoding": 4.0,
        "interface": 0.4375,
        "first layer": 0.625,
        "products": 0.25,
        "outside": 2.5,
    }
    whole = clock.parts(0.0, 10.0, steps=False)
    assert (whole["products"], whole["outside"], "decoding" in whole) == (9.25, 4.5, False)


@pytest.mark.sampled(
    ("name", "options"),
    [
        ("generate-512-padded", {"batch": 2, "new": 3}),
        ("generate-512-static", {"new": 3}),
        ("generate-512-sinks", {"new": 2}),
        ("train-4x256", {"batch": 1}),
    ],
    one_in=2,
)
def test_both_implementations_agree_and_are_timed(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="not installed")
    row = small(name, **options)
    monkeypatch.setattr(worker, "row_of", lambda name: row)
    results = {}
    for implementation in ("qkv", row.model.other):
        seat, file = Worker(), tmp_path / f"{implementation}.npz"
        asked = {"row": name, "implementation": implementation, "threads": 1, "result": str(file)}
        assert seat.answer({"do": "prepare", "with": asked})["state"] == "ready"
        results[implementation] = dict(np.load(file))
        (run, *_) = seat.answer({"do": "turn", "with": {"seconds": 0.0}})["runs"]
        assert {"total", "interface", "products", "outside", "processor"} <= set(run)
        assert ("decoding" in run) == (row.does == "generate")
        assert 0 < run["interface"] < run["total"]
    assert largest_difference(results["qkv"], results[row.model.other]) < 1e-4


def test_the_clock_leaves_transformers_as_it_was() -> None:
    torch = pytest.importorskip("torch", reason="not installed")
    before = torch.nn.Linear.forward
    with pytest.raises(RuntimeError, match="stop"), worker.clocked():
        raise RuntimeError("stop")
    assert torch.nn.Linear.forward is before


# --- the session ---------------------------------------------------------------------------------


class Answers:
    """Processes that answer as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: dict[str, float]) -> None:
        self.asked: list[tuple[str, str]] = []
        self.out = out
        monkeypatch.setattr(session, "_ask", self.ask)

    def ask(self, name: str, processes: Any, settings: Any, what: str, **options: Any) -> Any:
        self.asked.append((name, what))
        if what == "turn":
            return {"runs": [{"total": 2.0 if name == "qkv" else 3.0}]}
        np.savez(options["result"], out=np.array([self.out[name]]))
        return {"state": "ready", "detail": ""}


NUMBERS = {"qkv": "1", "torch": "2", "transformers": "3"}


def test_turns_alternate_after_results_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = Answers(monkeypatch, {"qkv": 1.0, "sdpa": 1.0})
    result = session._row(ROWS[0], {}, Settings(1, rounds=2), tmp_path, NUMBERS)
    assert [name for name, what in answers.asked if what == "turn"] == ["qkv", "sdpa"] + [
        "sdpa",
        "qkv",
    ]
    assert {entry.contender for entry in result.entries} == {"qkv: total", "sdpa: total"}
    assert [len(entry.turns) for entry in result.entries] == [2, 2]


def test_a_wrong_result_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, {"qkv": 1.1, "sdpa": 1.0})
    result = session._row(ROWS[0], {}, Settings(1), tmp_path, NUMBERS)
    assert [entry.state for entry in result.entries] == ["wrong"]
    assert "turn" not in {what for _, what in answers.asked}


def test_names_choose_rows() -> None:
    assert [row.name for row in choose(["generate-512"])] == ["generate-512"]
    assert len(choose(["prefill"])) == 4
    assert choose([]) == ROWS
    assert len({row.name for row in ROWS}) == len(ROWS)
    with pytest.raises(ArgumentError, match="no model 'gpt'"):
        choose(["gpt"])


def test_the_table_says_how_many_times_as_long_the_other_took() -> None:
    def entry(name: str, *seconds: float) -> Entry:
        return Entry(name, "1", "timed", turns=[Turn(i, None, [s]) for i, s in enumerate(seconds)])

    of = {"qkv: total": 2.0, "eager: total": 3.0, "qkv: interface": 1e-4, "eager: interface": 5e-5}
    entries = [entry(name, seconds) for name, seconds in of.items()]
    result = Result("generate-512-sinks", "", session.KIND, 0, "seconds", None, entries)
    machine = {**dict.fromkeys(("processor", "isa", "system", "python", "qkv"), ""), "cores": 2}
    settings = {"kind": session.KIND, "threads": 1, "rounds": 1}
    run = Run({**machine, "packages": {}, "peaks": {}}, settings, [0.0], [result])
    whole, interface = (table.rows[0] for table in report.tables(run))
    assert whole[:3] == ("generate-512-sinks (eager)", "2000", "1.50")
    assert interface[:4] == ("generate-512-sinks (eager)", "100", "50", "0.50")
    assert "| generate-512-sinks (eager) |" in report.markdown(run)
