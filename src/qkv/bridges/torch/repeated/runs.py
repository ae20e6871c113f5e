"""How prepared calls of NumPy arrays run on tensors: one pass, a decoding step, both passes.

Only types, shapes, strides and addresses are read. Compiled code takes the addresses of tensors,
and in decoding steps their sizes and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from qkv.arrays.addresses import quick_address_of
from qkv.backends import conditions
from qkv.bridges.torch.observers import looks_on
from qkv.bridges.torch.openmp import on_torch_threads
from qkv.bridges.torch.operands import as_tensor
from qkv.bridges.torch.operations import functions
from qkv.bridges.torch.repeated.guards import Guard, form_guard, gradient_guard, guard
from qkv.bridges.torch.repeated.layouts import ArrayValue, empty_maker, leaf_values
from qkv.bridges.torch.repeated.passes import PreparedPasses
from qkv.call.binding.bound import BoundCall
from qkv.call.repeated.cache import PreparedCall
from qkv.call.repeated.decoding import lengths_of_step, position
from qkv.process.forks import on_one_torch_thread

__all__ = ["Run", "Step", "run_of"]

Empty: TypeAlias = Callable[[], Tensor]


class Common(NamedTuple):
    """What is asked of calls before a run.

    Attributes
    ----------
    prepared : PreparedCall
    fits : Guard
        Whether the tensors that are read in place are like those that were prepared for.
    values : tuple of ArrayValue
        The other tensors.
    position : int or None
        That of the queries, if it is fixed.
    """

    prepared: PreparedCall
    fits: Guard
    values: tuple[ArrayValue, ...]
    position: int | None


class OnePass(NamedTuple):
    """A call of tensors of these sizes and strides; `run` and `is_brief` are of its `Prepared`."""

    common: Common
    run: Callable[..., bool]
    is_brief: bool
    empty_out: Empty
    empty_lse: Empty
    rows_first: bool

    def compute(self, bound: BoundCall, read: Sequence[Any], rows: bool) -> Any:
        """Output, with lse if `rows`, of a call that fits; None if something else does not.

        `read` are the leaves that are read in place.
        """
        _, run, is_brief, empty_out, empty_lse, rows_first = self
        query, key, value, *arrays = read
        at_query, at_key, at_value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if not (at_query and at_key and at_value):  # Their memory has been freed, as FSDP does.
            return None
        out = empty_out()
        lse = empty_lse() if rows else None
        at_out, at_lse = out.data_ptr(), 0 if lse is None else lse.data_ptr()
        addresses: tuple[int, ...] = at_query, at_key, at_value, at_out, at_lse
        if arrays:
            addresses = (*addresses, *[array.data_ptr() for array in arrays])
        if is_brief:
            done = run(addresses)
        else:
            with on_torch_threads():
                done = run(addresses, (read, out, lse))
        if not done:
            return None
        if rows_first:
            out = _with_rows_first(out)
        return out if lse is None else (out, lse)


class Step(NamedTuple):
    """A decoding step of tensors of any number of keys, any strides and any position.

    `run` and `brief_keys` are of its `Prepared`. `empty_rows_first` makes the output of models,
    (*batch, q_len, num_heads, dim), in memory in the order of `empty_out`. `lengths` are dtype and
    shape of the numbers of keys that each step brings as an array of NumPy, if it brings any.
    """

    common: Common
    run: Callable[..., bool]
    brief_keys: int
    q_len: int
    empty_out: Empty
    empty_lse: Empty
    empty_rows_first: Empty
    lengths: tuple[Any, ...] | None

    def compute(
        self,
        bound: BoundCall,
        read: Sequence[Any],
        rows: bool,
        span: tuple[int, int] | None = None,
    ) -> Any:
        """See `OnePass`. `span` says from which key to before which one, if not all are meant."""
        common, run, brief_keys, q_len, empty_out, empty_lse, _, lengths = self
        layouts = _layouts(read)
        if span is not None:
            of_query, to_query, of_key, to_key, of_value, *more = layouts
            of_key, of_value = _between(of_key, span), _between(of_value, span)
            layouts = of_query, to_query, of_key, to_key, of_value, *more
        kv_len = layouts[2][-2]
        if q_len == kv_len:  # Then the positions may be left out, which is another call.
            return None
        form: Any = common.prepared.step
        shift: Any = position(form, bound.structure.options.q_offset, q_len, kv_len)
        tables: tuple[Any, ...] = ()
        if lengths is not None:
            if _lengths_of(bound) != lengths:
                return None
            found = lengths_of_step(form, bound, read[0].shape[:-3], q_len, kv_len)
            if found is None:
                return None
            shift, tables = (shift if found[0] is None else found[0]), found[1]
        out = empty_out()
        lse = empty_lse() if rows else None
        addresses = _addresses(read, out, lse)
        if span is not None and span[0]:
            addresses = _addresses_from(addresses, read, span[0])
        for table in tables:  # They follow in memory without gaps.
            addresses = (*addresses, quick_address_of(table))
            layouts = (*layouts, table.shape, (1,))
        if kv_len <= brief_keys:
            done = run(addresses, (), layouts, shift, True)
        else:
            with on_torch_threads():
                done = run(addresses, (read, out, lse, tables), layouts, shift, True)
        if not done:
            return None
        return out if lse is None else (out, lse)

    def between_products(self, read: Sequence[Any], q_offset: int) -> Tensor | None:
        """Output of a step inside a model, for those who hold it: what else is said is the same.

        It is (batch, q_len, num_heads, v_head_dim). None if tensors or conditions are not as they
        were, or torch observes the step.
        """
        prepared, fits, *_ = self.common
        if looks_on() or prepared.conditions != conditions() or not fits(*read):
            return None
        out = self.empty_rows_first()
        addresses, layouts = _addresses(read, out, None), _layouts(read)
        done = self.run(addresses, (read, out), layouts, q_offset, True, True)
        return out if done else None


class BothPasses(NamedTuple):
    """A call of which gradients are wanted: its backward pass is neither looked up nor checked.

    `by_value` are copies of the leaves that are compared by value, as tensors.
    """

    common: Common
    by_value: Mapping[int, Tensor]
    passes: PreparedPasses

    def compute(self, bound: BoundCall, read: Sequence[Any], rows: bool) -> Any:
        """See `OnePass`."""
        if not torch.is_grad_enabled():
            return None
        structure, tensors = bound
        if self.by_value:  # In the call these may be arrays of another library.
            tensors = [self.by_value.get(n, leaf) for n, leaf in enumerate(tensors)]
        out, lse = functions.attend_prepared(tensors, structure, self.passes)
        return (out, lse) if rows else out


Run: TypeAlias = OnePass | Step | BothPasses


def run_of(
    prepared: PreparedCall, bound: BoundCall, read: Sequence[Tensor], wants_gradients: bool
) -> Run | None:
    """How a prepared call runs on tensors like these; None if it takes NumPy views."""
    if prepared.step is not None:
        return None if wants_gradients else _step(prepared, bound, read)
    values, given = leaf_values(bound), bound.structure.options.q_offset
    if values is None:
        return None
    fixed = given if type(given) is int else None
    if wants_gradients:
        by_value = {n: _copied(bound.leaves[n]) for n in bound.structure.by_value}
        passes = PreparedPasses(bound.structure, len(bound.leaves), prepared.prepared)
        return BothPasses(Common(prepared, gradient_guard(*read), values, fixed), by_value, passes)
    rows_first = bound.structure.layout == "blhd"
    makers = _makers([t.transpose(-3, -2) if rows_first else t for t in read[:3]])
    made, common = prepared.prepared, Common(prepared, guard(*read), values, fixed)
    return OnePass(common, made.run, bool(made.brief_keys), *makers, rows_first)


def _step(prepared: PreparedCall, bound: BoundCall, read: Sequence[Tensor]) -> Step | None:
    """The step, if it takes addresses, sizes and strides alone."""
    form, structure = prepared.step, bound.structure
    if form is None or not form.every_length:
        return None
    if structure.per_step or structure.layout != "bhld":
        return None
    lengths, values = None, leaf_values(bound)
    if form.lengths:
        lengths = _lengths_of(bound)
        if lengths is None or structure.by_value != structure.lengths:
            return None
        values = ()  # Each step has its own.
    if values is None:
        return None
    common, q_len = Common(prepared, form_guard(*read), values, None), read[0].shape[-2]
    empty_out, empty_lse = _makers(read)
    turned = empty_out().transpose(-3, -2)
    if q_len == 1:  # Memory is the same, and making it so needs no view.
        rows_first = empty_maker(turned.shape, turned.dtype)
    else:
        rows_first = partial(_turned, empty_out)
    made = prepared.prepared
    return Step(common, made.run, made.brief_keys, q_len, empty_out, empty_lse, rows_first, lengths)


def _lengths_of(bound: BoundCall) -> tuple[Any, ...] | None:
    """dtype and shape of the numbers of keys; None unless they are an array of NumPy."""
    lens = bound.leaves[bound.structure.lengths[0]]
    return (lens.dtype, lens.shape) if type(lens) is np.ndarray else None


@on_one_torch_thread
def _with_rows_first(out: Tensor) -> Tensor:
    return out.transpose(-3, -2).contiguous()


def _turned(empty: Empty) -> Tensor:
    return empty().transpose(-3, -2)


def _makers(operands: Sequence[Tensor]) -> tuple[Empty, Empty]:
    """Make the output and lse of these operands."""
    query, _, value = operands[:3]
    lead = np.broadcast_shapes(*[tuple(tensor.shape[:-3]) for tensor in operands[:3]])
    shape = *lead, *query.shape[-3:-1], value.shape[-1]
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    return empty_maker(shape, query.dtype), empty_maker(shape[:-1], wide)


def _copied(leaf: Any) -> Tensor:
    copy: Tensor = as_tensor(leaf).detach().clone()
    return copy


def _addresses(read: Sequence[Tensor], out: Tensor, lse: Tensor | None) -> tuple[int, ...]:
    """Where the leaves of a step and its results lie."""
    query, key, value, *arrays = read
    addresses: tuple[int, ...] = (
        query.data_ptr(), key.data_ptr(), value.data_ptr(),
        out.data_ptr(), 0 if lse is None else lse.data_ptr(),
    )  # fmt: skip
    return (*addresses, *[array.data_ptr() for array in arrays]) if arrays else addresses


def _layouts(read: Sequence[Tensor]) -> tuple[Sequence[int], ...]:
    """Sizes and strides of the leaves of a step."""
    query, key, value, *arrays = read
    layouts: tuple[Sequence[int], ...] = (
        query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride(),
    )  # fmt: skip
    for array in arrays:
        layouts = (*layouts, array.shape, array.stride())
    return layouts


def _between(sizes: Sequence[int], span: tuple[int, int]) -> tuple[int, ...]:
    """The sizes of the rows of `span`."""
    of_all = list(sizes)
    of_all[-2] = span[1] - span[0]
    return tuple(of_all)


def _addresses_from(
    addresses: tuple[int, ...], read: Sequence[Tensor], start: int
) -> tuple[int, ...]:
    """The same for keys and values from `start`; memory that has been freed stays at 0."""
    query, key, value, *more = addresses
    if key and value:
        key += start * read[1].stride(-2) * read[1].itemsize
        value += start * read[2].stride(-2) * read[2].itemsize
    return (query, key, value, *more)
