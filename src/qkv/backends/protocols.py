"""The protocol that every backend has, and one protocol for each optional capability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray

from qkv.partial import Partial, RowStatistics
from qkv.problem.backward import BackwardInputs, OperandGradients
from qkv.problem.spec import Problem, Spec

Array = NDArray[Any]
Progress: TypeAlias = Callable[[int, int], object]
"""Told of `(done, total)`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a backend cannot run a problem: the fact, and what it accepts."""

    fact: str
    accepts: str

    def __str__(self) -> str:
        return f"{self.fact} (accepts {self.accepts})"


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


@runtime_checkable
class AddressedSteps(Protocol):
    """Steps that other libraries may make without NumPy arrays in between."""

    def run(
        self,
        addresses: Addresses,
        kv_len: int,
        q_shift: int,
        strides: tuple[Sequence[int], Sequence[int], Sequence[int]],
        keep_alive: Any,
        arrays: Sequence[tuple[int, Sequence[int], Sequence[int]]] = (),
    ) -> bool:
        """Compute at these addresses, whose memory `keep_alive` owns; False where `AnyLengthSteps`
        gives None.

        `strides` are bytes of all axes `(*batch, heads, rows, elements)` of query, key and value.
        Output and lse are dense. Each of `arrays` is its address, shape and strides; `addresses`
        has none.
        """
        ...

    def repeated(self) -> RepeatedStep:
        """A step for callers one after the other, such as the layers of a model."""
        ...


class RepeatedStep(Protocol):
    """A decoding step of which between two moves nothing but addresses changes.

    It is for one caller at a time.
    """

    def move(
        self,
        kv_len: int,
        q_shift: int,
        strides: tuple[Sequence[int], Sequence[int], Sequence[int]],
        arrays: Sequence[tuple[int, Sequence[int], Sequence[int]]] = (),
    ) -> bool:
        """Take the next length, position and strides; False is `AddressedSteps.run`'s."""
        ...

    def run(self, addresses: Addresses, keep_alive: Any) -> bool:
        """Compute at these addresses, which hold those of arrays too."""
        ...


@runtime_checkable
class AddressedCall(Protocol):
    """A prepared call that other libraries may make without NumPy arrays in between."""

    def run(self, addresses: Addresses, keep_alive: Any) -> bool:
        """Compute at these addresses, whose memory `keep_alive` owns; False where `Prepared` gives
        None."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A backend that can prepare for repeated calls of one structure."""

    def prepare(self, problem: Problem, backward: bool, arrays: Any = ()) -> Prepared | None:
        """The problem made ready, None if values that calls may change decide what is computed.

        It is asked only for problems whose variants hold nothing but constants, and these arrays,
        of which tables of the problem are views. Calls bring their own, in the same order, with
        the same dtypes, shapes and strides, and with other values. `backward` says whether a
        backward pass will follow.
        """
        ...


@runtime_checkable
class PreparingGradients(Protocol):
    """A backend that can prepare for repeated gradients of one structure."""

    def prepare_backward(
        self, problem: Problem, inputs: BackwardInputs, arrays: Any = ()
    ) -> PreparedBackward | None:
        """Like `Preparing.prepare`, for calls without table gradients and broadcast operands.

        Later residuals and cotangents have the dtypes, shapes and strides of `inputs`.
        """
        ...


@runtime_checkable
class PreparingStatistics(Protocol):
    """A backend that can prepare for repeated inspection of one structure."""

    def prepare_statistics(
        self, problem: Problem, arrays: tuple[Array, ...] = ()
    ) -> PreparedStatistics | None:
        """The problem made ready, or None; see `PreparedStatistics`."""
        ...


@runtime_checkable
class PreparingSteps(Protocol):
    """A backend that can prepare for decoding steps over any number of keys."""

    def prepare_any_length(
        self, problem: Problem, arrays: tuple[Array, ...] = ()
    ) -> AnyLengthSteps | None:
        """The problem made ready for any number of keys, or None; see `AnyLengthSteps`."""
        ...


@runtime_checkable
class SinksBackend(Protocol):
    """A backend whose prepared calls apply the sinks themselves.

    The first call must give the bits of later ones, so it goes through the same code.
    """

    def add_sinks(self, problem: Problem, partial: Partial) -> Partial:
        """The result of `qkv.partial.finish`; may write to the arrays of `partial`."""
        ...


@runtime_checkable
class StoredRowsBackend(Protocol):
    """A backend that states whether it accepts paged or quantised keys and values."""

    stored_rows: bool
    """Whether `Operands.key` and `value` may be `qkv.problem.stored_rows.StoredRows`."""


@runtime_checkable
class Differentiable(Protocol):
    """A backend that computes gradients."""

    def run_for_backward(self, problem: Problem) -> Partial:
        """The result of `run`, with `lse_rest` if scores are summed in the order of `backward`, and
        with `unrounded` if `out` was rounded to 16 bits.

        Where one key has nearly all the weight, gradients are differences of what the two passes
        found.
        """
        ...

    def backward(self, problem: Problem, inputs: BackwardInputs) -> OperandGradients:
        """Gradients of query, key and value, and of the tables that `inputs` names."""
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """A backend that takes arrays of its own library, on any device.

    `Operands.device_arrays` has them; `run` is not asked. Results stay on the device, and are
    differentiable by their own library.
    """

    def attend(self, problem: Problem, *, lse: bool) -> Partial:
        """Output and, if wanted, lse, sinks included, in either floating type of the problem."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """A backend that computes statistics of the weights; otherwise `qkv.inspect` uses NumPy.

        w[i, j] = exp(s[i, j] - lse[i])

    before dropout, with the lse of the whole call, sinks included, `(*batch_shape, num_heads,
    q_len)`. Where |lse| is so large that its rounding would show (`qkv.partial.coarse`), a row's
    sum is to be found again. `progress(done, total)` is called now and then.
    """

    def run_with_statistics(self, problem: Problem) -> tuple[Partial, RowStatistics]:
        """The result of `run`, and statistics of its rows over the keys, without sinks."""
        ...

    def top(
        self, problem: Problem, lse: Array, k: int, progress: Progress | None = None
    ) -> tuple[Array, Array] | None:
        """Indices and weights `(*batch_shape, num_heads, q_len, k)` of the best keys, falling.

        Ties go to the lower key, a score of NaN or -inf is none, and what is missing is -1 and 0.
        None where k is larger than it pays.
        """
        ...

    def received(self, problem: Problem, lse: Array, progress: Progress | None = None) -> Array:
        """`sum_i w[i, j]`, `(*batch_shape, num_heads, kv_len)`."""
        ...


class WeightBlocks(Protocol):
    """The weights of one problem, reduced over blocks of pairs where that is asked for."""

    def __call__(
        self, batch: int, head: int, q_rows: slice, kv_rows: slice, block: int
    ) -> tuple[Array, Array] | None:
        """The largest weight, and the sum of the weights, of each `block` x `block` pairs.

            largest[m, n] = max w[i, j],   sums[m, n] = sum w[i, j]
            over q_rows.start + m block <= i < q_rows.start + (m + 1) block, and j alike

        Parameters
        ----------
        batch, head : int
            Flat batch index and query head.
        q_rows, kv_rows : slice
            A rectangle that begins at multiples of `block`; blocks at its end may be smaller.
        block : int

        Returns
        -------
        (array, array) or None
            `(blocks of queries, blocks of keys)`; NaN counts as 0. None where the blocks are too
            small to pay.
        """
        ...


@runtime_checkable
class ReducingWeights(Protocol):
    """What a backend also has that reduces weights, for maps of them at any length."""

    def weight_blocks(self, problem: Problem, lse: Array) -> WeightBlocks:
        """A problem made ready, with the lse of the whole call; see `Inspectable`."""
        ...


@runtime_checkable
class Backend(Protocol):
    """The protocol of every backend. It reads the expressions of a `Spec`, never the variants."""

    name: str
    priority: int

    def refusals(self, spec: Spec) -> tuple[Refusal, ...]:
        """Why it cannot run the problem; empty when it can. Never raises, reads no arrays."""
        ...

    def blocks(self, spec: Spec) -> tuple[int, int]:
        """Queries and keys in one of its tiles."""
        ...

    def scratch_bytes(self, spec: Spec) -> int:
        """Memory that it takes beyond operands, output and lse."""
        ...

    def run(self, problem: Problem) -> Partial:
        """Attention without sinks: `(*batch_shape, num_heads, q_len, v_head_dim)` and lse."""
        ...
