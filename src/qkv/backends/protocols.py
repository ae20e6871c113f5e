"""The protocol that every backend has, and those of five optional capabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray

from qkv.backends.prepared_calls import Passes, Prepared
from qkv.partial import Partial, RowStatistics
from qkv.problem.backward import BackwardInputs, OperandGradients
from qkv.problem.second_derivatives.passes import Cotangents, SecondDerivatives
from qkv.problem.second_derivatives.tangents import OperandTangents
from qkv.problem.spec import Problem, Spec

Array = NDArray[Any]
Progress: TypeAlias = Callable[[int, int], object]
"""A function that is called with how much is done, as `(done, total)`."""
WeightBlocks: TypeAlias = Callable[[int, int, slice, slice, int], "tuple[Array, Array] | None"]
"""The largest weight, and the sum of the weights, of each `block` x `block` pairs of a head.

    largest[m, n] = max w[i, j],   sums[m, n] = sum w[i, j]
    over q_rows.start + m block <= i < q_rows.start + (m + 1) block, and j alike

It takes the flat batch index, the query head, `q_rows` and `kv_rows`, which begin at multiples of
`block`, and `block`; blocks at their end may be smaller. NaN counts as 0. None where the blocks are
too small to pay."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a backend cannot run a problem: the fact, and what it accepts."""

    fact: str
    accepts: str

    def __str__(self) -> str:
        return f"{self.fact} (accepts {self.accepts})"


@runtime_checkable
class Preparing(Protocol):
    """A backend that can prepare for repeated calls of one structure."""

    def prepare(
        self,
        problem: Problem,
        passes: Passes,
        *,
        any_length: bool = False,
        arrays: Any = (),
        inputs: BackwardInputs | None = None,
    ) -> Prepared | None:
        """The problem made ready, or None if calls like it are to be checked.

        It is asked only for problems whose variants hold nothing but constants, and `arrays`, of
        which tables of the problem are views. Calls bring their own, in the same order, with the
        same dtypes, shapes and strides, and with other values: it must not be prepared if these
        decide what is computed.

        Parameters
        ----------
        problem : Problem
        passes : Passes
        any_length : bool
            Whether the number of keys, the position of the queries, and the strides are free, as in
            steps of decoding. Everything that is kept must then serve any number of keys.
        arrays : tuple of array
        inputs : BackwardInputs, optional
            For "gradients", which are those of query, key and value alone: later residuals and
            cotangents have the same dtypes, shapes and strides.
        """
        ...

    def add_sinks(self, problem: Problem, partial: Partial) -> Partial:
        """The result of `qkv.partial.finish`; may write to the arrays of `partial`.

        Prepared calls apply the sinks themselves, and a first call must have the bits of later
        ones, so it goes through the same code.
        """
        ...


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
class TwiceDifferentiable(Protocol):
    """A backend that computes tangents and second derivatives; otherwise NumPy does."""

    def second_derivatives(
        self, problem: Problem, tangents: OperandTangents, cotangents: Cotangents | None
    ) -> SecondDerivatives | None:
        """Tangents of output and lse, and for cotangents those of the gradients.

        None for values that this backend leaves to NumPy.
        """
        ...


@runtime_checkable
class DeviceBackend(Protocol):
    """A backend that takes tensors of torch, on any device.

    `Operands.device_arrays` has them; `run` is not asked. Results stay on the device, and are
    differentiable by torch.
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
    sum is to be found again. `of_part` says that the problem has only some of the keys over which
    lse goes, so that no sum can be found; lse then is float64. `progress(done, total)` is called
    now and then.
    """

    def run_with_statistics(self, problem: Problem) -> tuple[Partial, RowStatistics]:
        """The result of `run`, and statistics of its rows over the keys, without sinks."""
        ...

    def top(
        self,
        problem: Problem,
        lse: Array,
        k: int,
        progress: Progress | None = None,
        *,
        of_part: bool = False,
    ) -> tuple[Array, Array] | None:
        """Indices and weights `(*batch_shape, num_heads, q_len, k)` of the best keys, falling.

        Ties go to the lower key, a score of NaN or -inf is none, and what is missing is -1 and 0.
        None where k is larger than it pays.
        """
        ...

    def received(
        self,
        problem: Problem,
        lse: Array,
        progress: Progress | None = None,
        *,
        of_part: bool = False,
    ) -> Array:
        """`sum_i w[i, j]`, `(*batch_shape, num_heads, kv_len)`."""
        ...

    def weight_blocks(self, problem: Problem, lse: Array) -> WeightBlocks | None:
        """The weights made ready for reductions over blocks; None if NumPy is to reduce them."""
        ...


@runtime_checkable
class Backend(Protocol):
    """The protocol of every backend. It reads the expressions of a `Spec`, never the variants.

    It may also have `stored_rows = True`, if `Operands.key` and `value` may be paged or quantised
    (`qkv.problem.stored_rows.StoredRows`), and `notes(spec)`, which gives sentences for `qkv.plan`
    on what a caller does not expect of this machine.
    """

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
