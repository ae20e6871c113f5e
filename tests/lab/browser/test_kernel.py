"""The float64 kernel of the page beside the traces of Python, on random problems."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv

pytestmark = pytest.mark.browser

SCRIPT = Path(__file__).parents[3] / "lab" / "test" / "trace.mjs"


def close(given: Any, wanted: Any) -> None:
    """Equal to 12 significant digits, and -inf (null) in the same places."""
    a, b = (np.array(x, dtype=float) for x in (given, wanted))
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def problem(seed: int) -> tuple[dict[str, Any], tuple[Any, ...]]:
    rng = np.random.default_rng(seed)
    n, d, d_v = (int(x) for x in rng.integers(1, 17, 3))
    n = 64 if seed == 0 else n
    query, key = rng.normal(size=(2, n, d)) * (30 if seed % 3 == 0 else 1)
    value = rng.normal(size=(n, d_v))
    left, right, keys = (
        int(rng.integers(0, n)),
        int(rng.integers(0, 3)),
        int(rng.integers(1, n + 1)),
    )
    mask = ("none", "causal", "padding", "window")[seed % 4]
    variants = {
        "none": (),
        "causal": (qkv.Causal(),),
        "padding": (qkv.KeyLengths(keys),),
        "window": (qkv.SlidingWindow(left, right),),
    }[mask]
    example = {
        "tokens": [str(i) for i in range(n)],
        "query": query.tolist(), "key": key.tolist(), "value": value.tolist(),
    }  # fmt: skip
    options = {"mask": mask, "left": left, "right": right, "keys": keys, "scaled": seed % 5 != 0}
    return {"example": example, "options": options, "block": int(rng.integers(1, 9))}, variants


def test_traces_are_those_of_python() -> None:
    problems = [problem(seed) for seed in range(24)]
    node = shutil.which("node")
    assert node is not None
    asked = json.dumps([given for given, _ in problems])
    answer = subprocess.run(
        [node, str(SCRIPT)], input=asked, capture_output=True, check=True, text=True
    )
    for (given, variants), found in zip(problems, json.loads(answer.stdout), strict=True):
        rows = (np.array(given["example"][name]) for name in ("query", "key", "value"))
        scale = None if given["options"]["scaled"] else 1.0
        wanted = json.loads(qkv.explain(*rows, *variants, scale=scale).to_json())
        wanted_rows = wanted["heads"][0]["rows"]
        for row, right, tiles in zip(
            found["trace"]["heads"][0]["rows"], wanted_rows, found["tiles"], strict=True
        ):
            for name in ("products", "raw", "scaled", "scores", "contributions", "output"):
                close(row[name], right[name])
            for name in ("row_max", "shifted", "exp", "row_sum", "weights", "entropy", "lse"):
                close(row["softmax"][name], right["softmax"][name])
            assert row["allowed"] == right["allowed"]
            close(tiles["output"], right["output"])
