"""The protocols of prepared calls: made once for a problem, and run for arrays like its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray

Array = NDArray[Any]


Passes: TypeAlias = Literal["forward", "residuals", "statistics", "gradients"]
"""What is computed: attention, attention that a backward pass follows, attention with statistics of
its rows, gradients."""


class Prepared(Protocol):
    """A problem made ready for other arrays with the same dtypes, shapes and strides.

    If it was prepared for any number of keys, key and value have any number of rows, and all three
    have any strides.
    """

    def __call__(
        self, query: Any, key: Any, value: Any, rows: bool, arrays: Any = (), q_shift: int = 0
    ) -> tuple[Any, Any, Any, Any] | None:
        """Output, lse, lse_rest and `unrounded`, sinks included; all but the output only if `rows`
        are wanted.

        Parameters
        ----------
        query, key, value : array
        rows : bool
        arrays : sequence of array
            In the order of those that were prepared for. For any number of keys, axes along the
            keys have as many entries as there are keys now.
        q_shift : int
            What is added to the row of a query for its position. Passed where the number of keys
            may be any.

        Returns
        -------
        tuple or None
            As `run` gives them, as `run_for_backward` if a backward pass follows, or with
            `RowStatistics` of `run_with_statistics` in place of lse_rest. None if something is not
            as it was prepared for, or an output is not finite: the call is then checked.
        """
        ...


class PreparedGradients(Protocol):
    """Gradients made ready for other arrays with the same dtypes, shapes and strides."""

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        lse: Any,
        lse_rest: Any,
        grad_out: Any,
        grad_lse: Any,
        arrays: Any = (),
    ) -> tuple[Any, Any, Any] | None:
        """Gradients of query, key and value as `backward` gives them, and in their type; None for
        `grad_lse` is zeros. None in place of all if something is not as it was prepared for.
        """
        ...


Addresses: TypeAlias = tuple[int, int, int, int, int, int, Sequence[int]]
"""Where query, key and value of one call lie, where out, lse and lse_rest go, and where the arrays
of variants lie. lse and lse_rest may be 0, for nowhere. A class of its own would take half a
microsecond of each call."""


class RepeatedStep(Protocol):
    """A decoding step of any length that other libraries make without NumPy arrays in between."""

    brief_keys: int
    """Up to so many keys it needs no thread but the caller's, and stays below some 20 microseconds,
    for which it may hold the GIL."""

    def __call__(
        self,
        kv_len: int,
        out: int,
        lse: int,
        q_shift: int,
        operands: tuple[Any, ...],
        keep_alive: Any,
    ) -> bool:
        """Compute a step; False where `Prepared` gives None.

        Parameters
        ----------
        kv_len : int
        out, lse : int
            Addresses, lse 0 for none.
        q_shift : int
            As for `Prepared`.
        operands : tuple
            Of query, key, value and each array: address, sizes, and strides in elements, the latter
            two as tuples.
        keep_alive : object
            Owns all this memory.
        """
        ...


@runtime_checkable
class AddressedCall(Protocol):
    """A prepared call that other libraries may make without NumPy arrays in between."""

    def run(self, addresses: Addresses, keep_alive: Any) -> bool:
        """Compute at these addresses, whose memory `keep_alive` owns; False where `Prepared` gives
        None."""
        ...


@runtime_checkable
class RepeatedCall(AddressedCall, Protocol):
    """A prepared call that checks by itself whether arrays are like those it was prepared for."""

    def brief(self) -> Callable[[int, int, int, int, int], bool] | None:
        """`run` of the addresses of query, key, value, out and lse, if it needs no thread but the
        caller's and stays below some 20 microseconds, for which it may hold the GIL; else None."""
        ...

    def __call__(self, query: Array, key: Array, value: Array, rows: bool) -> Any:
        """As `Prepared` without arrays of variants; None if an array has another dtype, shape or
        stride."""
        ...


@runtime_checkable
class RepeatingCall(Protocol):
    """A prepared call that can check arrays by itself, which is quicker than a form."""

    def repeated(self, at_end: bool = False) -> RepeatedCall | None:
        """The call for NumPy arrays, or None if there are arrays of variants.

        If it was prepared for any number of keys, the first query stands at 0, or with `at_end` the
        last one at the last key.
        """
        ...


@runtime_checkable
class RepeatingSteps(Protocol):
    """A call prepared for any number of keys that other libraries may make too."""

    def repeated_addresses(self, *, between_products: bool = False) -> RepeatedStep | None:
        """The step that is told addresses, sizes and strides, or None.

        `between_products` says that threads of such a library have just worked and will soon again,
        as around the layers of a model.
        """
        ...

    def of_length(
        self, kv_len: int, q_shift: int, strides: Sequence[Sequence[int]]
    ) -> RepeatedCall | None:
        """The step over so many keys whose first query stands at `q_shift`, or None.

        It is told addresses alone: `strides` are those of query, key and value, in bytes.
        """
        ...
