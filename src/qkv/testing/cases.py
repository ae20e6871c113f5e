"""The cases that every backend is held to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.problem.building.builder import Shape
from qkv.testing.case import DTYPES, Case, Memory, Variants
from qkv.variants import (
    ALL,
    ALiBi,
    Bias,
    BlockSparse,
    Causal,
    Dropout,
    GlobalTokens,
    KeyLengths,
    Mask,
    Prefix,
    RelativeBias,
    RoPE,
    ScoreMod,
    Segments,
    Sinks,
    SlidingWindow,
    Softcap,
    Strided,
)

Array = NDArray[Any]

__all__ = ["cases", "cases_of"]

SMALL = Shape((2,), 4, 2, 9, 9, 8, 5)
UNEQUAL = Shape((2,), 4, 2, 6, 13, 8, 8)
TILED = Shape((), 1, 1, 130, 257, 16, 8)


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """Every case.

    Examples
    --------
    >>> len({case.name for case in cases()}) == len(cases())
    True
    """
    return (*cases_of(*ALL), *_of_shapes(), *_of_memory(), *_of_numbers(), *_of_combinations())


def cases_of(*variants: Any) -> list[Case]:
    """Each example of variants: square, with fewer queries than keys, and over many tiles.

    Parameters
    ----------
    *variants : type
        Classes with `naive` and `examples`; see docs/add-a-variant.md.

    Examples
    --------
    >>> import qkv
    >>> [case.name for case in cases_of(qkv.Causal)][:1]
    ['Causal 0 square']
    """
    made = []
    for where, shape, offset, dtypes in (
        ("square", SMALL, None, tuple(DTYPES)),
        ("end", UNEQUAL, "end", ("float32",)),
        ("tiled", TILED, "end", ("float32",)),
    ):
        for variant in variants:
            for i in range(len(variant.examples(shape, np.random.default_rng(0)))):

                def example(
                    s: Shape, rng: np.random.Generator, variant: Any = variant, i: int = i
                ) -> Sequence[Any]:
                    return (variant.examples(s, rng)[i],)

                name = f"{variant.__name__} {i} {where}"
                made.append(Case(name, shape, example, q_offset=offset, dtypes=dtypes))
    return made


def _causal(shape: Shape, rng: np.random.Generator) -> Sequence[Any]:
    return (Causal(),)


def _of_shapes() -> list[Case]:
    made = [
        Case(f"head_dim {dim}", Shape((), 2, 2, 17, 17, dim, dim), _causal)
        for dim in (1, 3, 64, 80, 128, 257)
    ]
    sizes = {
        "v_head_dim 1": Shape((), 2, 1, 11, 7, 8, 1),
        "v_head_dim 0": Shape((), 2, 1, 11, 7, 8, 0),
        "v_head_dim above head_dim": Shape((), 2, 1, 11, 7, 3, 130),
        "no queries": Shape((2,), 2, 1, 0, 5, 4, 4),
        "no keys": Shape((2,), 2, 1, 5, 0, 4, 4),
        "no queries, no keys": Shape((2,), 2, 1, 0, 0, 4, 4),
        "one query, one key": Shape((2,), 2, 1, 1, 1, 4, 4),
        "one query": Shape((2,), 4, 2, 1, 37, 16, 16),
        "one key": Shape((2,), 4, 2, 37, 1, 16, 16),
        "no heads": Shape((2,), 0, 0, 3, 4, 8, 8),
        "empty batch": Shape((0,), 2, 1, 3, 4, 8, 8),
        "empty batch of two axes": Shape((2, 0), 2, 1, 3, 4, 8, 8),
        "no leading axes": Shape((), 3, 3, 5, 6, 8, 8),
        "two leading axes": Shape((2, 3), 2, 2, 5, 6, 8, 8),
        "three leading axes": Shape((2, 1, 3), 2, 2, 5, 6, 8, 8),
        "grouped heads": Shape((2,), 6, 2, 10, 15, 16, 16),
        "one kv head": Shape((2,), 5, 1, 10, 15, 16, 16),
    }
    made += [Case(name, shape) for name, shape in sizes.items()]
    made += [
        Case(f"{name}, causal", sizes[name], _causal, q_offset="end")
        for name in ("no queries", "no keys", "one query", "one key", "grouped heads")
    ]
    two = Shape((2, 3), 4, 2, 5, 6, 8, 8)
    made += [
        Case("batch broadcast both ways", two, query_batch=(2, 1), kv_batch=(1, 3)),
        Case("batch of keys only", two, query_batch=()),
        Case("batch of queries only", two, kv_batch=()),
        Case("batch broadcast, masks of each", two, _full_masks, query_batch=(2, 1), kv_batch=(3,)),
        Case("two dimensions", Shape((), 1, 1, 7, 9, 8, 5), head_axis=False),
        Case("two dimensions, blhd", Shape((), 1, 1, 7, 9, 8, 5), head_axis=False, layout="blhd"),
        Case("blhd", SMALL, _causal, layout="blhd"),
        Case("blhd, three dimensions", Shape((), 4, 2, 9, 9, 8, 5), _causal, layout="blhd"),
        Case("blhd, masks stay bhld", SMALL, _full_masks, layout="blhd"),
    ]
    for q_len, kv_len in ((64, 64), (65, 129), (256, 512), (257, 520), (3, 1030)):
        shape = Shape((), 1, 1, q_len, kv_len, 16, 16)
        made.append(Case(f"tiles {q_len} x {kv_len}", shape))
        made.append(Case(f"tiles {q_len} x {kv_len}, causal", shape, _causal, q_offset="end"))
    return made


def _full_masks(shape: Shape, rng: np.random.Generator) -> Sequence[Any]:
    return (Mask(rng.random(shape.scores) < 0.6), Bias(rng.normal(size=shape.scores)))


def _of_memory() -> list[Case]:
    kinds: tuple[Memory, ...] = (
        "strided", "reversed", "transposed", "broadcast", "repeated", "read-only", "unaligned",
    )  # fmt: skip
    grouped = Shape((2,), 4, 2, 18, 18, 16, 12)
    made = [Case(f"{kind} memory", grouped, _causal, memory=kind) for kind in kinds]
    made += [
        Case(f"{kind} memory, blhd, rotated", grouped, lambda s, r: (RoPE(),), layout="blhd",
             memory=kind)
        for kind in kinds
    ]  # fmt: skip
    made.append(Case("strided memory, tiles", Shape((), 2, 1, 70, 140, 64, 64), memory="strided"))
    return made


def _rising(shape: Shape, rng: np.random.Generator) -> Sequence[Any]:
    """Every tile has a new largest score."""
    return (ScoreMod(lambda score, batch, head, q_pos, kv_pos: score + 0.05 * kv_pos),)


def _falling(shape: Shape, rng: np.random.Generator) -> Sequence[Any]:
    return (ScoreMod(lambda score, batch, head, q_pos, kv_pos: score - 0.05 * kv_pos),)


def _of_numbers() -> list[Case]:
    small = ("float32", "float16", "bfloat16")
    long = Shape((), 1, 1, 40, 1100, 16, 16)

    def large_bias(s: Shape, rng: np.random.Generator) -> Sequence[Any]:
        """Some rows see nothing else."""
        return Bias(np.where(rng.random((s.q_len, s.kv_len)) < 0.5, -1e4, 0.0)), Causal()

    return [
        Case("large finite bias", SMALL, large_bias, dtypes=small),
        Case("scale", SMALL, scale=0.3),
        Case("scale 0", SMALL, scale=0.0),
        Case("negative scale", SMALL, _causal, scale=-0.7),
        Case("scores of some 300", UNEQUAL, scale=1.0, magnitude=10.0, dtypes=small),
        Case("scores of some 2000", UNEQUAL, scale=1.0, magnitude=30.0, dtypes=small),
        Case("tiny scores", UNEQUAL, magnitude=1e-3),
        Case("rising scores", long, _rising, dtypes=("float64", "float32", "bfloat16")),
        Case("falling scores", long, _falling, dtypes=("float64", "float32", "bfloat16")),
        Case("one kv head, positions before 0", SMALL, _causal, q_offset=-3),
        Case("queries beyond all keys", UNEQUAL, _causal, q_offset=100),
        Case("queries before all keys", UNEQUAL, _causal, q_offset=-100),
        Case("offsets of each row", UNEQUAL, _causal, q_offset=np.array([-2, 9])),
        Case("key offsets", UNEQUAL, _causal, q_offset=5, kv_offset=np.array([3, -4])),
        Case("far positions", SMALL, _causal, q_offset=2**30, kv_offset=2**30),
        Case(
            "offsets over two leading axes",
            Shape((2, 3), 2, 1, 4, 6, 8, 8),
            lambda s, r: (ALiBi(), SlidingWindow(3, 1)),
            q_offset=np.array([[0, 1, 2], [3, 4, -5]]),
            kv_offset=np.array([[1], [-1]]),
        ),
    ]


def _of_combinations() -> list[Case]:
    """Variants together, as models use them, and every pair of kinds that could get in the way."""

    def decayed(score: Any, batch: Any, head: Any, q_pos: Any, kv_pos: Any) -> Any:
        return score * np.exp(-0.05 * (head + 1.0)) - 0.1 * abs(q_pos - kv_pos)

    def random_mask(s: Shape, rng: np.random.Generator) -> Array:
        return rng.random(s.scores) < 0.5

    def holes(s: Shape, rng: np.random.Generator) -> Array:
        bias = rng.normal(size=(s.q_len, s.kv_len))
        bias[rng.random(bias.shape) < 0.4] = -np.inf
        return bias

    square: dict[str, Variants] = {
        "causal, alibi": lambda s, r: (Causal(), ALiBi()),
        "window, softcap, sinks": lambda s, r: (
            SlidingWindow(3, 0), Softcap(1.5), Sinks(r.normal(size=s.num_heads)),
        ),
        "rope, segments, causal": lambda s, r: (
            RoPE(), Segments(np.arange(s.q_len) // 4), Causal(),
        ),
        "rope, alibi": lambda s, r: (RoPE(layout="interleaved"), ALiBi()),
        "rope, window, sinks": lambda s, r: (RoPE(), SlidingWindow(4, 0), Sinks(0.5)),
        "bias with holes, softcap": lambda s, r: (Bias(holes(s, r)), Softcap(2.0)),
        "softcap, bias with holes": lambda s, r: (Softcap(2.0), Bias(holes(s, r))),
        "bias with holes, exp of the score": lambda s, r: (
            Bias(holes(s, r)), ScoreMod(lambda score, b, h, q, k: np.exp(0.25 * score)),
        ),
        "dropout, causal": lambda s, r: (Dropout(0.3, 7), Causal()),
        "dropout, sinks, empty rows": lambda s, r: (
            Dropout(0.5, 2**63 + 5), Sinks(r.normal(size=s.num_heads)), Mask(random_mask(s, r)),
        ),
        "score mod, mask": lambda s, r: (ScoreMod(decayed), Mask(random_mask(s, r))),
        "score mods in order": lambda s, r: (Softcap(1.0), ScoreMod(decayed), Softcap(0.5)),
        "prefix LM": lambda s, r: (Causal() | Prefix(r.integers(0, 6, s.batch_shape)),),
        "longformer": lambda s, r: (SlidingWindow(1, 1) | GlobalTokens([0, 5]),),
        "sparse transformer": lambda s, r: (
            Causal() & (SlidingWindow(1, 0) | Strided(3)),
        ),
        "not causal": lambda s, r: (~Causal(), ~SlidingWindow(0, 2)),
        "mask algebra with arrays": lambda s, r: (random_mask(s, r) | Causal() & ~Strided(2),),
        "not segments, and": lambda s, r: (~Segments(np.arange(s.q_len) // 3) & Causal(),),
        "two masks, two biases, bare": lambda s, r: (
            random_mask(s, r), r.normal(size=(s.num_heads, 1, s.kv_len)),
            r.random((s.q_len, s.kv_len)) < 0.9, r.normal(size=(s.q_len, 1)).astype(np.float16),
        ),
        "mask of stride 0": lambda s, r: (
            np.broadcast_to(r.random((s.q_len, s.kv_len)) < 0.5, s.scores),
        ),
        "every mask false": lambda s, r: (Mask(np.zeros((1, 1), bool)),),
        "every mask false, sinks": lambda s, r: (Mask(np.zeros((1, 1), bool)), Sinks(0.25)),
        "T5 decoder": lambda s, r: (
            RelativeBias(r.normal(size=(8, s.num_heads)), bidirectional=False, max_distance=7),
            Causal(),
        ),
        "segments out of order": lambda s, r: (Segments(r.integers(0, 3, s.q_len)), ALiBi()),
        "segments of each row": lambda s, r: (
            Segments(r.integers(0, 2, (*s.batch_shape, s.q_len))), SlidingWindow(1, 1), RoPE(),
        ),
        "block sparse, causal": lambda s, r: (
            BlockSparse(r.random((s.num_heads, 3, 2)) < 0.7, 4, 5), Causal(),
        ),
        "all of them": lambda s, r: (
            RoPE(rotary_dim=4), Bias(holes(s, r)), ALiBi(), Softcap(3.0), ScoreMod(decayed),
            Causal(), SlidingWindow(6, None), KeyLengths(s.kv_len - 1), Sinks(0.1), Dropout(0.1, 3),
        ),
    }  # fmt: skip
    end: dict[str, Variants] = {
        "key lengths": lambda s, r: (KeyLengths([13, 4]), Causal()),
        "key lengths below q_len": lambda s, r: (KeyLengths([2, 0]), Causal(), ALiBi()),
        "key lengths in a conjunction": lambda s, r: (KeyLengths([9, 7]) & Causal(),),
        "unequal segments": lambda s, r: (
            Segments([0, 0, 0, 1, 1, 2], [0] * 3 + [1] * 6 + [2] * 1 + [3] * 3), Causal(),
        ),
        "rope, key lengths": lambda s, r: (RoPE(), KeyLengths([12, 8]), SlidingWindow(5, 0)),
        "alibi, sinks": lambda s, r: (ALiBi(), Sinks(r.normal(size=s.num_heads)), Causal()),
        "relative bias": lambda s, r: (
            RelativeBias(r.normal(size=(32, s.num_heads)), max_distance=20), Causal(),
        ),
    }  # fmt: skip
    made = [Case(name, SMALL, variants) for name, variants in square.items()]
    made += [Case(f"{name}, end", UNEQUAL, v, q_offset="end") for name, v in end.items()]
    made.append(
        Case("key lengths and causal align", UNEQUAL,
             lambda s, r: (KeyLengths([11, 5]), Causal(align="end")))
    )  # fmt: skip
    for name in (
        "rope, segments, causal",
        "longformer",
        "dropout, causal",
        "window, softcap, sinks",
        "bias with holes, softcap",
        "sparse transformer",
    ):
        long = Shape((), 1, 1, 150, 150, 32, 16)
        made.append(Case(f"{name}, tiles", long, square[name], dtypes=("float32", "bfloat16")))
    return made
