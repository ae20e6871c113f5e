"""Backends: the registry, and the choice of the one that runs a problem.

A backend is any object with the protocol of `Backend`. Each optional capability has a protocol of
its own: `Differentiable`, `TwiceDifferentiable`, `Inspectable`, `DeviceBackend`, and for repeated
calls `Preparing`. Backends of other packages are found through the entry point group
`qkv.backends`; see docs/add-a-backend.md.

cpu             compiled kernels; blocked: online softmax in NumPy; reference: whole matrices
torch           tensors on a device, by operations of torch or by kernels in Triton
protocols       what a backend may have
prepared_calls  what it prepares for repeated calls; conditions: how long that stays valid
entry_points    backends of other packages
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.backends.conditions import Conditions, backends_changed, conditions
from qkv.backends.entry_points import backend_entry_points
from qkv.backends.prepared_calls import (
    LONGEST_STEP,
    Passes,
    Prepared,
    ResultForm,
    array_at,
    array_reader,
)
from qkv.backends.protocols import (
    Backend,
    DeviceBackend,
    Differentiable,
    Inspectable,
    Preparing,
    Progress,
    Refusal,
    TwiceDifferentiable,
    WeightBlocks,
)
from qkv.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from qkv.partial import Partial, finish
from qkv.problem.backward import BackwardInputs
from qkv.problem.spec import Problem, Spec
from qkv.process.forks import importing

__all__ = [
    "LONGEST_STEP",
    "Backend",
    "BrokenBackendWarning",
    "Choice",
    "DeviceBackend",
    "Differentiable",
    "Inspectable",
    "Passes",
    "Prepared",
    "Preparing",
    "Progress",
    "Refusal",
    "ResultForm",
    "TwiceDifferentiable",
    "WeightBlocks",
    "array_at",
    "array_reader",
    "backends",
    "broken_backends",
    "choose",
    "conditions",
    "describe",
    "device_backend",
    "ensure_residuals",
    "refusals",
    "register",
    "unregister",
]

Array = NDArray[Any]

NO_BACKWARD = Refusal("has no backward pass", "the forward pass alone")


def ensure_residuals(
    problem: Problem, inputs: BackwardInputs, forward: Callable[[Problem], Partial]
) -> BackwardInputs:
    """`inputs`, with out, lse and lse_rest of one more forward pass if lse_rest is missing.

    `forward` must add up scores in the same order as the backward pass.
    """
    if inputs.of_part or inputs.lse_rest is not None:
        return inputs
    partial = finish(forward(problem), problem.operands.sinks)
    rest = np.zeros_like(partial.lse) if partial.lse_rest is None else partial.lse_rest
    out = partial.out if partial.unrounded is None else partial.unrounded
    return replace(inputs, out=out, lse=partial.lse, lse_rest=rest)


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that will run a problem, why others before it will not, and what held then."""

    backend: Backend
    refusals: tuple[tuple[str, tuple[Refusal, ...]], ...]
    conditions: Conditions


class BrokenBackendWarning(UserWarning):
    """A backend of another package cannot be loaded."""


_registered: dict[str, Backend] = {}
_broken: dict[str, str] = {}


@lru_cache(maxsize=1)
def _found() -> dict[str, Backend]:
    with importing():
        from qkv.backends.blocked import BlockedBackend
        from qkv.backends.cpu import CpuBackend
        from qkv.backends.reference import ReferenceBackend
        from qkv.backends.torch import TorchBackend
        from qkv.backends.torch.triton import TritonBackend

    known: dict[str, Backend] = {}
    own_kinds = CpuBackend, BlockedBackend, TorchBackend, TritonBackend, ReferenceBackend
    for own in (kind() for kind in own_kinds):
        known[own.name] = own
    for point in backend_entry_points():
        if point.name in known:
            continue
        try:
            made = point.load()()
            _check_protocol(made)
            if made.name in known:
                raise ArgumentError(
                    f"there is another backend of the name {made.name}.",
                    action="Give it a name of its own.",
                )
            known[made.name] = made
        except Exception as error:
            # A package that cannot be imported must not break calls that use other backends.
            _broken[point.name] = " ".join(f"{type(error).__name__}: {error}".split())
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


def register(backend: Backend) -> None:
    """Add a backend in this process, without an entry point."""
    _check_protocol(backend)
    _registered[backend.name] = backend
    backends_changed()


def _check_protocol(backend: Any) -> None:
    """Raise for what would break calls that look for a backend, those of others too."""
    kind = type(backend).__name__
    if isinstance(backend, type):
        raise ArgumentError(
            f"{backend.__name__} is a class, not a backend.",
            action=f"Make one: {backend.__name__}().",
        )
    if not isinstance(backend, Backend):
        raise ArgumentError(
            f"{kind} lacks a part of the backend protocol.",
            action="Give it name, priority, refusals, blocks, scratch_bytes and run.",
        )
    name: Any = backend.name
    if not isinstance(name, str) or name in ("", "auto"):
        raise ArgumentError(
            f"{kind} has the name {shown(name)}, by which no call could choose it.",
            action='Give it a word of its own, as name = "mine".',
        )
    priority: Any = backend.priority
    if not isinstance(priority, int | float) or priority != priority:
        raise ArgumentError(
            f"the backend {name} has the priority {shown(priority)}, not a number.",
            action="Give it one, as priority = 10; cpu has 100 and blocked 50.",
        )


def check_results(partial: Any, spec: Spec, backend: Backend) -> None:
    """Raise if a backend gives something else than the output and lse of the problem.

    Raises
    ------
    ArgumentError, ShapeError, DTypeError
        It gives no `Partial`, or arrays of other shapes, or lse in another type.
    """
    if not isinstance(partial, Partial):
        raise ArgumentError(
            f"the backend {backend.name} gives {type(partial).__name__}, not output and lse.",
            action="Return qkv.partial.Partial(out, lse) from its `run`.",
        )
    rows = (*spec.batch_shape, spec.num_heads, spec.q_len)
    wanted = {"output": (*rows, spec.v_head_dim), "lse": rows}
    found = {"output": partial.out.shape, "lse": partial.lse.shape}
    if found != wanted:
        raise ShapeError(
            f"the backend {backend.name} gives arrays of other shapes than the problem has.",
            [(n, f"{found[n]}, not {wanted[n]}") for n in wanted if found[n] != wanted[n]],
            "Return (*batch_shape, num_heads, q_len, v_head_dim), and lse without the last.",
        )
    if partial.lse.dtype != spec.compute_dtype:
        raise DTypeError(
            f"the backend {backend.name} gives lse as {partial.lse.dtype}; the problem is computed "
            f"in {spec.compute_dtype}.",
            action="Convert it, as in lse.astype(spec.compute_dtype).",
        )


def unregister(name: str) -> None:
    """Remove a backend that `register` added."""
    _registered.pop(name, None)
    backends_changed()


def backends() -> tuple[Backend, ...]:
    """All backends, the first choice first."""
    known = {**_found(), **_registered}
    return tuple(sorted(known.values(), key=lambda b: (-b.priority, b.name)))


def device_backend(name: str) -> DeviceBackend | None:
    """The backend of this name, if it takes arrays on a device."""
    backend = next((b for b in backends() if b.name == name), None)
    return backend if isinstance(backend, DeviceBackend) else None


def refusals(backend: Backend, spec: Spec, *, backward: bool = False) -> tuple[Refusal, ...]:
    """Why a backend cannot run a problem; an empty tuple if it can."""
    reasons = backend.refusals(spec)
    if spec.device != "cpu" and not isinstance(backend, DeviceBackend):
        reasons = (Refusal(f"query is on {spec.device}", "arrays in main memory"), *reasons)
    if backward and not isinstance(backend, Differentiable):
        reasons = (NO_BACKWARD, *reasons)
    stored = stored_operands(spec)
    takes_stored = getattr(backend, "stored_rows", False)
    if stored and (backward or not takes_stored):
        what = "gradients of arrays" if backward else "arrays of the query's dtype"
        reasons = (Refusal(" and ".join(stored), what), *reasons)
    return reasons


def stored_operands(spec: Spec) -> list[str]:
    """Descriptions of the operands that are paged or quantised."""
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
    held = conditions()
    candidates = backends()
    if not isinstance(name, str) or name != "auto":
        candidates = tuple(b for b in candidates if isinstance(name, str) and b.name == name)
        if not candidates:
            raise ArgumentError(
                f"there is no backend {shown(name)}.",
                [("backends", ", ".join(b.name for b in backends()))],
                'Use one of these, or backend="auto".',
            )
    refused: list[tuple[str, tuple[Refusal, ...]]] = []
    for backend in candidates:
        reasons = refusals(backend, spec, backward=backward)
        if not reasons:
            return Choice(backend, tuple(refused), held)
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
