"""What the lab answers about small examples: traces, tiles, counts, code, and the teaching data."""

from __future__ import annotations

import base64
import inspect
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np

import qkv
from qkv.errata import ERRATA
from qkv.exercises import EXERCISES
from qkv.exercises.answers import numbers_of
from qkv.inspection.heads.head_scores import MEANINGS, THRESHOLD
from qkv.inspection.traces.trace import Trace
from qkv.inspection.traces.trace_fields import TracedMechanism
from qkv.lab.parameters import MissingError, Parameters
from qkv.lab.small_examples.code_lines import class_lines, listings
from qkv.lab.small_examples.examples import LONGEST, Example
from qkv.lab.small_examples.walkthrough import walkthrough
from qkv.ledger import ledger, memory, score_entries, symbols
from qkv.mechanisms.comparison import compare
from qkv.mechanisms.lookup.scaled_dot_product import ScaledDotProduct
from qkv.mechanisms.registry import mechanism_class
from qkv.samples.language import language_model_bytes
from qkv.teaching.saturation import scaling_curve

__all__ = ["SmallMethods"]

MASKS = ("none", "causal", "padding", "window")

BLOCK_Q, BLOCK_KV = 128, 128
"""Tile sizes for which the effect of tiling is counted."""


class SmallMethods:
    """Methods over examples of at most `LONGEST` rows, and over data that comes with qkv."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = {example.name: example for example in examples}

    def example(self, given: Parameters) -> dict[str, Any]:
        """The examples, with their rows and tokens."""
        return {"examples": [example.to_dict() for example in self.examples.values()]}

    def trace(self, given: Parameters) -> dict[str, Any]:
        """The trace of an example, or of rows that were given, under a mask."""
        block = given.integer("block", 1, LONGEST) if "block" in given else None
        return self._trace(given, block).to_dict()

    def tiles(self, given: Parameters) -> dict[str, Any]:
        """The states of the streaming algorithm, row by row."""
        block = given.integer("block", 1, LONGEST, 2)
        rows = self._trace(given, block).to_dict()["heads"][0]["rows"]
        return {
            "block": block,
            "rows": [{name: row[name] for name in ("q_index", "tiles", "output")} for row in rows],
        }

    def count(self, given: Parameters) -> dict[str, Any]:
        """The calculation of an example step by step, or closed forms for n and d."""
        if "n" in given:
            return _closed_forms(given.integer("n", 1, 10**7), given.integer("d", 1, 1 << 16))
        example = self._example(given, "example", "three")
        trace = _trace_of(example, (), None)
        operations = asdict(trace.ledger)
        size = {"n": len(example.tokens), "d": example.query.shape[1]}
        return {"tokens": list(example.tokens), **size, "steps": walkthrough(trace), **operations}

    def scaling(self, given: Parameters) -> dict[str, Any]:
        """The curve of `qkv.scaling_curve`, and one query with five keys to look at."""
        return _scaling()

    def mechanisms(self, given: Parameters) -> dict[str, Any]:
        """All mechanisms on the shared example."""
        return _mechanisms()

    def code(self, given: Parameters) -> dict[str, Any]:
        """Listings with what each line makes; or the source of the class of a mechanism."""
        name = given.text("mechanism", 60)
        return class_lines(name) if name else listings()

    def language(self, given: Parameters) -> dict[str, Any]:
        """The file of the small language model, which the page computes itself, as base64."""
        file = base64.b64encode(language_model_bytes()).decode("ascii")
        return {"file": file, "meanings": MEANINGS, "threshold": THRESHOLD}

    def errata(self, given: Parameters) -> dict[str, Any]:
        """What the classical texts print wrongly."""
        return {"errata": [asdict(entry) for entry in ERRATA]}

    def exercises(self, given: Parameters) -> dict[str, Any]:
        """The exercises of the classical texts, with the numbers by which a page checks answers."""
        return {
            "exercises": [
                {**asdict(entry), "numbers": numbers.to_dict() if numbers else None}
                for entry in EXERCISES
                for numbers in (numbers_of(entry.name),)
            ]
        }

    def _example(self, given: Parameters, parameter: str, default: str) -> Example:
        name = given.text(parameter, 100) or default
        if name not in self.examples:
            raise MissingError(
                f"there is no example {name!r:.60}.",
                [("examples", ", ".join(self.examples))],
                "Name one of these.",
            )
        return self.examples[name]

    def _trace(self, given: Parameters, block_kv: int | None) -> Trace:
        example = _given_rows(given) if "query" in given else self._example(given, "name", "shared")
        if example.trace is not None:
            return example.trace
        variants = _mask(given, len(example.key))
        return _trace_of(example, variants, block_kv, given.number("scale"))


def _given_rows(given: Parameters) -> Example:
    """The rows of a request."""
    query, key, value = (given.rows(name, LONGEST) for name in ("query", "key", "value"))
    tokens = given.tokens("tokens", len(query)) or tuple(map(str, range(len(query))))
    return Example("given", "Given rows", tokens, query, key, value)


def _mask(given: Parameters, kv_len: int) -> tuple[Any, ...]:
    kind = given.choice("mask", MASKS, "none")
    if kind == "causal":
        return (qkv.Causal(),)
    if kind == "padding":
        length = given.integer("length", 0, kv_len, max(kv_len - 1, 0))
        return (qkv.KeyLengths(np.array(length)),)
    if kind == "window":
        return (qkv.SlidingWindow(given.integer("left", 0, LONGEST, 1), 0),)
    return ()


def _trace_of(
    example: Example, variants: tuple[Any, ...], block_kv: int | None, scale: float | None = None
) -> Trace:
    same = len(example.query) == len(example.key)
    cls = ScaledDotProduct
    return qkv.explain(
        example.query,
        example.key,
        example.value,
        *variants,
        scale=scale,
        tokens=example.tokens,
        kv_tokens=None if same else list(map(str, range(len(example.key)))),
        block_kv=block_kv,
        projections=example.projections,
        mechanism=None if variants else TracedMechanism(cls.name, cls.formula, cls.paper),
    )


def _closed_forms(n: int, d: int) -> dict[str, Any]:
    """Operations and memory of n tokens, and what tiling changes."""
    tokens, dim = symbols(n=n, d=d)
    operations = ledger(tokens, tokens, dim, dim)
    entries = score_entries(n, n)
    block_q, block_kv = min(BLOCK_Q, n), min(BLOCK_KV, n)
    # One tile of scores; maximum, sum and accumulator of its queries.
    scratch = block_q * block_kv + block_q * (2 + d)
    return {
        "n": n,
        "d": d,
        "counts": {name: int(count) for name, count in operations.counts.items()},
        "formulas": operations.formulas,
        "total": int(operations.total),
        "total_formula": operations.total.formula,
        "score_entries": entries,
        "score_bytes": {"float16": 2 * entries, "float32": 4 * entries},
        "score_memory": {"float16": memory(2 * entries), "float32": memory(4 * entries)},
        "tiled": {
            "block_q": block_q,
            "block_kv": block_kv,
            "entries": scratch,
            "bytes": 4 * scratch,
            "memory": memory(4 * scratch),
        },
    }


@lru_cache(maxsize=1)
def _scaling() -> dict[str, Any]:
    curve = scaling_curve()
    # The page takes the first d_k numbers of each row.
    longest = max(point.d_k for point in curve.points)
    query, *keys = np.random.default_rng(0).normal(size=(6, longest)).round(3).tolist()
    return {"curve": curve.to_dict(), "draw": {"query": query, "keys": keys}}


@lru_cache(maxsize=1)
def _mechanisms() -> dict[str, Any]:
    compared = compare().to_dict()
    families: dict[str, str] = {}
    for each in compared["mechanisms"]:
        mechanism = mechanism_class(each["mechanism"])
        package = import_module(mechanism.__module__.rpartition(".")[0])
        family = package.__name__.rpartition(".")[2].replace("_", " ")
        families[family] = (package.__doc__ or "").partition("\n")[0]
        each |= {"family": family, "about": _sentences(mechanism)}
    return {**compared, "families": families}


def _sentences(mechanism: type) -> list[str]:
    """What the docstring of a class says before its parameters, without formulas on lines alone."""
    text = (inspect.getdoc(mechanism) or "").partition("\n\nParameters\n")[0]
    paragraphs = text.split("\n\n")
    return [" ".join(part.split()) for part in paragraphs if not part.startswith(" ")]
