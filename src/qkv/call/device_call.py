"""Calls of tensors that stay where they are: checked on their shapes, run by a device's backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.arrays import library_of
from qkv.backends import DeviceBackend, choose, conditions, device_backend
from qkv.backends.conditions import Conditions
from qkv.call.binding.bound import BoundCall, Structure
from qkv.call.binding.variant_arrays import check_given, made
from qkv.call.checked import CheckedCall, check_call, checked_problem
from qkv.errors import UnsupportedError
from qkv.partial import Partial
from qkv.problem.spec import Problem

__all__ = ["DeviceCall", "check_device_call", "is_device_call", "is_on_device",
           "names_device_backend", "read_by_lower"]  # fmt: skip

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class DeviceCall(CheckedCall):
    """A checked call whose arrays are tensors on a device.

    Attributes
    ----------
    bound : BoundCall
    """

    bound: BoundCall

    def attend(self, *, lse: bool) -> tuple[Any, Any]:
        """Output and, if wanted, lse as the caller knows them."""
        backend = self.choice.backend
        assert isinstance(backend, DeviceBackend)
        partial = backend.attend(self.problem, lse=lse)
        return self.output(partial), self.rows(partial.lse) if lse else None

    def run(self) -> Partial:
        """Output and lse as tensors, sinks included."""
        backend = self.choice.backend
        assert isinstance(backend, DeviceBackend)
        return backend.attend(self.problem, lse=True)

    def output(self, partial: Partial) -> Any:
        """Output like the query: its dtype and layout."""
        out: Any = partial.out
        out = out.to(self.bound.leaves[0].dtype)
        if self.ndim == 2:
            return out[0]
        return out.swapaxes(-3, -2).contiguous() if self.layout == "blhd" else out

    def rows(self, array: Any, trailing: int = 0) -> Any:
        """A statistic with as many dimensions as the call has, on its device."""
        if self.ndim == 2:
            array = array.reshape(array.shape[array.ndim - trailing - 1 :])
        if isinstance(array, np.ndarray):
            return self.library.restore(array).to(self.bound.leaves[0].device)
        return array

    def on_host(self) -> CheckedCall:
        """The same call of copies in main memory, for whatever looks at values."""
        if any(getattr(leaf, "is_meta", False) for leaf in self.bound.leaves):
            raise UnsupportedError(
                "tensors on meta have no values, and this looks at values.",
                action="Pass tensors with values.",
            )
        leaves = [leaf.detach().cpu() if is_on_device(leaf) else leaf for leaf in self.bound.leaves]
        structure = self.bound.structure
        if structure.options.backend == self.choice.backend.name:
            structure = structure._replace(options=structure.options._replace(backend="auto"))
        return check_call(BoundCall(structure, leaves))


def is_on_device(array: Any) -> bool:
    """Whether an array lies anywhere but in main memory, as far as torch knows."""
    device = getattr(array, "device", None)
    return getattr(device, "type", "cpu") != "cpu" and hasattr(array, "is_meta")


def is_device_call(bound: BoundCall) -> bool:
    """Whether a call is for the backend of a device."""
    return is_on_device(bound.leaves[0]) or names_device_backend(bound.structure)


def names_device_backend(structure: Structure) -> bool:
    """Whether a call asks for the backend of a device by its name."""
    name = structure.options.backend
    return name != "auto" and device_backend(name) is not None


def read_by_lower(bound: BoundCall) -> list[int]:
    """The leaves whose values `lower` of a variant reads, before any backend runs."""
    by_value = bound.structure.by_value
    if not by_value:
        return []
    owners = bound.unflatten().owners
    # The class itself has to declare it, since `lower` of a derived class may read values.
    return [n for n in by_value if n >= 3 and not vars(type(owners[n])).get("read_by_backend")]


def check_device_call(bound: BoundCall, given: Sequence[Any] | None = None) -> DeviceCall:
    """Check a bound call of tensors and choose its backend; operands are not looked at.

    A call like an earlier one, whose variants hold no arrays, is not checked again.

    Parameters
    ----------
    bound : BoundCall
    given : sequence, optional
        The variants as the caller gave them.
    """
    form = _form_of(bound) if given is None else None
    if form is None:
        device = getattr(bound.leaves[0].device, "type", "cpu")
        return _checked(bound, given, device)
    like = _checked_form(form)
    arrays = _operand_arrays(bound, like.layout)
    operands = replace(like.problem.operands, device_arrays=arrays)
    return replace(
        like,
        problem=Problem(like.problem.spec, operands),
        originals=tuple(bound.leaves),
        bound=bound,
    )


class _Form(NamedTuple):
    """What a check depends on where query, key and value are the only arrays."""

    structure: Structure
    library: str
    device: str
    operands: tuple[tuple[tuple[int, ...], Any], ...]
    conditions: Conditions


def _form_of(bound: BoundCall) -> _Form | None:
    """The form of a call; None where it does not say all that the call means."""
    if len(bound.leaves) != 3 or not bound.structure.is_known:
        return None
    if not all(type(leaf).__module__ == "torch" for leaf in bound.leaves):
        return None
    operands = tuple((tuple(leaf.shape), leaf.dtype) for leaf in bound.leaves)
    if not all(type(size) is int for shape, _ in operands for size in shape):
        return None  # A compiler's sizes.
    device = bound.leaves[0].device.type
    library = library_of(bound.leaves[0], "query").name
    form = _Form(bound.structure, library, device, operands, conditions())
    try:
        hash(form)
    except TypeError:
        return None
    return form


@lru_cache(maxsize=64)
def _checked_form(form: _Form) -> DeviceCall:
    """The checked call of tensors of this form, which it does not hold."""
    import torch

    leaves = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in form.operands]
    return _checked(BoundCall(form.structure, leaves), None, form.device)


def _checked(bound: BoundCall, given: Sequence[Any] | None, device: str) -> DeviceCall:
    library = library_of(bound.leaves[0], "query")
    by_lower = read_by_lower(bound)
    roles = bound.roles
    views = [library.described(leaf) for leaf in bound.leaves[:3]]
    for n, leaf in enumerate(bound.leaves[3:], start=3):
        views.append(library.on_host(leaf, roles[n], by_value=n in by_lower))
    call = bound._replace(leaves=views).unflatten()
    options, problem = call.options, checked_problem(call, library)
    spec = replace(problem.spec, library=library.name, device=device)
    arrays = _device_arrays(problem, bound, call.owners, views, options.layout)
    arrays |= _masks(problem, bound, views)
    return DeviceCall(
        replace(problem, spec=spec, operands=replace(problem.operands, device_arrays=arrays)),
        choose(spec, options.backend),
        library,
        views[0].dtype,
        options.layout,
        max(operand.ndim for operand in (call.query, call.key, call.value)),
        tuple(zip(call.variants if given is None else given, call.variants, strict=True)),
        call,
        tuple(views),
        tuple(bound.leaves),
        bound,
    )


def _operand_arrays(bound: BoundCall, layout: str) -> dict[str, Any]:
    """Query, key and value with heads before rows."""
    arrays: dict[str, Any] = {}
    for name, tensor in zip(("query", "key", "value"), bound.leaves, strict=False):
        if tensor.ndim == 2:
            arrays[name] = tensor[None]
        else:
            arrays[name] = tensor.swapaxes(-3, -2) if layout == "blhd" else tensor
    return arrays


def _device_arrays(
    problem: Problem, bound: BoundCall, owners: Sequence[Any], views: Sequence[Any], layout: str
) -> dict[str, Any]:
    """Operands with heads before rows, and leaves of tables and sinks that may have gradients."""
    arrays = _operand_arrays(bound, layout)
    operands = problem.operands
    origins = dict(operands.origins)
    if operands.sink_origin is not None:
        origins["sinks"] = operands.sink_origin
    floating = {
        name: origin
        for name, origin in origins.items()
        if name not in operands.tables or operands.tables[name].dtype.kind not in "biu"
    }
    for n, owner in enumerate(owners):
        if n >= 3 and owner is not None and getattr(bound.leaves[n], "requires_grad", False):
            own_origins = [origin for origin in floating.values() if made(origin, owner)]
            check_given(owner, own_origins, [views[n]] if own_origins else [])
    for name, origin in floating.items():
        own = [n for n, owner in enumerate(owners) if n >= 3 and made(origin, owner)]
        held = [bound.leaves[n] for n in own if origin.holds(views[n])]
        if held and hasattr(held[0], "requires_grad"):
            leaf = held[0].reshape(origin.source.shape)
            arrays[name] = (
                leaf
                if origin.broadcast_from is None
                else leaf.expand(origin.broadcast_shape).flatten()
            )
    return arrays


def _masks(problem: Problem, bound: BoundCall, views: Sequence[Any]) -> dict[str, Any]:
    """Boolean leaves that are read in place, as the tables that they are, also within `|` and `&`.

    Where torch hides their values, the views of them have none.
    """
    arrays: dict[str, Any] = {}
    for n, leaf in enumerate(bound.leaves):
        if n in bound.structure.by_value or views[n].dtype != bool or not hasattr(leaf, "is_meta"):
            continue
        shapes = {
            name: origin.array.shape
            for name, origin in problem.operands.origins.items()
            if origin.broadcast_from is None and origin.holds(views[n])
        }
        if not shapes:  # A class of the caller's has read the values, so torch has to know them.
            library_of(leaf, "a mask").on_host(leaf, bound.roles[n], by_value=True)
        arrays |= {name: leaf.reshape(shape) for name, shape in shapes.items()}
    return arrays
