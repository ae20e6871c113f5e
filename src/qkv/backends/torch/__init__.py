"""Attention on tensors where they lie: any device that torch has.

    attention      blocks of queries as operations of torch, which torch differentiates
    expressions    score mods and masks as such operations
    fused          torch's own fused kernels, where they mean exactly the same
    rotation       RoPE
    triton         kernels in Triton, a backend of its own

The arrays of a problem are `Operands.device_arrays` here; `Operands.query`, `key` and `value` have
only shapes and types.
"""

from __future__ import annotations

from qkv.backends import Refusal
from qkv.partial import Partial
from qkv.problem.spec import Problem, Spec

__all__ = ["TorchBackend"]

_BLOCK = 128

PAIRS = 2**24
"""Scores in memory at once, for all heads and batch rows."""


class TorchBackend:
    """Attention of torch tensors on their own device, in O(n) memory."""

    name = "torch"
    priority = 10

    def refusals(self, spec: Spec) -> tuple[Refusal, ...]:
        if spec.library != "torch":
            return (Refusal(f"arrays of {spec.library}", "torch tensors"),)
        return ()

    def blocks(self, spec: Spec) -> tuple[int, int]:
        return _BLOCK, _BLOCK

    def scratch_bytes(self, spec: Spec) -> int:
        pairs = spec.batch_size * spec.num_heads * spec.q_len * spec.kv_len
        # One block of queries has scores, weights, and two temporaries of the same size.
        return 4 * min(pairs, PAIRS) * spec.compute_dtype.itemsize

    def run(self, problem: Problem) -> Partial:
        return self.attend(problem, lse=True)

    def attend(self, problem: Problem, *, lse: bool) -> Partial:
        """Output and, if wanted, lse as tensors on the device, sinks included; differentiable."""
        from qkv.backends.torch.attention import TensorAttention
        from qkv.backends.torch.fused import attend_fused, is_fused

        if not lse and is_fused(problem):
            return attend_fused(problem)
        return TensorAttention(problem).attend()
