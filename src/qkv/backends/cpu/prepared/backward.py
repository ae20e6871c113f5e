"""Gradients made ready for arrays of one dtype, shape and strides: all but addresses.

Only gradients of query, key and value, and only where one run of compiled code finds them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.addresses import quick_address_of
from qkv.backends import Prepared, ResultForm, array_reader
from qkv.backends.cpu.backward.layout import fields_with
from qkv.backends.cpu.emit.argument_block import WORD, ArgumentBlock, word_index
from qkv.backends.cpu.passes.backward import BackwardPass, gradient_dtype
from qkv.backends.cpu.passes.backward_arguments import (
    BackwardArguments,
    Results,
    areas_of,
    page_aligned_array,
    scratch_of,
)
from qkv.backends.cpu.passes.delta_correction import RowArrays
from qkv.backends.cpu.passes.gradient import is_faint, needs_delta_correction
from qkv.backends.cpu.passes.scratch import Pool, return_scratch, take_scratch
from qkv.backends.cpu.plan.kernel_spec import integer_bits
from qkv.backends.cpu.prepared.placeholders import placeholder, without_values
from qkv.backends.cpu.prepared.stages import Rotate, RotateGradients, rotated_form
from qkv.problem.backward import BackwardInputs
from qkv.problem.spec import Problem

Array = NDArray[Any]

_READ = ("query", "key", "value", "out", "grad_out", "lse", "lse_rest", "grad_lse")
_WRITTEN = ("d_query", "query_partials", "d_key", "key_sums", "d_value", "value_sums")
_SHARED = ("scratch", "finished")


class PassesOfGradients:
    """The passes of gradients along one set of inputs: rotate, the kernel, rotate back."""

    def __init__(self, problem: Problem, inputs: BackwardInputs, arrays: tuple[Array, ...]) -> None:
        self._rotate = self._rotate_back = None
        if problem.spec.rotation:
            self._rotate = Rotate.of(problem)
            self._rotate_back = RotateGradients(problem, self._rotate.angles)
            problem = rotated_form(problem)
        problem, read = without_values(problem, arrays)
        spec = problem.spec
        self._pass = BackwardPass(
            problem, corrects_delta=False, names=(), out_dtype=inputs.out.dtype,
            int_bits=integer_bits(problem, read),
        )  # fmt: skip
        self._kernel = self._pass.kernel()
        results = Results(problem, self._pass)
        self._outputs = _outputs_of(problem, results)
        self._writes_results = self._rotate is None and not any(o.sums for o in self._outputs)
        assert inputs.lse_rest is not None
        self._lse, self._rest, self._grad_out, self._grad_lse = map(
            _reader_of, (inputs.lse, inputs.lse_rest, inputs.grad_out, inputs.grad_lse)
        )
        inputs = replace(inputs, out=placeholder(inputs.out), grad_out=placeholder(inputs.grad_out))
        rows = RowArrays(problem, inputs, 0)
        # These zeros are the only array kept here that has an element for each row.
        self._zeros = np.zeros_like(rows.lse)
        rows.lse = rows.lse_rest = rows.grad_lse = rows.delta_rest = self._zeros
        self._template = BackwardArguments(
            problem, inputs, self._pass, _without_memory(results), rows, workers=0
        )
        fields = fields_with(tuple(areas_of(spec, self._pass.shape)))
        self._words = [word_index(name, fields) for name in (*_READ, *_WRITTEN, *_SHARED)]
        self._read = [list(map(self._template.word_of_table, tables)) for tables in read]
        self._scratch_bytes = scratch_of(spec, self._pass.shape)
        self._finished_bytes = spec.batch_size * spec.num_kv_heads * WORD
        self._blocks = Pool(lambda: ArgumentBlock(self._template.copy()))

    def prepared(self) -> Prepared:
        """The same as a record."""
        forms = [ResultForm(output.shape, output.dtype, output.new) for output in self._outputs]
        return Prepared(self._run, forms)

    def _run(self, addresses: Sequence[int], keep_alive: Any = ()) -> bool:
        """See `qkv.backends.Prepared`."""
        query, key, value, out, lse, lse_rest, grad_out, grad_lse, *more = addresses
        results, arrays = more[:3], more[3:]
        along_lse = self._grad_lse(grad_lse) if grad_lse else self._zeros
        rows, rest = self._lse(lse), self._rest(lse_rest)
        if np.isnan(rest).any():
            return False
        if self._pass.splits_float32 and is_faint(self._grad_out(grad_out), along_lse):
            return False
        if not rows.min() > -np.inf:  # Some row has no key.
            if needs_delta_correction(rows):
                return False
            rows = np.where(np.isneginf(rows), rows.dtype.type(0), rows)
        of_rows = list(map(np.ascontiguousarray, (rows, rest, along_lse)))
        rotated = None
        if self._rotate is not None:
            rotated = take_scratch(self._rotate.bytes)
            query, key = self._rotate(query, key, rotated.address, keep_alive)
        d_query, d_key, d_value = results
        computed = [d_query, d_query, d_key, d_key, d_value, d_value]
        held: list[Array] = []
        if not self._writes_results:
            computed, held = self._written(results)
        workers = self._pass.workers()
        size = self._scratch_bytes * workers
        scratch = take_scratch(size + self._finished_bytes)
        finished = scratch.address + size
        ctypes.memset(finished, 0, self._finished_bytes)
        block = self._blocks.take()
        words, at_rows = block.words, map(quick_address_of, of_rows)
        written = query, key, value, out, grad_out, *at_rows, *computed, scratch.address, finished
        for word, address in zip(self._words, written, strict=True):
            words[word] = address
        for places, address in zip(self._read, arrays, strict=True):
            for word in places:
                words[word] = address
        block.keep_alive = scratch, rotated, keep_alive, of_rows, held
        self._pass.launch(self._kernel, block, workers)
        block.keep_alive = ()
        self._blocks.give_back(block)
        return_scratch(scratch)
        if self._rotate_back is not None:
            self._rotate_back(computed[0], computed[2], results[0], results[1], held)
        if rotated is not None:
            return_scratch(rotated)
        return True

    def _written(self, results: Sequence[int]) -> tuple[list[int], list[Array]]:
        """The addresses that the kernel writes to, and what owns those that are not results.

        Each gradient is followed by the sums of which it is rounded, unless these are itself.
        """
        addresses: list[int] = []
        held: list[Array] = []
        for n, (output, result) in enumerate(zip(self._outputs, results, strict=True)):
            address = result
            if self._rotate_back is not None and n < 2:  # It is rotated into the result.
                held.append(output.new(output.shape, output.dtype))
                address = quick_address_of(held[-1])
            sums = address
            if output.sums is not None:
                held.append(output.new(*output.sums))
                sums = quick_address_of(held[-1])
            addresses += address, sums
        return addresses, held


def _reader_of(array: Array) -> Callable[[int], Array]:
    """Gives the array at another address with this layout."""
    strides = None if array.flags.c_contiguous else array.strides
    return array_reader(ResultForm(array.shape, array.dtype), strides)


class _Output(NamedTuple):
    """A gradient, and the sums of which it is rounded, unless these are the gradient itself."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sums: tuple[tuple[int, ...], np.dtype[Any]] | None
    new: Callable[[tuple[int, ...], np.dtype[Any]], Array]


def _outputs_of(problem: Problem, results: Results) -> list[_Output]:
    """The outputs for the gradients of query, key and value.

    Blocks of queries that see no key are left out, and have zeros.
    """
    outputs = []
    for name, name_of_sums, new in (
        ("query", "query_partials", np.zeros),
        ("key", "key_sums", page_aligned_array),
        ("value", "value_sums", page_aligned_array),
    ):
        gradient, sums = getattr(results, name), getattr(results, name_of_sums)
        is_apart = not np.may_share_memory(gradient, sums)
        shape = getattr(problem.operands, name).shape
        form = (sums.shape, sums.dtype) if is_apart else None
        outputs.append(_Output(shape, gradient.dtype, form, new))
    return outputs


def _without_memory(results: Results) -> Results:
    """Results of the same shapes and strides without memory."""
    forms = copy(results)
    for name in ("query", "query_partials"):
        setattr(forms, name, placeholder(getattr(results, name)))
    for name in ("key", "value"):
        gradient, sums = getattr(results, name), getattr(results, f"{name}_sums")
        form = placeholder(gradient)
        setattr(forms, name, form)
        setattr(forms, f"{name}_sums", form if sums is gradient else placeholder(sums))
    return forms


def is_preparable(problem: Problem, inputs: BackwardInputs) -> bool:
    """Whether one run of compiled code finds these gradients, in arrays of their own type."""
    compute, rest = problem.spec.compute_dtype, inputs.lse_rest
    return (
        rest is not None
        and compute == rest.dtype == inputs.lse.dtype
        and not needs_delta_correction(inputs.lse)
        and gradient_dtype(problem) == problem.operands.query.dtype
    )
