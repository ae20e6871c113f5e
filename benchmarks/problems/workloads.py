"""The workloads of the benchmark: a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from benchmarks.problems.moved import Shape
from benchmarks.problems.named import named
from benchmarks.problems.rules import (
    Rule,
    alibi_causal,
    causal,
    everything,
    key_lengths,
    segments,
    window,
)
from qkv.ledger import attention_operations
from qkv.testing import DTYPES, Case

__all__ = ["Workload", "choose", "workload_of", "workloads"]


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    Attributes
    ----------
    name : str
        As the command line knows it; the random inputs follow from it.
    shape : Shape
        Sizes of the problem.
    rule : Rule
        What stands between q.k and the softmax.
    dtype : str
        Of query, key and value; "int8" is for keys and values only, with a scale for each row.
    ceiling : str
        What bounds it: a key of `peaks.PRODUCTS`, or "read".
    contenders : tuple of str
        Who runs it. The first is the one that the others are compared with.
    direction : "forward" or "both"
        Whether the backward pass follows.
    measure : "time" or "memory"
        What is measured: seconds, or bytes beyond input and output.
    """

    name: str
    shape: Shape
    rule: Rule
    dtype: str
    ceiling: str
    contenders: tuple[str, ...]
    direction: Literal["forward", "both"] = "forward"
    measure: Literal["time", "memory"] = "time"

    @property
    def case(self) -> Case:
        """The same problem as the tests state theirs."""

        def variants(shape: Shape, rng: np.random.Generator) -> Sequence[Any]:
            return self.rule.variants

        return Case(self.name, self.shape, variants)

    @cached_property
    def pairs(self) -> int:
        """Pairs that are allowed; what is masked is not counted as work."""
        return self.rule.pairs(self.shape)

    @cached_property
    def operations(self) -> int:
        """The operations of matrix products over allowed pairs: two forward, and five backward."""
        forward = attention_operations(self.pairs, self.shape.head_dim, self.shape.v_head_dim)
        return forward if self.direction == "forward" else round(forward * 7 / 2)

    @property
    def bytes_read(self) -> int:
        """Keys and values, once, with their scales if they are quantised."""
        s = self.shape
        rows = math.prod(s.batch_shape) * s.num_kv_heads * s.kv_len
        if self.dtype == "int8":
            return rows * (s.head_dim + s.v_head_dim + 2 * 4)
        return rows * (s.head_dim + s.v_head_dim) * DTYPES[self.dtype].itemsize

    @property
    def work(self) -> int:
        """What is divided by the time: operations, or bytes where memory is the ceiling."""
        return self.bytes_read if self.ceiling == "read" else self.operations

    @property
    def summary(self) -> str:
        """The row in words."""
        s = self.shape
        heads = f"{s.num_heads} heads"
        if s.num_heads != s.num_kv_heads:
            heads += f" over {s.num_kv_heads}"
        batch = f"batch {s.batch_shape[0]}, " if s.batch_shape != (1,) else ""
        length = f"{s.q_len} x {s.kv_len}" if s.q_len != s.kv_len else f"{s.q_len}"
        passes = ", forward and backward" if self.direction == "both" else ""
        rule = "" if self.rule.name == "all" else f", {self.rule.name}"
        return f"{self.dtype}, {batch}{heads}, {length}, head_dim {s.head_dim}{rule}{passes}"


def _square(length: int, dim: int, *, heads: int = 8, kv_heads: int | None = None) -> Shape:
    return Shape((1,), heads, kv_heads or heads, length, length, dim, dim)


def _decode() -> Shape:
    return Shape((1,), 32, 8, 1, 32_768, 128, 128)


_OTHERS = ("torch", "onnxruntime", "openvino", "jax")
_OTHERS_CAUSAL = ("torch", "onnxruntime", "onnxruntime gqa", "openvino", "jax")


@lru_cache(maxsize=1)
def workloads() -> tuple[Workload, ...]:
    """Every workload.

    Examples
    --------
    >>> len({w.name for w in workloads()}) == len(workloads())
    True
    """
    return (*_prefill(), *_half(), *_grouped(), *_masked(), *_short(), *_backward(), *_looks(),
            *_narrow(), *_memory())  # fmt: skip


def _prefill() -> list[Workload]:
    made = []
    for length in (4096, 1024):
        for dim in (64, 128):
            name, shape = f"fp32-{length}-d{dim}", _square(length, dim)
            made += [
                Workload(name, shape, everything(), "float32", "float32", ("qkv", *_OTHERS)),
                Workload(
                    f"{name}-causal", shape, causal(), "float32", "float32",
                    ("qkv", *_OTHERS_CAUSAL),
                ),
            ]  # fmt: skip
    return made


def _half() -> list[Workload]:
    made = []
    for dim in (64, 128):
        who = ("qkv", "torch", "openvino", "jax")
        shape = _square(4096, dim)
        made += [
            Workload(f"bf16-4096-d{dim}", shape, everything(), "bfloat16", "bfloat16", who),
            Workload(f"bf16-4096-d{dim}-causal", shape, causal(), "bfloat16", "bfloat16", who),
        ]
    for dim in (64, 128):
        shape = _square(2048, dim)
        made += [
            Workload(
                f"fp16-2048-d{dim}", shape, everything(), "float16", "float32",
                ("qkv", "torch", "openvino"),
            ),
            Workload(
                f"fp64-2048-d{dim}", shape, everything(), "float64", "float64", ("qkv", "torch")
            ),
        ]  # fmt: skip
    return made


def _grouped() -> list[Workload]:
    prefill = ("qkv", "torch", "onnxruntime gqa", "openvino", "jax")
    decode = ("qkv", "torch", "torch packed", "onnxruntime gqa", "openvino", "jax")
    return [
        Workload(
            "gqa-2048-causal", _square(2048, 128, heads=32, kv_heads=8), causal(), "float32",
            "float32", prefill,
        ),
        Workload("decode-fp32", _decode(), everything(), "float32", "read", decode),
        Workload(
            "decode-bf16", _decode(), everything(), "bfloat16", "read",
            ("qkv", "torch", "torch packed", "openvino", "jax"),
        ),
        Workload(
            "decode-int8", _decode(), everything(), "int8", "read", ("qkv int8", "qkv bfloat16")
        ),
    ]  # fmt: skip


def _masked() -> list[Workload]:
    padded = Shape((4,), 8, 8, 2048, 2048, 64, 64)
    who = ("qkv", "torch", "torch flex")
    return [
        Workload(
            "window-256-8192", _square(8192, 64), window(256), "float32", "float32",
            (*who, "onnxruntime gqa", "jax"),
        ),
        Workload("alibi-4096-causal", _square(4096, 64), alibi_causal(8), "float32", "float32",
                 who),
        Workload(
            "key-lengths-2048", padded, key_lengths((2048, 1024, 640, 384)), "float32", "float32",
            (*who, "jax"),
        ),
        Workload(
            "segments-4096", _square(4096, 64), segments((1536, 1024, 640, 512, 256, 128)),
            "float32", "float32", who,
        ),
    ]  # fmt: skip


def _short() -> list[Workload]:
    who = ("qkv", "qkv torch", "qkv kernel", *_OTHERS)
    step = Shape((1,), 8, 8, 1, 100, 64, 64)
    return [
        *(
            Workload(f"short-{n}", _square(n, 64), everything(), "float32", "float32", who)
            for n in (1, 16, 64, 128)
        ),
        Workload("decode-100", step, everything(), "float32", "float32", who),
    ]


def _backward() -> list[Workload]:
    made = []
    for dim in (64, 128):
        for rule in (everything(), causal()):
            suffix = "-causal" if rule.name == "causal" else ""
            made.append(
                Workload(
                    f"train-2048-d{dim}{suffix}", _square(2048, dim), rule, "float32", "float32",
                    ("qkv", "torch", "jax"), direction="both",
                )
            )  # fmt: skip
    made.append(
        Workload(
            "train-2048-bf16-causal", _square(2048, 64), causal(), "bfloat16", "bfloat16",
            ("qkv", "torch", "jax"), direction="both",
        )
    )  # fmt: skip
    return made


def _looks() -> list[Workload]:
    shape = _square(4096, 64)
    return [
        Workload(f"{name}-4096", shape, everything(), "float32", "float32", ("qkv", *who))
        for name, who in (
            ("statistics", ("qkv kernel statistics", "qkv statistics")),
            ("top-8", ("qkv top 8",)),
        )
    ]


def _narrow() -> list[Workload]:
    """Lesser instruction sets than the machine has."""
    pairs = [
        Workload(
            f"pairs-4096-d{dim}", _square(4096, dim), everything(), "bfloat16", "bfloat16 pairs",
            ("qkv avx512-bf16", "qkv", "torch"),
        )
        for dim in (64, 128)
    ]  # fmt: skip
    return pairs + [
        Workload(
            f"avx2-4096-d{dim}", _square(4096, dim), everything(), "float32", "float32, 256 bits",
            ("qkv avx2", "qkv", "torch"),
        )
        for dim in (64, 128)
    ]  # fmt: skip


def _memory() -> list[Workload]:
    return [
        Workload(
            "memory-16k", _square(16_384, 64), everything(), "float32", "float32",
            ("qkv", "torch", "openvino"), measure="memory",
        ),
        Workload(
            "memory-131k", _square(131_072, 64, heads=1), causal(), "float32", "float32",
            ("qkv", "torch"), measure="memory",
        ),
    ]  # fmt: skip


def choose(names: Sequence[str], *, quick: bool = False) -> tuple[Workload, ...]:
    """The workloads of these names or beginnings of names; all, or a few, if there are none.

    Raises
    ------
    ArgumentError
        If nothing has such a name.
    """
    known = workloads()
    wanted = names or (_QUICK if quick else [])
    return named(known, wanted, "workload") if wanted else known


_QUICK = ("fp32-1024-d64", "fp32-1024-d64-causal", "short-64")


def workload_of(name: str) -> Workload:
    """The workload of exactly this name."""
    return next(workload for workload in workloads() if workload.name == name)
