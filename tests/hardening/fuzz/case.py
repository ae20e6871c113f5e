"""A random problem of one draw with the methods of `qkv.testing.Case` that other tests call."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from qkv.testing import Inputs

from .calls import keywords, made
from .checks import heads_first
from .draw.shape import Shape
from .draw.structure import random_problem
from .oracle import Oracle

Array = NDArray[Any]


class RandomCase:
    """`random_case(seed, structure, layout)`, with the oracle's answer."""

    def __init__(self, seed: int, structure: int, layout: int) -> None:
        self.name = f"random_case({seed}, {structure}, {layout})"
        self.problem = random_problem(seed, structure, layout, draws=1)
        self.dtypes = (self.problem.dtype,)

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def oracle(self) -> Oracle:
        """The answer, of one draw."""
        return Oracle(self.problem)

    @property
    def shape(self) -> Shape:
        """The sizes of the problem."""
        o = self.oracle
        kv_heads = o.num_heads // max(o.group_size, 1)
        sizes = o.q_len, o.kv_len, o.head_dim, o.value.shape[-1]
        return Shape(o.batch_shape, o.num_heads, kv_heads, *sizes)

    def build(self, dtype: str) -> Inputs:
        """The arguments of `qkv.attention`."""
        p = self.problem
        given = {name: value for name, value in keywords(p).items() if name != "backend"}
        variants = tuple(made(v.of_draw(0)) for v in p.variants)
        return Inputs(p.query[0], p.key[0], p.value[0], variants, given)

    def truth(self, dtype: str) -> Any:
        """An object with `out` and `lse`."""
        return Truth(self.oracle.out[0], self.oracle.lse[0])

    def plain_order(self, array: Array) -> Array:
        """An array of the call as `(..., heads, length, dim)`, whatever the layout."""
        return heads_first(self.problem, array)


class Truth:
    """Output and lse in float64."""

    def __init__(self, out: Array, lse: Array) -> None:
        self.out, self.lse = out, lse


random_case = RandomCase
