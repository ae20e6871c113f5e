"""What `qkv inspect --json` prints of arrays; docs/inspect-json.md has the fields."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qkv.cli.inputs.arrays import CommandInput
from qkv.inspection.summaries.head_statistics import Head, HeadStatistics, Pair
from qkv.variants.base import short_repr

__all__ = ["finite", "head_data", "json_of_heads", "pair_data"]

SCHEMA, VERSION = "qkv-inspect", 1


def json_of_heads(
    problem: CommandInput, statistics: HeadStatistics, heads_data: list[dict[str, Any]]
) -> str:
    """The whole document; `heads_data` are its heads."""
    rows = statistics.non_finite.rows
    for of_head, without in zip(heads_data, rows, strict=True):
        of_head["non_finite_rows"] = [problem.q_index + int(row) for row in np.flatnonzero(without)]
    given, head_dim = problem.given, problem.query.shape[2]
    data = {
        "schema": SCHEMA,
        "version": VERSION,
        "title": given.title,
        "source": given.source,
        "q_len": problem.q_len,
        "kv_len": problem.key.shape[1],
        "head_dim": head_dim,
        "batch": problem.batch,
        "batch_size": problem.batch_size,
        "causal": problem.shown.causal,
        "variants": [short_repr(variant) for variant in problem.variants],
        "q_offset": problem.q_offset - problem.q_index,
        "scale": head_dim**-0.5 if problem.scale is None else problem.scale,
        "tokens": given.tokens,
        "non_finite": statistics.reasons,
        "heads": heads_data,
    }
    return json.dumps(data, indent=2, allow_nan=False) + "\n"


def head_data(problem: CommandInput, head: Head) -> dict[str, Any]:
    """One head of the table."""
    return {
        "head": head.index,
        "entropy": finite(head.entropy),
        "mass": {name: finite(mass) for name, mass in head.mass.items()},
        "pairs": pair_data(problem, head.pairs),
        "pairs_beyond_first": pair_data(problem, head.pairs_beyond_first),
    }


def pair_data(problem: CommandInput, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Pairs of a query and a key, with their tokens."""
    return [
        {
            "q_index": pair.q_index,
            "q_token": problem.shown.q_token(pair.q_index),
            "kv_index": pair.kv_index,
            "kv_token": problem.shown.token_at(pair.kv_index),
            "weight": pair.weight,
        }
        for pair in pairs
    ]


def finite(value: Any) -> Any:
    """The value, or None for a number that JSON has not."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
