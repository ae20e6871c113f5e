"""How a batch of calls is computed for `torch.vmap`, and for the batching that was before it.

One call with one more leading dimension where that means the same, else one call each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

__all__ = ["apply", "batched", "is_old_batch"]


def batched(
    info: Any,
    in_dims: Sequence[int | None],
    tensors: Sequence[Tensor],
    function: Callable[..., Any],
    uses_batch_index: bool,
    *,
    inputs: int,
    along: int,
) -> Any:
    """The rule of `torch.vmap`.

    `uses_batch_index` says that one more leading dimension may mean something else, `along` counts
    arrays whose own gradients or changes take part.
    """
    moved = [
        t if dim is None else t.movedim(dim, 0) for t, dim in zip(tensors, in_dims, strict=True)
    ]
    has_batch = [dim is not None for dim in in_dims]
    operands = moved[inputs : inputs + 3]
    ranks = {t.ndim - b for t, b in zip(operands, has_batch[inputs : inputs + 3], strict=True)}
    one_more = (
        not along
        and not any(has_batch[inputs + 3 :])
        and len(ranks) == 1
        and min(ranks) > 2
        and not uses_batch_index
    )
    if one_more:
        whole = [
            t if b or n >= inputs + 3 else t.expand(info.batch_size, *t.shape)
            for n, (t, b) in enumerate(zip(moved, has_batch, strict=True))
        ]
        results = function(*whole)
    elif info.batch_size:
        rows = [
            function(*(t[n] if b else t for t, b in zip(moved, has_batch, strict=True)))
            for n in range(info.batch_size)
        ]
        results = tuple(torch.stack(column) for column in zip(*rows, strict=True))
    else:
        # An empty batch: the shapes of one call.
        one = function(
            *(t.new_zeros(t.shape[1:]) if b else t for t, b in zip(moved, has_batch, strict=True))
        )
        results = tuple([t.new_empty(0, *t.shape) for t in one])
    return results, (0,) * len(results)


def apply(function: type[Function], *given: Any) -> Any:
    """`function.apply`, also of tensors that `torch.autograd.grad(is_grads_batched=True)` made.

    Those come from a batching older than `torch.func`, which knows nothing of the rule `vmap`.
    """
    if not any(isinstance(t, Tensor) and is_old_batch(t) for t in given):
        return function.apply(*given)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    # A tensor without this batch dimension gets one of size 1.
    apart = [torch._remove_batch_dim(t, level, 1, 0) if isinstance(t, Tensor) else t for t in given]
    size = next((t.shape[0] for t in apart if isinstance(t, Tensor) and t.shape[0] != 1), 1)
    dims: list[int | None] = []
    for n, t in enumerate(apart):
        alone = not isinstance(t, Tensor) or t.shape[0] != size
        dims.append(None if alone else 0)
        apart[n] = given[n] if alone else t
    results, _ = function.vmap(SimpleNamespace(batch_size=size), tuple(dims), *apart)
    return tuple([torch._add_batch_dim(t, 0, level) for t in results])


is_old_batch = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor stands for a batch of the older kind."""
