"""One call of the front door: arrays bound to a checked problem, and results given back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv._statement import restate, state
from qkv.arrays import ArrayLibrary, is_array, library_of, view_beside
from qkv.backends import Choice, choose
from qkv.partial import Partial, finish
from qkv.problem.check import Layout, check
from qkv.problem.rows import Paged, Quantized
from qkv.problem.spec import Problem
from qkv.variants.bias import bare_bias
from qkv.variants.dense_mask import Mask

Array = NDArray[Any]
See = Callable[[Any, str], Array]
"""`view_beside` for the library of a call's query."""


@dataclass(frozen=True, slots=True)
class Call:
    """A problem, how its arrays came in, and the backend that will run it."""

    problem: Problem
    choice: Choice
    library: ArrayLibrary
    dtype: np.dtype[Any]
    layout: Layout
    ndim: int
    variants: tuple[tuple[Any, Any], ...]
    """Each as it was given, and as the problem knows it."""

    @classmethod
    def bind(
        cls,
        query: Any,
        key: Any,
        value: Any,
        variants: tuple[Any, ...],
        *,
        scale: float | None,
        layout: Layout,
        q_offset: Any,
        kv_offset: Any,
        backend: str,
        backward: bool = False,
    ) -> Call:
        library = library_of(query, "query")
        see = partial(view_beside, library)
        views = [see(query, "query"), _view_rows(see, key, "key"), _view_rows(see, value, "value")]
        *viewed, q_offset, kv_offset = _viewed(see, (*variants, q_offset, kv_offset))
        problem = check(
            views[0],
            views[1],
            views[2],
            tuple(map(as_variant, viewed)),
            scale=scale,
            layout=layout,
            q_offset=q_offset,
            kv_offset=kv_offset,
        )
        return cls(
            problem,
            choose(problem.spec, backend, backward=backward),
            library,
            views[0].dtype,
            layout,
            max(v.ndim for v in views),
            tuple(zip(variants, viewed, strict=True)),
        )

    def run(self) -> Partial:
        """Output and lse, sinks included, in the type of computation."""
        return finish(self.choice.backend.run(self.problem), self.problem.operands.sinks)

    def run_for_backward(self) -> Partial:
        """The same where a backward pass may follow, if the backend has one."""
        backend = self.choice.backend
        run = getattr(backend, "run_for_backward", backend.run)
        return finish(run(self.problem), self.problem.operands.sinks)

    def output(self, partial: Partial) -> Any:
        """Output like the query: its library, dtype and layout."""
        out = partial.out
        if self.ndim == 2:
            out = out.reshape(out.shape[-2:])
        elif self.layout == "blhd":
            out = out.swapaxes(-3, -2)
        with np.errstate(all="ignore"):
            return self.library.restore(np.asarray(out, self.dtype, order="C"))

    def plain(self, out: Array) -> Array:
        """What `output` gives, as `(*batch_shape, num_heads, q_len, v_head_dim)` again."""
        if self.ndim == 2:
            return out[None]
        return out.swapaxes(-3, -2) if self.layout == "blhd" else out

    def known_as(self, variant: Any) -> Any:
        """What the problem knows in the place of a variant of this call."""
        return next((known for given, known in self.variants if given is variant), variant)

    def rows(self, array: Array, trailing: int = 0) -> Any:
        """A statistic `(..., num_heads, q_len)` with as many dimensions as the call has."""
        if self.ndim == 2:
            array = array.reshape(array.shape[array.ndim - trailing - 1 :])
        return self.library.restore(array)


def _view_rows(see: See, given: Any, role: str) -> Any:
    """Keys or values with every array in them as a NumPy view."""
    match given:
        case Paged(pages=pages, page_table=table):
            return Paged(_view_rows(see, pages, f"{role} pages"), see(table, f"{role} page_table"))
        case Quantized(values=values, scales=scales):
            return Quantized(see(values, f"{role} values"), see(scales, f"{role} scales"))
    return see(given, role)


def _viewed(see: See, said: tuple[Any, ...]) -> tuple[Any, ...]:
    """Variants and offsets with every array of another library in them as a NumPy view."""
    statement = state(said, _is_foreign)
    if not statement.arrays:
        return said
    arrays = [see(array, "an array of a variant") for array in statement.arrays]
    return restate(statement.text, arrays).variants


def _is_foreign(value: Any) -> bool:
    return is_array(value) and not isinstance(value, np.ndarray)


def as_variant(variant: Any) -> Any:
    """A bare boolean array is a mask, any other array a bias (which refuses integers)."""
    if hasattr(variant, "lower"):
        return variant
    if isinstance(variant, np.ndarray):
        return Mask(variant) if variant.dtype.kind == "b" else bare_bias(variant)
    return variant
