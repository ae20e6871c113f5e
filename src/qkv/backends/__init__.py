"""Backends: how one is described, found and chosen.

A backend is any object with the protocol of `Backend`. What it has beyond that is a protocol each:
`Differentiable`, `Inspectable`, `StoredRowsBackend`, `DeviceBackend`, and for calls like an earlier
one `Preparing`, `PreparingGradients` and `PreparingSteps`. Those of other packages are found
through the entry point group `qkv.backends`; see docs/add-a-backend.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError, UnsupportedError
from qkv.partial import Partial, RowStatistics, finish
from qkv.problem.backward import BackwardInputs, OperandGradients
from qkv.problem.spec import Problem, Spec

__all__ = [
    "AddressedCall", "Backend", "BrokenBackendWarning", "Choice", "DeviceBackend",
    "Differentiable", "Growing", "Inspectable", "Prepared", "PreparedBackward", "Preparing",
    "PreparingGradients", "PreparingSteps", "Refusal", "StoredRowsBackend", "backends", "choose",
    "kept", "refusals", "register", "unregister",
]  # fmt: skip

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
    ) -> tuple[Any, Any, Any] | None:
        """Output, lse and lse_rest as `run` gives them, or as `run_for_backward` does if a
        `backward` pass was said to follow; the last two only if `rows` are wanted.

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


class Growing(Protocol):
    """A problem of few queries made ready for any number of keys.

    A backend may have `prepare_growing(problem) -> Growing | None`. It is asked for problems whose
    variants hold nothing but constants and know positions only, where what all queries have in
    common is where they stand: `q_shift`, if the problem has a table of it.
    """

    def __call__(
        self, query: Any, key: Any, value: Any, rows: bool, q_shift: int
    ) -> tuple[Any, Any, Any] | None:
        """As of `Prepared`."""
        ...


@runtime_checkable
class AddressedCall(Protocol):
    """A prepared call that other libraries may make without NumPy arrays in between."""

    def run(
        self,
        query: int,
        key: int,
        value: int,
        out: int,
        lse: int,
        lse_rest: int,
        kept: Any,
        arrays: Any = (),
    ) -> bool:
        """Compute at these addresses, of what `kept` keeps; False is `Prepared`'s None.

        Nobody wants lse or lse_rest whose address is 0.
        """
        ...


@runtime_checkable
class Preparing(Protocol):
    """What a backend also has that prepares for calls like an earlier one."""

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
    """What a backend also has that prepares for gradients like earlier ones."""

    def prepare_backward(
        self, problem: Problem, inputs: BackwardInputs, arrays: Any = ()
    ) -> PreparedBackward | None:
        """As `Preparing.prepare`, where no table's gradient is wanted and no operand was broadcast.

        Later residuals and cotangents have the dtypes, shapes and strides of `inputs`.
        """
        ...


@runtime_checkable
class PreparingSteps(Protocol):
    """What a backend also has that prepares for steps of decoding over any number of keys."""

    def prepare_growing(self, problem: Problem) -> Growing | None:
        """The problem made ready for any number of keys, or None; see `Growing`."""
        ...


@runtime_checkable
class StoredRowsBackend(Protocol):
    """What a backend has that says whether it takes keys and values in storage of their own."""

    stored_rows: bool
    """Whether `Operands.key` and `value` may be `qkv.problem.rows.StoredRows`."""


@runtime_checkable
class Differentiable(Protocol):
    """What a backend also has that computes gradients."""

    def run_for_backward(self, problem: Problem) -> Partial:
        """What `run` gives; with `lse_rest` if scores are added up as `backward` adds them up.

        Where one key has nearly all the weight, gradients are differences of what the two passes
        found.
        """
        ...

    def backward(self, problem: Problem, inputs: BackwardInputs) -> OperandGradients:
        """Gradients of query, key and value, and of the tables that `inputs` names."""
        ...


def kept(
    problem: Problem, inputs: BackwardInputs, forward: Callable[[Problem], Partial]
) -> BackwardInputs:
    """`inputs`, with out and lse of one more forward pass if nobody has kept `lse_rest`.

    `forward` adds up scores as the backward pass does.
    """
    if inputs.lse_rest is not None:
        return inputs
    found = finish(forward(problem), problem.operands.sinks)
    rest = np.zeros_like(found.lse) if found.lse_rest is None else found.lse_rest
    return replace(inputs, out=found.out, lse=found.lse, lse_rest=rest)


@runtime_checkable
class DeviceBackend(Protocol):
    """What a backend has that takes arrays of its own library, on any device.

    `Operands.device_arrays` has them; `run` is not asked. Results stay on the device, and are
    differentiable by their own library.
    """

    def attend(self, problem: Problem, *, lse: bool) -> Partial:
        """Output and, if wanted, lse, sinks included, in either floating type of the problem."""
        ...


NO_BACKWARD = Refusal("has no backward pass", "the forward pass alone")


@runtime_checkable
class Inspectable(Protocol):
    """What a backend also has that tells of its weights; for the others `qkv.inspect` uses NumPy.

        w[i, j] = exp(s[i, j] - lse[i])

    before dropout, with the lse of the whole call, sinks included, `(*batch_shape, num_heads,
    q_len)`. Where |lse| is so large that its rounding would show (`qkv.partial.coarse`), a row's
    sum is to be found again. `progress(done, total)` is called now and then.
    """

    def run_with_statistics(self, problem: Problem) -> tuple[Partial, RowStatistics]:
        """What `run` gives, and statistics of its rows over the keys alone, without sinks."""
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


@runtime_checkable
class Backend(Protocol):
    """What computes. It knows the expressions of a `Spec`, never the variants."""

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


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that will run a problem, and why the others before it will not."""

    backend: Backend
    refusals: tuple[tuple[str, tuple[Refusal, ...]], ...]


class BrokenBackendWarning(UserWarning):
    """A backend of another package cannot be loaded."""


_registered: dict[str, Backend] = {}
_broken: dict[str, str] = {}
_generation = 0


@lru_cache(maxsize=1)
def _found() -> dict[str, Backend]:
    from importlib.metadata import entry_points

    from qkv.backends.blocked import BlockedBackend
    from qkv.backends.cpu import CpuBackend
    from qkv.backends.reference import ReferenceBackend
    from qkv.backends.torch import TorchBackend

    known: dict[str, Backend] = {}
    for own in (CpuBackend(), BlockedBackend(), TorchBackend(), ReferenceBackend()):
        known[own.name] = own
    for point in entry_points(group="qkv.backends"):
        if point.name in known:
            continue
        try:
            known[point.name] = point.load()()
        except Exception as error:
            # A broken package must not take the calls of every other backend with it.
            _broken[point.name] = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"the backend {point.name!r} ({point.value}) cannot be loaded and is left out: "
                f"{_broken[point.name]}",
                BrokenBackendWarning,
                stacklevel=2,
            )
    return known


def broken_backends() -> dict[str, str]:
    """Backends of other packages that could not be loaded, and why."""
    _found()
    return dict(_broken)


def generation() -> int:
    """Grows whenever a backend is registered or taken back."""
    return _generation


def register(backend: Backend) -> None:
    """Add a backend in this process, without an entry point."""
    if not isinstance(backend, Backend):
        raise ArgumentError(
            f"{type(backend).__name__} lacks a part of the backend protocol.",
            action="Give it name, priority, refusals, blocks, scratch_bytes and run.",
        )
    global _generation
    _registered[backend.name] = backend
    _generation += 1


def unregister(name: str) -> None:
    """Take back what `register` added."""
    global _generation
    _registered.pop(name, None)
    _generation += 1


def backends() -> tuple[Backend, ...]:
    """All backends, the first choice first."""
    known = {**_found(), **_registered}
    return tuple(sorted(known.values(), key=lambda b: (-b.priority, b.name)))


def device_backend(name: str) -> DeviceBackend | None:
    """The backend of this name, if it takes arrays on a device."""
    found = next((b for b in backends() if b.name == name), None)
    return found if isinstance(found, DeviceBackend) else None


def refusals(backend: Backend, spec: Spec, *, backward: bool = False) -> tuple[Refusal, ...]:
    """Why a backend cannot run a problem; unless it says more, it takes arrays only."""
    reasons = backend.refusals(spec)
    if spec.device != "cpu" and not isinstance(backend, DeviceBackend):
        reasons = (Refusal(f"query is on {spec.device}", "arrays in main memory"), *reasons)
    if backward and not isinstance(backend, Differentiable):
        reasons = (NO_BACKWARD, *reasons)
    stored = stored_operands(spec)
    takes_stored = isinstance(backend, StoredRowsBackend) and backend.stored_rows
    if stored and (backward or not takes_stored):
        what = "gradients of arrays" if backward else "arrays of the query's dtype"
        reasons = (Refusal(" and ".join(stored), what), *reasons)
    return reasons


def stored_operands(spec: Spec) -> list[str]:
    """What lies in pages or is quantised, in words."""
    operands = ("key", spec.key_storage), ("value", spec.value_storage)
    return [f"{name} is {storage}" for name, storage in operands if storage is not None]


def choose(spec: Spec, name: str = "auto", *, backward: bool = False) -> Choice:
    """The backend that will run a problem; with `backward`, one that computes gradients too.

    Raises
    ------
    ArgumentError
        If no backend has this name.
    UnsupportedError
        If none can run the problem; the message has every backend's reason.
    """
    candidates = backends()
    if name != "auto":
        candidates = tuple(b for b in candidates if b.name == name)
        if not candidates:
            raise ArgumentError(
                f"there is no backend {name!r}.",
                [("backends", ", ".join(b.name for b in backends()))],
                'Use one of these, or backend="auto".',
            )
    refused: list[tuple[str, tuple[Refusal, ...]]] = []
    for backend in candidates:
        reasons = refusals(backend, spec, backward=backward)
        if not reasons:
            return Choice(backend, tuple(refused))
        refused.append((backend.name, reasons))
    which, advice = f"{name} cannot run", 'Pass backend="auto" to use one that can.'
    if name == "auto":
        which, advice = "no backend can run", "Change what is refused, or use another backend."
    reasons_of = [(n, "; ".join(map(str, reasons))) for n, reasons in refused]
    raise UnsupportedError(
        f"{which} this problem.", [("problem", describe(spec)), *reasons_of], advice
    )


def describe(spec: Spec) -> str:
    """A problem in one line."""
    stored = "".join(f", {text}" for text in stored_operands(spec))
    return (
        f"{spec.summary}, {spec.dtype}, batch {spec.batch_shape}, num_heads={spec.num_heads}, "
        f"num_kv_heads={spec.num_kv_heads}, q_len={spec.q_len}, kv_len={spec.kv_len}, "
        f"head_dim={spec.head_dim}, v_head_dim={spec.v_head_dim}{stored}"
    )
