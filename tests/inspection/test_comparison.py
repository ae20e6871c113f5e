"""Two records of models side by side."""

import sys

import numpy as np
import pytest

import qkv
import qkv.samples
from qkv.inspection.heads.score_rows import SCORES

REPEATS, PLAIN = "the cat. the cat. the cat.", "a quick dog jumps over it."


@pytest.fixture(scope="module")
def records():
    model = qkv.samples.tiny_model()
    return model.inspect(REPEATS), model.inspect(PLAIN)


def mean(record, score, layer, head):
    """The mean of a score over the queries to which it applies, from its rows."""
    scores = record[layer].scores
    rows = np.asarray(scores.rows[score][:, head], float)
    queries = np.broadcast_to(scores.counted[score], rows.shape)
    return rows[queries].mean() if queries.any() else np.nan


def test_differences_are_those_of_the_means(records) -> None:
    comparison = records[0].compare(records[1])
    rows = comparison.rows()
    assert len(rows) == 8
    for row in rows:
        for score in ("entropy", "previous", "sink", "distance"):
            expected = mean(records[1], score, row["layer"], row["head"])
            expected -= mean(records[0], score, row["layer"], row["head"])
            assert row[score] == pytest.approx(expected, abs=1e-5)


def test_a_score_that_applies_to_one_record_alone(records) -> None:
    """No letter repeats in the second text, so that there is nothing to induce."""
    comparison = records[0].compare(qkv.samples.tiny_model().inspect("abcdefgh"))
    assert all(np.isnan(row["induction"]) for row in comparison.rows())
    assert comparison.largest("induction") == []
    assert "induction" not in {line.split()[0] for line in str(comparison).splitlines() if line}


def test_a_record_beside_itself_has_no_differences(records) -> None:
    rows = records[0].compare(records[0]).rows()
    assert all(row[score] == 0 for row in rows for score in SCORES if np.isfinite(row[score]))
    assert all(row["first_kind"] == row["second_kind"] for row in rows)


def test_the_largest_difference_is_first(records) -> None:
    comparison = records[0].compare(records[1])
    sizes = [abs(row["difference"]) for row in comparison.largest("entropy")]
    assert sizes == sorted((abs(row["entropy"]) for row in comparison.rows()), reverse=True)
    assert len(comparison.largest("entropy", 3)) == 3
    first = comparison.largest("entropy", 1)[0]
    assert first["second"] - first["first"] == first["difference"]
    with pytest.raises(qkv.ArgumentError, match="no score 'entropi'"):
        comparison.largest("entropi")


def test_the_text_has_both_texts_and_the_largest_difference(records) -> None:
    comparison = records[0].compare(records[1])
    written = str(comparison)
    assert REPEATS in written
    assert PLAIN in written
    best = comparison.largest("sink", 1)[0]
    line = next(line for line in written.splitlines() if line.split()[:1] == ["sink"])
    assert line.split()[1:3] == [str(best["layer"]), str(best["head"])]
    assert line.endswith(f"{best['difference']:.3f}")


def test_the_text_leaves_out_scores_that_do_not_differ(records) -> None:
    written = str(records[0].compare(records[1]))
    assert "learned_sink" not in written  # The model has no sinks: 0 in every head of both.
    differences = [line.split()[-1] for line in written.partition("most:\n")[2].splitlines()[1:]]
    assert len(differences) >= 5
    assert "0.000" not in differences
    assert "-0.000" not in differences
    same = str(records[0].compare(records[0]))
    assert "Heads of another kind in the second: 0 of 8." in same
    assert same.endswith("No mean score differs by 0.0005 or more.")


def test_records_of_other_shapes_are_refused(records) -> None:
    other = qkv.ModelRecord("one layer")
    other.add(np.eye(4)[None], np.eye(4)[None], name="layer 0")
    with pytest.raises(qkv.ShapeError, match="2 layers, 8 heads and of 1 layer, 1 head cannot"):
        records[0].compare(other)
    with pytest.raises(qkv.ShapeError, match="0 layers"):
        qkv.ModelRecord("none").compare(qkv.ModelRecord("none"))
    with pytest.raises(qkv.ArgumentError, match="not a ModelRecord"):
        records[0].compare("the dog.")


def test_a_picture_of_differences(records, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    comparison = records[0].compare(records[1])
    axes = comparison.plot(tmp_path / "differences.svg", "sink")
    drawn = axes.images[0]
    assert drawn.get_array()[1, 2] == comparison.rows()[6]["sink"]
    low, high = drawn.get_clim()
    assert low == -high
    assert (tmp_path / "differences.svg").read_text().count("<svg") == 1
    with pytest.raises(qkv.ArgumentError, match="no score 'none'"):
        comparison.plot(score="none")


def test_a_table_of_pandas(records, monkeypatch) -> None:
    comparison = records[0].compare(records[1])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(qkv.UnsupportedError, match="pandas, which is not installed"):
        comparison.to_pandas()
