"""Values that an argument is not meant to have."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

__all__ = ["HOSTILE"]


class Unprintable:
    """An object whose `repr` fails, and that compares with nothing."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    __hash__ = object.__hash__


class LikeAnArray:
    """An object that says it has a shape, and has none."""

    shape = "wide"
    dtype = "float32"
    ndim = 2


def _itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


HOSTILE: dict[str, Callable[[], Any]] = {
    **{repr(value): (lambda value=value: value) for value in (
        None, True, False, -1, 0, 1, 2, 3, 5, 7, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, -(2**63),
        -0.5, 0.5, 1.5, math.nan, math.inf, -math.inf, 1e308, 5e-324, 1j, "", "x", "\ud800", "int8",
        "float32", "../..", "x\0y", b"", b"x", (), [], {}, [[1]], [1, [2]], {"x": 1}, {1: 2},
        (1, 2), [None], [-1], [2**62], [math.nan], ["x"], {2: 3}, Ellipsis, slice(None),
        range(3), int,
        len, set(), frozenset({1}),
    )},
    "10**400": lambda: 10**400,
    "-10**400": lambda: -(10**400),
    "a long text": lambda: "x" * 100_000,
    "Fraction": lambda: Fraction(1, 3),
    "object": object,
    "unprintable": Unprintable,
    "like an array": LikeAnArray,
    "itself": _itself,
    "generator": lambda: (i for i in range(3)),
    "function": lambda: lambda *args, **kwargs: None,
    "failing function": lambda: _failing,
    "np.int8": lambda: np.int8(4),
    "np.uint64": lambda: np.uint64(2**64 - 1),
    "np.float32 nan": lambda: np.float32(np.nan),
    "np.bool": lambda: np.bool_(True),
    "np.str": lambda: np.str_("x"),
    "datetime64": lambda: np.datetime64("2020-01-01"),
    "Generator": lambda: np.random.default_rng(0),
    "array of no dimension": lambda: np.array(1.0),
    "array of no number": lambda: np.zeros(0),
    "array (0, 0)": lambda: np.zeros((0, 0)),
    "array (2, 0, 8)": lambda: np.zeros((2, 0, 8)),
    "array (0, 5, 8)": lambda: np.zeros((0, 5, 8), np.float32),
    "array (5, 0)": lambda: np.zeros((5, 0)),
    "array (3,)": lambda: np.ones(3),
    "array (5, 8)": lambda: np.ones((5, 8)),
    "array (5, 7)": lambda: np.ones((5, 7), np.float32),
    "array (2, 5, 8)": lambda: np.ones((2, 5, 8), np.float32),
    "array (2, 2, 5, 8)": lambda: np.ones((2, 2, 5, 8), np.float32),
    "array of 33 dimensions": lambda: np.ones((1,) * 32),
    "int array": lambda: np.ones((5, 8), np.int64),
    "bool array": lambda: np.ones((5, 8), bool),
    "negative ints": lambda: -np.ones(5, np.int64),
    "large ints": lambda: np.full(5, 2**62),
    "uint64 array": lambda: np.full(5, 2**64 - 1, np.uint64),
    "complex array": lambda: np.ones((5, 8), complex),
    "object array": lambda: np.array([None, "x"], object),
    "array of text": lambda: np.array([["x", "y"]]),
    "array of dates": lambda: np.zeros(5, "datetime64[D]"),
    "structured array": lambda: np.zeros((5, 8), [("a", "f4")]),
    "nan array": lambda: np.full((5, 8), np.nan),
    "inf array": lambda: np.full((5, 8), np.inf),
    "masked array": lambda: np.ma.masked_array(np.ones((5, 8)), True),
    "float16 array": lambda: np.ones((5, 8), np.float16),
    "swapped bytes": lambda: np.ones((5, 8), ">f4"),
    "long doubles": lambda: np.ones((5, 8), np.longdouble),
    "tensor": lambda: torch.ones(5, 8),
    "meta tensor": lambda: torch.ones(5, 8, device="meta"),
    "tensor of no dimension": lambda: torch.tensor(3),
    "tensor with gradient": lambda: torch.ones(5, 8, requires_grad=True),
    "sparse tensor": lambda: torch.ones(5, 8).to_sparse(),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)]),
    "int tensor": lambda: torch.ones(5, 8, dtype=torch.int32),
    "bfloat16 tensor": lambda: torch.ones(5, 8, dtype=torch.bfloat16),
    "module": lambda: torch.nn.Linear(8, 8),
}  # fmt: skip
"""What each is, and a function that makes one."""


def _failing(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("of the caller")
