"""Backward passes made ready for arrays of one dtype, shape and strides: all but addresses.

Only gradients of query, key and value, and only where one run of compiled code finds them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.backward.frame import fields_with
from qkv.backends.cpu.emit.frame import WORD
from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.machine.host import isa_setting
from qkv.backends.cpu.passes.arguments import word_index
from qkv.backends.cpu.passes.backward import BackwardPass, gradient_dtype
from qkv.backends.cpu.passes.backward_arguments import (
    BackwardArguments,
    Results,
    areas_of,
    scratch_of,
)
from qkv.backends.cpu.passes.delta_correction import RowArrays
from qkv.backends.cpu.passes.gradient import is_faint, needs_delta_correction
from qkv.backends.cpu.passes.scratch import ArgumentBlock, return_scratch, take_scratch
from qkv.backends.cpu.prepared.placeholders import placeholder, without_values
from qkv.problem.backward import BackwardInputs
from qkv.problem.spec import Problem

Array = NDArray[Any]

_READ = ("query", "key", "value", "out", "grad_out", "lse", "lse_rest", "grad_lse")
_WRITTEN = ("d_query", "query_partials", "d_key", "key_sums", "d_value", "value_sums")
_SHARED = ("scratch", "finished")


class PreparedBackward:
    """Takes arrays like those of one problem and one set of inputs."""

    def __init__(self, problem: Problem, inputs: BackwardInputs, arrays: tuple[Array, ...]) -> None:
        problem, read = without_values(problem, arrays)
        spec = problem.spec
        self._isa = isa_setting()
        self._pass = BackwardPass(
            problem, corrects_delta=False, names=(), out_dtype=inputs.out.dtype
        )
        self._kernel = self._pass.kernel()
        self._results = _without_memory(Results(problem, self._pass))
        inputs = replace(inputs, out=placeholder(inputs.out), grad_out=placeholder(inputs.grad_out))
        rows = RowArrays(problem, inputs, 0)
        # These zeros are the only array kept here that has an element for each row.
        self._zeros = np.zeros_like(rows.lse)
        rows.lse = rows.lse_rest = rows.grad_lse = rows.delta_rest = self._zeros
        self._template = BackwardArguments(
            problem, inputs, self._pass, self._results, rows, workers=0
        )
        fields = fields_with(tuple(areas_of(spec, self._pass.shape)))
        self._words = [word_index(name, fields) for name in (*_READ, *_WRITTEN, *_SHARED)]
        self._read = [list(map(self._template.word_of_table, tables)) for tables in read]
        self._scratch_bytes = scratch_of(spec, self._pass.shape)
        self._finished_bytes = spec.batch_size * spec.num_kv_heads * WORD
        self._blocks: list[ArgumentBlock] = []

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
        is_unprepared = np.isnan(lse_rest).any() or needs_delta_correction(lse)
        if is_unprepared or isa_setting() != self._isa:
            return None
        if self._pass.splits_float32 and is_faint(grad_out, along_lse):
            return None
        finite = np.where(np.isneginf(lse), lse.dtype.type(0), lse)
        finite, rest, along_lse = map(np.ascontiguousarray, (finite, lse_rest, along_lse))
        results, workers = self._results.renewed(), self._pass.workers()
        size = self._scratch_bytes * workers
        scratch = take_scratch(size + self._finished_bytes)
        finished = scratch.address + size
        ctypes.memset(finished, 0, self._finished_bytes)
        held = (
            query, key, value, out, grad_out, finite, rest, along_lse,
            results.query, results.query_partials, results.key, results.key_sums,
            results.value, results.value_sums,
        )  # fmt: skip
        try:
            block = self._blocks.pop()
        except IndexError:
            block = ArgumentBlock(self._template.copy())
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
        self._blocks.append(block)
        return_scratch(scratch)
        found = results.finish()
        return found.query, found.key, found.value


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
