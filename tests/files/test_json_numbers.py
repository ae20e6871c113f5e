"""Numbers that JSON has not: the convention of docs/trace.md, in all that follows it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import qkv
from qkv.files.json_numbers import json_data, numbers_of_json
from qkv.lab.session import Session
from qkv.lab.sources.source import source_of
from qkv.mechanisms.base.explanations.explanation import Explanation, Line, Step

NUMBERS = [-inf, nan, inf, 0.1, -0.0]
WRITTEN = [None, "nan", "inf", 0.1, -0.0]


@dataclass
class Both:
    number: float
    rows: Any


@pytest.mark.parametrize(
    "value",
    [
        NUMBERS, tuple(NUMBERS), np.array(NUMBERS), [np.float64(x) for x in NUMBERS],
        [np.array(x) for x in NUMBERS],
    ],
)  # fmt: skip
def test_each_is_written_in_one_way_and_read_back(value: Any) -> None:
    assert json_data(value) == WRITTEN
    again = numbers_of_json(json.loads(json.dumps(json_data(value), allow_nan=False)))
    np.testing.assert_array_equal(again, NUMBERS)
    assert json_data({"a": Both(nan, np.array([[inf]]))}) == {
        "a": {"number": "nan", "rows": [["inf"]]}
    }


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_every_type_of_number_is_written(dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    assert json_data(np.array([[1.5, -inf, nan, inf]], kind)) == [[1.5, None, "nan", "inf"]]


def test_what_is_no_float_stays() -> None:
    value = {"a": [True, 3, "nan", None], "b": np.array([1, 2]), "c": np.bool_(True)}
    assert json_data(value) == {"a": [True, 3, "nan", None], "b": [1, 2], "c": True}
    assert type(json_data(np.bool_(True))) is bool


def test_traces_explanations_and_the_lab_write_the_same() -> None:
    x = np.array([[1.0, 2.0], [inf, 1.0]])
    row = qkv.explain(np.array([[1.0, nan]]), x, x).to_dict()["heads"][0]["rows"][0]
    assert (row["query"], row["raw"]) == ([1.0, "nan"], ["nan", "nan"])
    step = Step("", "", (Line("a", NUMBERS), Line("b", -inf)))
    lines = Explanation("", "", "", "", (step,)).to_dict()["steps"][0]["lines"]
    assert [line["value"] for line in lines] == [WRITTEN, None]
    session = Session(source_of(qkv.inspect(x[:, :1], x[::-1, :1], x, qkv.Causal())))
    asked = {"layer": 0, "head": 0, "query": 0, "key": 1}
    said = session.answer("weight", asked).result
    assert (said["score"], said["key_row"], said["raw"]) == (None, [1.0], 1.0)
    said = session.answer("weight", {**asked, "key": 0}).result
    assert (said["key_row"], said["raw"], said["lse"]) == (["inf"], "inf", "nan")
