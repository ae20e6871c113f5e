"""Backward passes made ready for arrays of one dtype, shape and strides: all but addresses.

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

from qkv.backends.cpu.backward.frame import fields_with
from qkv.backends.cpu.emit.argument_block import ArgumentBlock
from qkv.backends.cpu.emit.frame import WORD
from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.passes.arguments import word_index
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
from qkv.backends.cpu.prepared.placeholders import placeholder, without_values
from qkv.backends.cpu.prepared.stages import Rotate, RotateGradients, rotated_form
from qkv.problem.backward import BackwardInputs
from qkv.problem.spec import Problem

Array = NDArray[Any]

_READ = ("query", "key", "value", "out", "grad_out", "lse", "lse_rest", "grad_lse")
_WRITTEN = ("d_query", "query_partials", "d_key", "key_sums", "d_value", "value_sums")
_SHARED = ("scratch", "finished")


class PreparedBackward:
    """Takes arrays like those of one problem and one set of inputs."""

    def __init__(self, problem: Problem, inputs: BackwardInputs, arrays: tuple[Array, ...]) -> None:
        self._rotate = self._rotate_back = None
        if problem.spec.rotation:
            self._rotate = Rotate(problem)
            self._rotate_back = RotateGradients(problem, self._rotate.angles)
            problem = rotated_form(problem)
        problem, read = without_values(problem, arrays)
        spec = problem.spec
        self._pass = BackwardPass(
            problem, corrects_delta=False, names=(), out_dtype=inputs.out.dtype
        )
        self._kernel = self._pass.kernel()
        results = Results(problem, self._pass)
        self._outputs = _outputs_of(problem, results)
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

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        out: Array,
        lse: Array,
        lse_rest: Array,
        grad_out: Array,
        grad_lse: Array | None,
        arrays: Sequence[Array] = (),
    ) -> tuple[Array, Array, Array] | None:
        """Gradients of query, key and value; None if something is not as it was prepared for."""
        along_lse = self._zeros if grad_lse is None else grad_lse
        if np.isnan(lse_rest).any():
            return None
        if self._pass.splits_float32 and is_faint(grad_out, along_lse):
            return None
        finite = lse
        if not lse.min() > -np.inf:  # Some row has no key.
            if needs_delta_correction(lse):
                return None
            finite = np.where(np.isneginf(lse), lse.dtype.type(0), lse)
        finite, rest, along_lse = map(np.ascontiguousarray, (finite, lse_rest, along_lse))
        if self._rotate is not None:
            query, key = self._rotate.arrays(query, key)
        workers = self._pass.workers()
        gradients: list[Array] = []
        written: list[Array] = []
        for output in self._outputs:
            gradient, sums = output.allocate()
            gradients.append(gradient)
            written += (gradient, sums)
        size = self._scratch_bytes * workers
        scratch = take_scratch(size + self._finished_bytes)
        finished = scratch.address + size
        ctypes.memset(finished, 0, self._finished_bytes)
        held = query, key, value, out, grad_out, finite, rest, along_lse, *written
        block = self._blocks.take()
        words = block.words
        addresses = [*map(quick_address_of, held), scratch.address, finished]
        for word, address in zip(self._words, addresses, strict=True):
            words[word] = address
        for places, array in zip(self._read, arrays, strict=True):
            for word in places:
                words[word] = quick_address_of(array)
        block.keep_alive = scratch, held, arrays
        self._pass.launch(self._kernel, block, workers)
        block.keep_alive = ()
        self._blocks.give_back(block)
        return_scratch(scratch)
        d_query, d_key, d_value = gradients
        if self._rotate_back is not None:
            d_query, d_key = self._rotate_back.arrays(d_query, d_key)
        return d_query, d_key, d_value


class _Output(NamedTuple):
    """A gradient, and the sums of which it is rounded, unless these are the gradient itself."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sums: tuple[tuple[int, ...], np.dtype[Any]] | None
    new: Callable[[tuple[int, ...], np.dtype[Any]], Array]

    def allocate(self) -> tuple[Array, Array]:
        """Memory for the gradient, and for the sums."""
        gradient = self.new(self.shape, self.dtype)
        return gradient, gradient if self.sums is None else self.new(*self.sums)


def _outputs_of(problem: Problem, results: Results) -> list[_Output]:
    """Of query, key and value. Blocks of queries that see no key are left out, and have zeros."""
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
