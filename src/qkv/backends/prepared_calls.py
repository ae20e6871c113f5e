"""The protocols of prepared calls: made once for a problem, and run for arrays like its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray

Array = NDArray[Any]


class Prepared(Protocol):
    """A problem made ready for other arrays with the same dtypes, shapes and strides."""

    def __call__(
        self, query: Any, key: Any, value: Any, rows: bool, arrays: Any = ()
    ) -> tuple[Any, Any, Any, Any] | None:
        """Output, lse, lse_rest and `unrounded` as `run` gives them, or as `run_for_backward` does
        if a `backward` pass was said to follow; all but the output only if `rows` are wanted.

        None in place of all if the machine is no longer what it was prepared for.
        """
        ...


class PreparedBackward(Protocol):
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


class PreparedStatistics(Protocol):
    """A forward pass with statistics, made ready as `Prepared` is.

    A backend may have `prepare_statistics(problem, arrays) -> PreparedStatistics | None`.
    """

    def __call__(
        self, query: Any, key: Any, value: Any, rows: bool, arrays: Any = ()
    ) -> tuple[Any, Any, Any, None] | None:
        """Output, lse and `RowStatistics` as `run_with_statistics` gives them, and None."""
        ...


class AnyLengthSteps(Protocol):
    """A problem of few queries made ready for any number of keys: decoding steps of any length.

    A backend may have `prepare_any_length(problem, arrays=()) -> AnyLengthSteps | None`. `arrays`
    are those that each step brings, of which tables of the problem are views; everything else that
    variants hold is kept by value, and must serve any number of keys, or the result is None. Where
    all queries stand is a number that each step brings too, if the problem has a table of it.
    """

    def __call__(
        self, query: Any, key: Any, value: Any, rows: bool, q_shift: int, arrays: Any = ()
    ) -> tuple[Any, Any, Any] | None:
        """Output and lse of the call, sinks included, and None; lse only if `rows` are wanted.

        Parameters
        ----------
        query, key, value : array
            Like those that were prepared for, with any strides; key and value with any number of
            rows.
        rows : bool
            Whether lse is wanted.
        q_shift : int
            What is added to the row of a query for its position.
        arrays : sequence of array
            In the order of those that were prepared for. Axes along the keys have as many entries
            as there are keys now, others as many as before.

        Returns
        -------
        tuple or None
            None if something is not as it was prepared for; the caller then takes the general way.
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
        """Compute a step; False where `AnyLengthSteps` gives None.

        Parameters
        ----------
        kv_len : int
        out, lse : int
            Addresses, lse 0 for none.
        q_shift : int
            As for `AnyLengthSteps`.
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
    """A prepared call that can check arrays by itself, which is quicker than looking it up."""

    def repeated(self) -> RepeatedCall | None:
        """The call for NumPy arrays, or None if there are arrays of variants."""
        ...


@runtime_checkable
class RepeatingSteps(Protocol):
    """The same for decoding steps of any length."""

    def repeated_arrays(self, at_end: bool) -> RepeatedCall | None:
        """The step for NumPy arrays, or None if variants have arrays.

        The first query stands at 0, or with `at_end` the last one at the last key.
        """
        ...

    def repeated_addresses(self, *, between_products: bool = False) -> RepeatedStep | None:
        """The step for arrays of other libraries, or None.

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
