"""Compile the kernels of some calls for a GPU that need not be there, to Triton's first form.

Triton's interpreter knows neither the types of arguments nor which of them become constants.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver, jit

import qkv
import qkv.backends.torch.triton as backend


class Compiled(Exception):
    """A kernel has passed Triton's types."""


class Absent:
    """A driver of a GPU of which nothing but its kind is asked."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0


GRIDS: list[tuple[int, ...]] = []


def compile_only(run: Callable[..., Any]) -> Callable[..., None]:
    """Launches that compile and do not run."""

    def launch(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        GRIDS.append(grid)
        try:
            run(self, *args, grid=grid, warmup=True, **kwargs)
        except Compiled:
            pass
        else:
            raise AssertionError("no kernel was compiled")

    return launch


def stop(*_: Any) -> None:
    raise Compiled


def attend(*variants: Any, heads: int = 4, q_len: int = 20, dtype: Any = torch.float32) -> None:
    """Output, lse and gradients."""
    shapes = (2, heads, q_len, 16), (2, 2, 40, 16), (2, 2, 40, 16)
    operands = [torch.zeros(s, dtype=dtype, requires_grad=True) for s in shapes]
    out, lse = qkv.attention(
        *operands, *variants, q_offset="end", return_lse=True, backend="triton"
    )
    (out.sum() + lse.sum()).backward()


MODS = (
    lambda score, batch, head, q_pos, kv_pos: score + (head * 2**31 + batch * 2**32) % 7,
    lambda score, batch, head, q_pos, kv_pos: score + np.where(kv_pos > q_pos, 3, 5) * 2**30 % 11,
    lambda score, batch, head, q_pos, kv_pos: np.where(head * 0.5 > 1, -score, score) / (head + 1),
    lambda score, batch, head, q_pos, kv_pos: score + np.floor(score) * 2 + (q_pos - kv_pos) // 3,
    lambda score, batch, head, q_pos, kv_pos: 2,
)


def main() -> None:
    driver.set_active(Absent())
    CUDABackend.make_ttgir = staticmethod(stop)
    jit.JITFunction.run = compile_only(jit.JITFunction.run)
    backend._wants_interpreter = lambda: True  # Tensors may lie in main memory.
    for seed in (1, 7, 2**40, 2**64 - 1):
        attend(qkv.Dropout(0.1, seed))
    for mod in MODS:
        attend(qkv.ScoreMod(mod), qkv.Causal())
    attend(qkv.Causal(), qkv.Sinks(np.zeros(4)), q_len=1, dtype=torch.bfloat16)
    attend(qkv.Causal(), heads=2, q_len=1, dtype=torch.float16)
    # No other axis of a grid takes more than 65535 programs.
    assert all(len(grid) == 1 for grid in GRIDS), GRIDS


if __name__ == "__main__":
    main()
