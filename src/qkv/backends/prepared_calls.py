"""What a backend prepares: a problem made ready, and the ways in which other arrays run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

Passes: TypeAlias = Literal["forward", "residuals", "statistics", "gradients"]
"""What is computed: attention, attention that a backward pass follows, attention with statistics of
its rows, gradients."""


class PreparedSteps(NamedTuple):
    """Decoding steps of any length that other libraries take without NumPy arrays in between.

    Attributes
    ----------
    brief_keys : int
        Up to so many keys a step needs no thread but the caller's, and stays below some 20
        microseconds, for which it may hold the GIL.
    run : callable (kv_len, out, lse, q_shift, operands, keep_alive, between_products=False) -> bool
        Computes a step; False where `Prepared.call` gives None. `out` and `lse` are addresses, lse
        0 for none. `operands` are, for query, key, value and each array, its address, sizes, and
        strides in elements, the latter two as tuples. `keep_alive` owns all this memory.
        `between_products` says that threads of such a library have just worked and will soon again,
        as around the layers of a model.
    of_length : callable (kv_len, q_shift, strides) -> Prepared or None
        The step over so many keys whose first query stands at `q_shift`, with `strides` of query,
        key and value in bytes.
    """

    brief_keys: int
    run: Callable[..., bool]
    of_length: Callable[[int, int, Sequence[Sequence[int]]], Prepared | None]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A problem made ready for other arrays of its form; all but `call` is there for speed.

    It keeps no array of the caller's. Each function gives None or False if something is not as it
    was prepared for, or an output is not finite: the call is then checked.

    Attributes
    ----------
    call : callable (query, key, value, rows, arrays=(), q_shift=0)
        Takes arrays with the dtypes, shapes and strides of those that were prepared for. If the
        number of keys is free, key and value have any number of rows, and all three any strides.
        `arrays` are in the order of those that were prepared for; `q_shift`, passed where the
        number of keys is free, is added to the row of a query for its position. Gives output, lse,
        lse_rest and `unrounded`, sinks included, as `run` does, or as `run_for_backward` if a
        backward pass follows; or with the `RowStatistics` of `run_with_statistics` in place of
        lse_rest. All but the output may be missing unless `rows` are wanted.

        For gradients (query, key, value, out, lse, lse_rest, grad_out, grad_lse, arrays=()):
        gradients of query, key and value as `backward` gives them; `grad_lse` may be None for
        zeros.
    run : callable (addresses, keep_alive) -> bool, optional
        Reads query, key and value, writes out and lse, and reads the arrays of variants, in this
        order, at these addresses, of memory that `keep_alive` owns. That of lse may be 0.
    brief : callable (query, key, value, out, lse) -> bool, optional
        `run` of these addresses, if it needs no thread but the caller's and stays below some 20
        microseconds, for which it may hold the GIL.
    if_alike : callable (query, key, value, rows), optional
        As `call`, and asks by itself whether arrays are as expected, which is quicker than a form.
        If the number of keys is free, queries stand where the problem aligns them.
    steps : PreparedSteps, optional
        If the number of keys is free.
    """

    call: Callable[..., Any]
    run: Callable[[Sequence[int], Any], bool] | None = None
    brief: Callable[[int, int, int, int, int], bool] | None = None
    if_alike: Callable[[Any, Any, Any, bool], Any] | None = None
    steps: PreparedSteps | None = None
