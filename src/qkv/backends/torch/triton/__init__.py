"""Attention on a GPU by kernels in Triton, for every mask and score mod.

attention      operands, and the function that torch differentiates
launches       one problem with its kernels; blocks: their tiles
expressions    score mods and masks as functions of Triton
tables         what expressions read, on the device
schedule       which tiles are computed
kernels        the kernels
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from qkv.backends import Refusal
from qkv.partial import Partial
from qkv.problem.spec import Problem, Spec

__all__ = ["TritonBackend"]

LARGEST_DIM = 256
"""Entries of a row up to which tiles fit into shared memory."""


class TritonBackend:
    """Attention of torch tensors on a GPU, a tile at a time, in O(n) memory.

    A call has it by its name, `backend="triton"`. With QKV_TRITON=1 in the environment every call
    with tensors on a GPU has it, unless it refuses.
    """

    name = "triton"

    def __init__(self) -> None:
        torch = 10
        self.priority = torch + 1 if os.environ.get("QKV_TRITON") == "1" else torch - 1

    def refusals(self, spec: Spec) -> tuple[Refusal, ...]:
        if spec.library != "torch":
            return (Refusal(f"arrays of {spec.library}", "torch tensors"),)
        refused = []
        if not _is_installed():
            refused.append(Refusal("triton is not installed", "it after: pip install triton"))
        if spec.device != "cuda" and not (spec.device == "cpu" and _wants_interpreter()):
            refused.append(
                Refusal(f"tensors on {spec.device}", "cuda; or cpu with TRITON_INTERPRET=1")
            )
        elif spec.device == "cuda":
            refused += _refused_gpus()
        if spec.dtype == "float64":
            refused.append(Refusal("dtype=float64", "float32, float16 and bfloat16"))
        largest = max(spec.head_dim, spec.v_head_dim)
        if largest > LARGEST_DIM:
            refused.append(Refusal(f"rows of {largest}", f"up to {LARGEST_DIM} entries"))
        return tuple(refused)

    def blocks(self, spec: Spec) -> tuple[int, int]:
        import torch

        from qkv.backends.torch.triton.blocks import forward_blocks, is_large, packed_heads

        blocks = forward_blocks(spec, large=is_large(torch.device(spec.device)))
        return blocks.block_q // packed_heads(spec), blocks.block_kv

    def scratch_bytes(self, spec: Spec) -> int:
        block_q, block_kv = self.blocks(spec)
        tiles = -(-spec.q_len // block_q) * -(-spec.kv_len // block_kv)
        batches = spec.batch_size if "batch" in spec.mask.variables else 1
        heads = spec.num_heads if "head" in spec.mask.variables else 1
        rows = spec.batch_size * spec.num_heads * spec.q_len
        return 4 * (tiles * batches * heads + 2 * rows)

    def run(self, problem: Problem) -> Partial:
        return self.attend(problem, lse=True)

    def attend(self, problem: Problem, *, lse: bool) -> Partial:
        """Output and, if wanted, lse as tensors on the device, sinks included; differentiable."""
        from qkv.backends.torch.triton.attention import attend

        return attend(problem, lse=lse)


@cache
def _is_installed() -> bool:
    return find_spec("triton") is not None


def _refused_gpus() -> list[Refusal]:
    """Why the kernels are not for the current GPU."""
    import torch

    if torch.version.hip is not None:
        return [Refusal("a GPU of AMD", "GPUs of NVIDIA")]
    if not torch.cuda.is_available():
        return []  # The tensors need not exist for a plan.
    major, minor = torch.cuda.get_device_capability()
    accepted = "8.0 and later"
    return [Refusal(f"compute capability {major}.{minor}", accepted)] if major < 8 else []


def _wants_interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")
