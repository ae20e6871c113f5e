"""How torch differentiates and batches attention.

    function         computes                                  its derivatives are made of
    Attention        out, lse, lse_rest, unrounded             Backward, Tangent
    AttentionUnseen  the same where nobody sees it             Backward
    Backward         gradients of the inputs, along grad_out   Second, Backward
    Tangent          change of out, along the inputs' change   Second, Backward; not of tangents
    Second           gradients of <grad_out, Tangent>          third derivatives are refused

Backward is linear in grad_out, and the gradient of <grad_out, out> in everything else, whose second
derivatives are symmetric: one function serves both ways. Tensors come in groups, in this order:

    results      out, or what it was before it was rounded to 16 bits, lse and lse_rest; they follow
                 from the others, so nothing flows back to them
    cotangents   grad_out, grad_lse
    along        changes of query, key, value and of the arrays numbered in `directions`
    inputs       query, key, value and all arrays that the call holds

`wanted` numbers the arrays that are to have gradients. `structure` is that of the bound call.

Compiled and exported graphs hold operators, not these functions, and have first derivatives only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from qkv.bridges.torch.observers import follows
from qkv.bridges.torch.operations import operators
from qkv.bridges.torch.operations.batches import apply, batched, is_old_batch
from qkv.bridges.torch.operations.groups import (
    RESULTS,
    along_of,
    numbers,
    of_inputs,
    parted,
    results_first,
    zeros_for_none,
)
from qkv.bridges.torch.repeated.passes import PreparedPasses
from qkv.call.binding.bound import Structure
from qkv.errors import UnsupportedError

__all__ = ["attend", "attend_prepared"]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arrays: Sequence[Tensor],
    structure: Structure | str,
) -> tuple[Tensor, Tensor]:
    """Output and lse, differentiable in all tensors."""
    tensors = (query, key, value, *arrays)
    if torch.compiler.is_dynamo_compiling():
        # Dynamo does not support functions with a forward-mode rule.
        backward = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        text = structure if isinstance(structure, str) else structure.text
        out, lse, *_ = operators.attention(query, key, value, arrays, text, backward)
        return out, lse
    if isinstance(structure, str):
        # Torch runs what it has begun to compile as Python once there are too many graphs of it.
        structure = Structure.from_text(structure)
    if _nobody_sees(*tensors):
        out, lse = _AttentionUnseen.apply(_Whole(structure), *tensors)
        return out, lse
    if _is_functionalized():
        out, lse, *_ = operators.attention(query, key, value, arrays, structure.text, False)
        return out, lse
    out, lse, *_ = _Attention.apply(_Whole(structure), *tensors)
    return out, lse


def attend_prepared(
    tensors: Sequence[Tensor], structure: Structure, passes: PreparedPasses
) -> tuple[Tensor, Tensor]:
    """Output and lse by prepared passes, of tensors that nothing traces or transforms."""
    out, lse = _AttentionUnseen.apply(_Whole(structure, passes), *tensors)
    return out, lse


def _nobody_sees(*tensors: Tensor) -> bool:
    """Whether nothing traces or transforms operations, and tensors do nothing of their own."""
    return not follows() and all(
        (type(t) is Tensor or type(t) is torch.nn.Parameter) and not is_old_batch(t)
        for t in tensors
    )


def _is_functionalized() -> bool:
    """Whether `torch.func.functionalize` is at work, which takes operators alone."""
    top = torch._C._functorch.peek_interpreter_stack()
    return top is not None and top.key() == torch._C._functorch.TransformType.Functionalize


class _Attention(Function):
    """inputs -> out, lse, lse_rest, unrounded"""

    @staticmethod
    def forward(structure: Any, *inputs: Tensor) -> Any:
        query, key, value, *arrays = inputs
        return operators.attention(query, key, value, arrays, structure.text, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.structure, *tensors = inputs
        ctx.set_materialize_grads(False)  # Arrays that do not change are told by None.
        out, lse, rest, unrounded = output
        ctx.mark_non_differentiable(rest, unrounded)
        kept = unrounded if operators.is_rounded(tensors[0]) else out
        ctx.save_for_backward(kept, lse, rest, *tensors)
        ctx.save_for_forward(kept, lse, rest, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> Any:
        results, inputs = results_first(ctx.saved_tensors)
        like_out = inputs[0].new_empty(results[0].shape)  # What is kept may have another type.
        cotangents = zeros_for_none((grad_out, grad_lse), (like_out, results[1]))
        wanted = numbers(ctx.needs_input_grad[4:])
        gradients = _backward(ctx, wanted, results, cotangents, inputs)
        return None, *of_inputs(gradients, wanted, inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, structure: Any, *inputs: Tensor) -> Any:
        return _batched(_Attention, info, in_dims, inputs, (structure,), first=0, along=0)

    @staticmethod
    def jvp(ctx: Any, _structure: None, *changes: Tensor | None) -> Any:
        results, inputs = results_first(ctx.saved_tensors)
        directions, along = along_of(changes, inputs)
        moved = apply(_Tangent, ctx.structure, directions, *results, *along, *inputs)
        return *moved, None, None


class _AttentionUnseen(Function):
    """Attention like `_Attention`, of tensors that are not traced.

    The first gradient calls no operator.
    """

    @staticmethod
    def forward(ctx: Any, structure: Any, *inputs: Tensor) -> Any:
        passes = structure.passes
        results = None if passes is None else passes.attend(inputs)
        if results is None:
            query, key, value, *arrays = inputs
            results = operators.compute_attention(
                query, key, value, arrays, structure.structure, True
            )
        out, lse, rest, unrounded = results
        ctx.structure = structure
        ctx.save_for_backward(out if unrounded is None else unrounded, lse, rest, *inputs)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
        if torch.is_grad_enabled() or not _nobody_sees(grad_out, grad_lse):
            return _Attention.backward(ctx, grad_out, grad_lse)
        results, inputs = results_first(ctx.saved_tensors)
        wanted = numbers(ctx.needs_input_grad[4:])
        structure, passes = ctx.structure.structure, None if wanted else ctx.structure.passes
        cotangents = grad_out, grad_lse
        gradients = None if passes is None else passes.gradients(results, cotangents, inputs)
        if gradients is None:
            groups = results, cotangents, inputs
            gradients = operators.compute_gradients(*groups, structure, wanted)
            if passes is not None:
                passes.prepare_gradients(*groups, structure)
        return None, *of_inputs(gradients, wanted, inputs)


class _Backward(Function):
    """results, cotangents, inputs -> gradients of query, key, value and the wanted arrays"""

    @staticmethod
    def forward(structure: Any, wanted: tuple[int, ...], *tensors: Tensor) -> Any:
        results, (query, key, value, *arrays) = tensors[: RESULTS + 2], tensors[RESULTS + 2 :]
        gradients = operators.attention_backward(
            query, key, value, arrays, *results, structure.text, wanted
        )
        return tuple(gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.structure, ctx.wanted, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        grad_out, grad_lse, *inputs = ctx.saved_tensors[RESULTS:]
        along = zeros_for_none(given, [*inputs[:3], *(inputs[3 + n] for n in ctx.wanted)])
        wanted = numbers(ctx.needs_input_grad[2 + RESULTS + 5 :])
        query, key, value, *rest = apply(
            _Second, ctx.structure, ctx.wanted, wanted, grad_out, grad_lse, *along, *inputs
        )
        *cotangents, own = rest[0], rest[1], rest[2:]
        grads = of_inputs((query, key, value, *own), wanted, inputs)
        return *[None] * (2 + RESULTS), *cotangents, *grads

    @staticmethod
    def jvp(ctx: Any, _structure: None, _wanted: None, *changes: Tensor | None) -> Any:
        results, (grad_out, grad_lse, *inputs) = results_first(ctx.saved_tensors)
        changes = changes[RESULTS:]
        directions, along = along_of(changes[2:], inputs)
        query, key, value, _, _, *own = apply(
            _Second,
            ctx.structure,
            directions,
            ctx.wanted,
            grad_out,
            grad_lse,
            *along,
            *inputs,
        )
        cotangents = zeros_for_none(changes[:2], (grad_out, grad_lse))
        linear = _backward(ctx, ctx.wanted, results, cotangents, inputs)
        return tuple(a + b for a, b in zip((query, key, value, *own), linear, strict=True))

    @staticmethod
    def vmap(info: Any, in_dims: Any, structure: Any, wanted: Any, *tensors: Tensor) -> Any:
        fixed, first = (structure, wanted), RESULTS + 2
        return _batched(_Backward, info, in_dims, tensors, fixed, first=first, along=len(wanted))


class _Tangent(Function):
    """results, along, inputs -> change of out and lse"""

    @staticmethod
    def forward(structure: Any, directions: tuple[int, ...], *tensors: Tensor) -> Any:
        along, (query, key, value, *arrays) = parted(tensors[RESULTS:], directions)
        return operators.attention_tangent(
            query, key, value, arrays, along, structure.text, directions
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.structure, ctx.directions, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        results, tensors = results_first(ctx.saved_tensors)
        along, inputs = parted(tensors, ctx.directions)
        wanted = numbers(ctx.needs_input_grad[2 + RESULTS + len(along) + 3 :])
        query, key, value, _, _, *own = apply(
            _Second, ctx.structure, ctx.directions, wanted, *cotangents, *along, *inputs
        )
        linear = _backward(ctx, ctx.directions, results, cotangents, inputs)
        grads = of_inputs((query, key, value, *own), wanted, inputs)
        return *[None] * (2 + RESULTS), *linear, *grads

    @staticmethod
    def jvp(ctx: Any, *changes: Tensor | None) -> Any:
        raise UnsupportedError(
            "the tangent of a tangent of attention was asked for; qkv has tangents of gradients, "
            "and gradients of tangents.",
            action="Take one of the two derivatives in reverse mode, as in "
            "torch.func.jacfwd(torch.func.jacrev(f)), which is torch.func.hessian(f).",
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, structure: Any, directions: Any, *tensors: Tensor) -> Any:
        fixed, along = (structure, directions), len(directions)
        first = RESULTS + 3 + along
        return _batched(_Tangent, info, in_dims, tensors, fixed, first=first, along=along)


class _Second(Function):
    """cotangents, along, inputs -> gradients of query, key, value, cotangents, wanted arrays"""

    @staticmethod
    def forward(structure: Any, directions: Any, wanted: Any, *tensors: Tensor) -> Any:
        grad_out, grad_lse, *rest = tensors
        along, (query, key, value, *arrays) = parted(rest, directions)
        text = structure.text
        second = operators.attention_second(
            query,
            key,
            value,
            arrays,
            grad_out,
            grad_lse,
            along,
            text,
            directions,
            wanted,
        )
        return tuple(second)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        _refuse_third_derivatives()

    @staticmethod
    def jvp(ctx: Any, *changes: Tensor | None) -> Any:
        _refuse_third_derivatives()

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, structure: Any, directions: Any, wanted: Any, *t: Tensor
    ) -> Any:
        fixed, first = (structure, directions, wanted), 5 + len(directions)
        along = len(directions) + len(wanted)
        return _batched(_Second, info, in_dims, t, fixed, first=first, along=along)


def _refuse_third_derivatives() -> None:
    raise UnsupportedError(
        "the third derivative of attention was asked for; qkv has two.",
        action="For a Hessian times a vector call torch.autograd.functional.vhp, since hvp "
        'differentiates three times; for more use backend "math" of torch\'s own attention.',
    )


def _batched(
    function: type[Function],
    info: Any,
    in_dims: Any,
    tensors: Sequence[Tensor],
    fixed: tuple[Any, ...],
    *,
    first: int,
    along: int,
) -> Any:
    """The rule of `torch.vmap`: `fixed` comes before all tensors, `first` before the inputs."""
    one, in_dims = partial(function.apply, *fixed), in_dims[len(fixed) :]
    uses_index = fixed[0].structure.uses_batch_index
    return batched(info, in_dims, tensors, one, uses_index, inputs=first, along=along)


def _backward(
    ctx: Any,
    wanted: tuple[int, ...],
    results: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = apply(
        _Backward, ctx.structure, wanted, *results, *cotangents, *inputs
    )
    return gradients


class _Whole:
    """A structure that torch's transformations do not take apart, as they do with tuples."""

    def __init__(self, structure: Structure, passes: PreparedPasses | None = None) -> None:
        self.structure = structure
        self.passes = passes

    def __repr__(self) -> str:
        """The key by which traced graphs are compared."""
        return self.text

    @cached_property
    def text(self) -> str:
        return self.structure.text
