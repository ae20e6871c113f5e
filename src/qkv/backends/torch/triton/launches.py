"""The kernels of one problem, launched on its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import ceil
from threading import Lock
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from qkv.backends.torch.triton.blocks import (
    Blocks,
    backward_blocks,
    forward_blocks,
    is_large,
    is_wide,
    packed_heads,
    padded,
)
from qkv.backends.torch.triton.expressions import Expressions, expressions_of
from qkv.backends.torch.triton.kernels.backward import (
    deltas,
    gradients_of_keys,
    gradients_of_queries,
)
from qkv.backends.torch.triton.kernels.forward import combine, forward, spoiled_blocks
from qkv.backends.torch.triton.schedule import Schedule, schedule
from qkv.backends.torch.triton.tables import hold
from qkv.problem.spec import Problem

__all__ = ["Forward", "Launches", "is_interpreted"]

_COMBINED = 16
"""Rows that one program of `combine` and of `deltas` takes."""

_INTERPRETING = Lock()
"""Triton's interpreter knows one program at a time, whatever thread runs it."""

_TYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}


@dataclass(frozen=True, slots=True)
class Forward:
    """What the forward pass gives; weights are `exp(score - row_max) / row_sum`."""

    out: Tensor
    lse: Tensor
    row_max: Tensor
    row_sum: Tensor


@dataclass(frozen=True, slots=True)
class Launches:
    """One problem with one leading dimension and rotated operands, made ready for kernels.

    `problem` holds no operands, which torch keeps for as long as it needs them.
    """

    problem: Problem
    device: torch.device
    expressions: Expressions

    @classmethod
    def of(cls, problem: Problem, device: torch.device) -> Launches:
        given = problem.operands.device_arrays
        held = {n: t for n, t in given.items() if n not in ("query", "key", "value")}
        return cls(
            Problem(problem.spec, replace(problem.operands, device_arrays=held)),
            device,
            expressions_of(problem, device),
        )

    def forward(self, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> Forward:
        """Output in `dtype`, and rows in float32."""
        spec = self.problem.spec
        query, key, value = _operands(inputs)
        sinks = inputs.get("sinks")
        blocks = forward_blocks(spec, large=is_large(self.device))
        packed = packed_heads(spec)
        tiles = self._schedule(blocks.block_q // packed, blocks.block_kv, packed_heads=packed)
        q_blocks = ceil(spec.q_len / (blocks.block_q // packed))
        programs = spec.batch_size * spec.num_heads // packed * q_blocks
        splits = self._splits(programs, ceil(spec.kv_len / blocks.block_kv))
        rows = spec.batch_size, spec.num_heads, spec.q_len
        out = torch.empty(*rows, spec.v_head_dim, dtype=dtype, device=self.device)
        lse, row_max, row_sum = (
            torch.empty(rows, dtype=torch.float32, device=self.device) for _ in range(3)
        )
        found = Forward(out, lse, row_max, row_sum)
        written = found if splits == 1 else self._parts(splits, found)
        # Pointers that a kernel does not read are those of any tensor.
        sink_rows = row_max if sinks is None else sinks
        constants = self._constants() | {
            "has_sinks": sinks is not None, "is_split": splits > 1, "packed_heads": packed,
        }  # fmt: skip
        with self._on_device():
            flags = self._spoiled(value, blocks.block_kv)
            for run in self._runs(blocks):
                forward[(programs * splits,)](
                    query, key, value, written.out, lse, written.row_max, written.row_sum,
                    sink_rows, flags, tiles.counts, tiles.tiles,
                    *self.expressions.arguments, *map(_strides, (query, key, value)), tiles.strides,
                    *self._sizes(q_blocks), splits, *self._dropout(), **constants, **run,
                )  # fmt: skip
            if splits > 1:
                count = out.numel() // spec.v_head_dim
                combine[(ceil(count / _COMBINED),)](
                    written.out, written.row_max, written.row_sum, out, lse, row_max, row_sum,
                    sink_rows, count, spec.q_len, spec.num_heads, splits,
                    has_sinks=sinks is not None, v_head_dim=spec.v_head_dim,
                    padded_v_dim=padded(spec.v_head_dim), BLOCK=_COMBINED,
                )  # fmt: skip
        return found

    def deltas(self, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Tensor:
        """`out . grad_out - grad_lse` of each row."""
        delta = torch.empty(out.shape[:-1], dtype=torch.float32, device=self.device)
        has_lse, width = grad_lse is not None, out.shape[-1]
        with self._on_device():
            deltas[(ceil(delta.numel() / _COMBINED),)](
                out, grad_out, grad_lse.contiguous() if grad_lse is not None else delta, delta,
                delta.numel(), has_lse, width, padded(width), is_interpreted(), _COMBINED,
            )  # fmt: skip
        return delta

    def backward(
        self,
        inputs: Mapping[str, Tensor],
        grad_out: Tensor,
        row_max: Tensor,
        row_sum: Tensor,
        delta: Tensor,
    ) -> dict[str, Tensor | None]:
        """Gradients of query, key and value; `grad_out` is contiguous and has the type of value."""
        spec = self.problem.spec
        query, key, value = _operands(inputs)
        gradients = [
            torch.empty(t.shape, dtype=t.dtype, device=self.device) for t in (query, key, value)
        ]
        # The gradients of scores may be too small for float16, not for bfloat16.
        factors = spec.dtype if spec.dtype == "bfloat16" and not is_wide(spec) else "float32"
        constants = self._constants() | {
            "slope": self.expressions.functions.slope, "factor_type": _TYPES[factors],
        }  # fmt: skip
        rows = row_max, row_sum, delta
        strides = *self.expressions.arguments, *map(_strides, (query, key, value))
        with self._on_device():
            blocks = backward_blocks(spec, of_keys=False, large=is_large(self.device))
            tiles = self._schedule(blocks.block_q, blocks.block_kv)
            count = ceil(spec.q_len / blocks.block_q)
            flags = self._spoiled(key, blocks.block_kv)
            for run in self._runs(blocks):
                gradients_of_queries[(spec.batch_size * spec.num_heads * count,)](
                    query, key, value, grad_out, gradients[0], *rows, flags, tiles.counts,
                    tiles.tiles, *strides, tiles.strides, *self._sizes(count), *self._dropout(),
                    **constants, **run,
                )  # fmt: skip
            blocks = backward_blocks(spec, of_keys=True, large=is_large(self.device))
            tiles = self._schedule(blocks.block_q, blocks.block_kv, of_keys=True)
            count = ceil(spec.kv_len / blocks.block_kv)
            of_rows = [self._spoiled(t, blocks.block_q) for t in (query, grad_out)]
            for run in self._runs(blocks):
                gradients_of_keys[(spec.batch_size * spec.num_kv_heads * count,)](
                    query, key, value, grad_out, gradients[1], gradients[2], *rows, *of_rows,
                    tiles.counts, tiles.tiles, *strides, tiles.strides,
                    *self._sizes(count), *self._dropout(), **constants, **run,
                )  # fmt: skip
        return dict(zip(("query", "key", "value"), gradients, strict=True))

    def _runs(self, blocks: Blocks) -> list[dict[str, Any]]:
        """How a kernel is run. The second time, which selects, hardly ever has work.

        Without reading ahead, and with the registers of more warps, it compiles faster.
        """
        tile = {"BLOCK_Q": blocks.block_q, "BLOCK_KV": blocks.block_kv}
        runs = [tile | {"selects": False, "stages": blocks.stages, "num_warps": blocks.warps}]
        if self.problem.spec.may_forbid:
            runs.append(tile | {"selects": True, "stages": 1, "num_warps": 8})
        return runs

    def _constants(self) -> dict[str, Any]:
        """What every kernel is compiled for."""
        spec, own = self.problem.spec, self.expressions.functions
        return {
            "modify": own.modify, "allows": own.allows,
            "modifies": own.modifies, "masks": own.masks,
            "has_dropout": spec.dropout, "group_size": spec.group_size,
            "head_dim": spec.head_dim, "v_head_dim": spec.v_head_dim,
            "padded_dim": padded(spec.head_dim), "padded_v_dim": padded(spec.v_head_dim),
            "precision": self._precision(),
            "widened": is_interpreted(),
            "index_type": self._index_type(),
        }  # fmt: skip

    def _precision(self) -> str:
        """How factors of float32 are multiplied.

        Of 16-bit problems those are rotated rows, whose digits count, or gradients of scores, of
        which as many digits are kept as float16 has.
        """
        spec = self.problem.spec
        if spec.dtype == "float32":
            return "ieee"
        return "tf32x3" if is_wide(spec) else "tf32"

    def _schedule(self, block_q: int, block_kv: int, **options: Any) -> Schedule:
        tiles = schedule(self.problem, block_q, block_kv, self.device, **options)
        hold(tiles.counts, tiles.tiles, *self.expressions.tables)
        return tiles

    def _sizes(self, blocks: int) -> tuple[Any, ...]:
        spec = self.problem.spec
        return self.problem.operands.scale, spec.q_len, spec.kv_len, spec.num_heads, blocks

    def _dropout(self) -> tuple[Any, ...]:
        """Seed, the smallest word that is kept, and the factor of what is kept."""
        dropout = self.problem.operands.dropout
        if dropout is None:
            return 0, 0, 1.0
        seed = int(np.uint64(dropout.seed).astype(np.int64))
        return seed, ceil(dropout.p * 2.0**32), 1 / (1 - dropout.p)

    def _index_type(self) -> Any:
        return tl.int64 if self.expressions.index == "int64" else tl.int32

    def _spoiled(self, rows: Tensor, block: int) -> Tensor:
        """Which blocks of rows hold numbers that are not finite, where a pair may be forbidden."""
        count = ceil(rows.shape[-2] / block)
        spoiled = torch.empty(*rows.shape[:2], count, dtype=torch.int32, device=self.device)
        spec = self.problem.spec
        if spec.may_forbid:
            spoiled_blocks[(spoiled.numel(),)](
                rows, _strides(rows), spoiled, rows.shape[-2], rows.shape[1], rows.shape[-1],
                padded(rows.shape[-1]), block,
                self._index_type(),
            )  # fmt: skip
        return spoiled

    def _parts(self, splits: int, found: Forward) -> Forward:
        parts = (
            torch.empty(splits, *t.shape, dtype=torch.float32, device=self.device)
            for t in (found.out, found.row_max, found.row_sum)
        )
        out, row_max, row_sum = parts
        return Forward(out, found.lse, row_max, row_sum)

    def _splits(self, programs: int, kv_blocks: int) -> int:
        """Into how many parts the keys go, so that all processors have work."""
        processors = 4  # Of the interpreter, which has none; parts are to be tested too.
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        return max(1, min(2 * processors // programs, kv_blocks // 2))

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else _INTERPRETING


def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, as `TRITON_INTERPRET=1` asks."""
    return not hasattr(forward, "cache_hook") and type(forward).__name__ == "InterpretedFunction"


def _operands(inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Query, key and value, with the entries of each row next to one another."""
    return [
        rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
        for rows in (inputs[name] for name in ("query", "key", "value"))
    ]


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride()[:3]
