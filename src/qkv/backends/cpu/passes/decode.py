"""When the decode kernel is used, how a step is shared out among threads, and its arguments."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.backends.cpu.compiler.compile import Code, EmitFunction, Kernel, build
from qkv.backends.cpu.decode.layout import (
    FIELDS,
    DecodeKey,
    page_fields,
    panel_of,
    record_bytes,
    scratch_bytes,
    shared_bytes,
    shared_modules,
)
from qkv.backends.cpu.emit.argument_block import LIMIT, ArgumentBlock, word_index
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.passes.arguments import Arguments, batch_stride, rotated_operands
from qkv.backends.cpu.passes.scratch import BriefJob, return_scratch, take_scratch
from qkv.backends.cpu.passes.workers import Workload, alone_operations
from qkv.backends.cpu.plan.kernel_spec import integer_bits, kernel_spec
from qkv.partial import Partial, RowStatistics
from qkv.problem.spec import Problem, Spec
from qkv.problem.stored_rows import Rows, StoredRows
from qkv.process.threads import get_num_threads

_EMIT = EmitFunction("qkv.backends.cpu.decode.kernel", "emit_decode")

Array = NDArray[Any]

_ROWS_OF_A_READ = 8
"""Number of rows of Q whose products take about as long as reading K and V."""
_BRIEF_STEP = 2.0
"""How many times as much work as in other passes is brief: reading K and V from main memory takes
half of the time that `_ROWS_OF_A_READ` stands for."""
_BETWEEN_PRODUCTS = 4
"""How many times as much work one thread does alone while threads of another library spin on the
other cores, waiting for their next product: our threads would have to share these cores."""
_SCRATCH, _SHARED, _NOT_FINITE, _WORKERS = (
    word_index(name, FIELDS) for name in ("scratch", "shared", "not_finite", "workers")
)


class DecodeKernel(Kernel):
    """The job of a decoding step, and `step`, which plans it and also runs it if it is short."""

    def __init__(self, code: Code) -> None:
        super().__init__(code)
        signature = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64
        self.step_address = code.address("step")
        self.step = ctypes.CFUNCTYPE(*signature)(self.step_address)
        self.brief_step = ctypes.PYFUNCTYPE(*signature)(self.step_address)
        """The same function without releasing Python's lock."""


class Share(NamedTuple):
    """How one step is shared out among threads.

    Attributes
    ----------
    keys : int
        Keys to read, over all kv heads of the batch.
    brief : bool
        Whether Python may stay locked.
    alone : int
        Keys that one thread reads without asking others.
    workers : int
        Threads, if there are more keys than that.
    workers_bytes, scratch_bytes : int
        Scratch memory of the workers, without and with what they share.
    """

    keys: int
    brief: bool
    alone: int
    workers: int
    workers_bytes: int
    scratch_bytes: int


class DecodePass:
    """The kernel for one kind of rows and any number of keys, and how its work is shared out."""

    def __init__(
        self, problem: Problem, *, statistics: bool = False, int_bits: int | None = None
    ) -> None:
        spec = problem.spec
        shape = host().shape_of(spec.compute_dtype)
        # Sinks scale the output afterwards: round to the type of storage only then.
        self.out_dtype = spec.compute_dtype if spec.sinks else np.dtype(spec.dtype)
        key = DecodeKey(
            kernel_spec(spec),
            shape,
            int_bits or integer_bits(problem),
            *_types_as_read(spec),
            self.out_dtype.name,
            statistics,
        )
        self.kernel = _kernel(key, host())
        self.scratch_bytes = scratch_bytes(spec, shape)
        """Bytes of scratch memory that one worker needs."""
        self._record_bytes = record_bytes(spec, shape)
        self._groups = spec.batch_size * spec.num_kv_heads
        rows = max(spec.group_size * spec.q_len, _ROWS_OF_A_READ)
        self._operations = 2.0 * (spec.head_dim + spec.v_head_dim) * rows
        brief, alone, one_slice = alone_operations()
        self._brief_keys = int(_BRIEF_STEP * brief / self._operations)
        self._alone_keys = int(alone / self._operations)
        self._slice_keys = int(one_slice / self._operations)
        self._latest: tuple[int, Share | None] = -1, None

    def share(self, kv_len: int, *, between_products: bool = False) -> Share:
        """How a step over so many keys is shared out.

        `between_products` says that the threads of another library have just worked and will soon
        again, as around the layers of a model.
        """
        latest, share = self._latest
        if kv_len == latest and share is not None:
            return share
        keys = self._groups * kv_len
        alone = self._alone_keys * (_BETWEEN_PRODUCTS if between_products else 1)
        workers = 1
        if keys > alone:
            threads = get_num_threads()
            workers = self._workload(keys, keys).workers(threads)
            if threads == 1:
                alone = self._slice_keys
        own = self.scratch_bytes * workers
        total = own + shared_bytes(self._groups, kv_len, self._record_bytes)
        share = Share(keys, keys <= self._brief_keys, alone, workers, own, total)
        if keys <= self._alone_keys:  # However many threads there are.
            self._latest = kv_len, share
        return share

    def brief_job(self, kv_len: int | None = None) -> BriefJob | None:
        """The whole step as one job, if it is brief; for any number of keys, those that are."""
        most_keys = self._brief_keys // self._groups if kv_len is None else kv_len
        share = self.share(most_keys)
        if not share.brief:
            return None
        scratch = (_SCRATCH, 0), (_SHARED, share.workers_bytes)
        job = self.kernel.step_address, share.keys, share.scratch_bytes
        return BriefJob(*job, scratch, most_keys)

    def run(self, block: ArgumentBlock, share: Share, keep_alive: object) -> bool:
        """Plan and compute a step; returns whether the output is known to be finite.

        `keep_alive` owns what the addresses in the block point to.
        """
        scratch = take_scratch(share.scratch_bytes)
        words = block.words
        words[_SCRATCH] = scratch.address
        words[_SHARED] = scratch.address + share.workers_bytes
        if share.brief:
            self.kernel.brief_step(block.pointer, share.keys)
        else:
            keys = self.kernel.step(block.pointer, share.alone)
            if keys > share.alone:
                block.keep_alive = scratch, keep_alive
                planned = self._workload(keys, words[LIMIT])
                words[_WORKERS] = min(share.workers, planned.workers())
                planned.run(self.kernel, block, words[_WORKERS])
                block.keep_alive = ()
        return_scratch(scratch)
        if words[_NOT_FINITE]:
            words[_NOT_FINITE] = 0
            return False
        return True

    def _workload(self, keys: int, tasks: int) -> Workload:
        return Workload(tasks, self._operations * keys)


def _types_as_read(spec: Spec) -> tuple[tuple[str, str, str], tuple[bool, bool]]:
    """Types of query, key and value as the kernel reads them, and whether the last two are paged.

    Rotated queries and keys are arrays in the type of computation.
    """
    key, value = spec.key_storage, spec.value_storage
    query_dtype = key_dtype = spec.dtype
    if spec.rotation is not None:
        key, query_dtype = None, spec.compute_dtype.name
        key_dtype = query_dtype
    dtypes = (query_dtype, key.dtype if key else key_dtype, value.dtype if value else spec.dtype)
    return dtypes, (key is not None and key.paged, value is not None and value.paged)


@lru_cache(maxsize=256)
def _kernel(key: DecodeKey, here: Host) -> DecodeKernel:
    return DecodeKernel(build(_EMIT, (key,), here, ("job", "step"), shared_modules(key)))


def decode_bytes(spec: Spec, shape: TileShape, workers: int) -> int:
    """Memory of a pass beyond operands and output: scratch of the workers, and what they share."""
    groups = spec.batch_size * spec.num_kv_heads
    shared = shared_bytes(groups, spec.kv_len, record_bytes(spec, shape))
    return workers * scratch_bytes(spec, shape) + shared


class DecodeArguments(Arguments):
    """The words of one pass of few queries; scratch is taken when it runs."""

    def __init__(
        self, problem: Problem, result: Partial, statistics: RowStatistics | None = None
    ) -> None:
        super().__init__(problem, FIELDS)
        spec = problem.spec
        per_worker = scratch_bytes(spec, host().shape_of(spec.compute_dtype))
        fields = {
            **dict.fromkeys(FIELDS, 0),
            **self._common_fields(np.empty(0, np.int64), per_worker, 0),
            "scale": self._real_bits(problem.operands.scale),
            "batch_size": spec.batch_size,
            "num_kv_heads": spec.num_kv_heads,
            "rows": spec.group_size * spec.q_len,
            "panel": panel_of(spec),
            "workers": 1,
            "out": self._address(result.out),
            "lse": self._address(result.lse),
            **self._statistics_fields(statistics),
        }
        query, key = rotated_operands(problem)
        fields |= self._operand_fields("query", query)
        fields |= self._row_fields("key", key) | self._row_fields("value", problem.operands.value)
        self._write(fields)

    def _operand_fields(self, name: str, array: Array) -> dict[str, int]:
        *lead, head, row, element = array.strides
        batch = batch_stride(self._problem.spec.batch_shape, lead)
        if batch is None:
            return super()._operand_fields(name, array)
        return {
            name: self._address(array),
            f"{name}_batches": 0,
            f"{name}_batch": batch,
            f"{name}_head": head,
            f"{name}_row": row,
            f"{name}_element": element,
        }

    def _row_fields(self, name: str, rows: Rows) -> dict[str, int]:
        """Keys or values, and their scales and pages if they have any."""
        if not isinstance(rows, StoredRows):
            return self._operand_fields(name, rows)
        parts = {name: rows.values}
        if rows.scales is not None:
            parts[f"{name}_scales"] = rows.scales[..., None]
        fields: dict[str, int] = {}
        for part, array in parts.items():
            if rows.page_table is None:
                fields |= self._operand_fields(part, array)
                continue
            fields |= self._operand_fields(part, array[0])
            table, slots = self._address(rows.page_table), rows.page_table.shape[-1]
            sizes = array.strides[0], rows.page_size, table, slots
            fields |= zip(page_fields(part), sizes, strict=True)
        return fields
