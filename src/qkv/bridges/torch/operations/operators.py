"""The operators that torch calls on CPU tensors: a text and a list of tensors.

    qkv::attention            out, lse, lse_rest, unrounded
    qkv::attention_backward   gradients of query, key, value and of some of the arrays
    qkv::attention_tangent    how out and lse change along a direction of the inputs
    qkv::attention_second     gradients of <grad_out, tangent of out> + <grad_lse, tangent of lse>

`structure` is the text of a `qkv.call.binding.bound.Structure`, `arrays` the leaves after query,
key and value; `wanted` numbers those of them that are to have gradients, `directions` those that
change. `backward` says that a backward pass will follow. `lse_rest` is what rounding took from lse,
NaN where that is not known. `unrounded` is the output before it was rounded to 16 bits, without any
element in its rows where it was not, or where no backward pass follows; `attention_backward` takes
either as `out`. The first operator knows its gradients, which compiled and exported graphs need;
`functions` has all other derivatives. The first two are functions too, for when nobody would see
that an operator was called; these take the structure itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qkv.bridges.torch.openmp import on_torch_threads
from qkv.bridges.torch.operands import LIBRARY, view_of
from qkv.bridges.torch.operations.groups import numbers, of_inputs, results_first
from qkv.call.attend import attend
from qkv.call.binding.bound import BoundCall, Structure
from qkv.call.derivatives.jvp import Tangents, second_vjp, tangents_of
from qkv.call.derivatives.pull_back import Residuals, pull_back
from qkv.errors import ShapeError
from qkv.problem.building.check import check

__all__ = [
    "attention",
    "attention_backward",
    "attention_second",
    "attention_tangent",
    "check_shapes",
    "compute_attention",
    "compute_gradients",
    "contiguous",
    "empty_dense",
    "empty_results",
    "is_rounded",
]


def compute_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arrays: Sequence[Tensor],
    structure: Structure,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`out, lse = qkv.attention(..., return_lse=True)`, and what its gradients take beside them."""
    with on_torch_threads():
        attended = attend(_bound_call(query, key, value, arrays, structure), backward=backward)
    out, lse, rest = attended.out, attended.lse, attended.lse_rest
    rest = np.full_like(lse, np.nan) if rest is None else rest.reshape(lse.shape)
    results = _tensor(out), _tensor(lse), _tensor(rest)
    if not backward or not is_rounded(query):
        return *results, None
    unrounded = out if attended.unrounded is None else attended.unrounded
    return *results, _tensor(unrounded.astype(lse.dtype, copy=False))


def is_rounded(query: Tensor) -> bool:
    """Whether outputs are rounded to 16 bits."""
    return query.itemsize < 4


@torch.library.custom_op(
    "qkv::attention",
    mutates_args=(),
    device_types="cpu",
    # AOTInductor passes None for a list without entries.
    schema="(Tensor query, Tensor key, Tensor value, Tensor[]? arrays, str structure, "
    "bool backward) -> (Tensor, Tensor, Tensor, Tensor)",
)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arrays: Sequence[Tensor] | None,
    structure: str,
    backward: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `compute_attention`."""
    made = Structure.from_text(structure)
    out, lse, rest, unrounded = compute_attention(query, key, value, arrays or (), made, backward)
    if unrounded is None:
        unrounded = lse.new_empty(*out.shape[:-1], 0)
    return out, lse, rest, unrounded


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, _: Any, structure: str, backward: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = Structure.from_text(structure).layout
    check_shapes(query, key, value, layout)
    out, lse = empty_results(query, key, value, layout)
    dim = out.shape[-1] if backward and is_rounded(query) else 0
    return out, lse, torch.empty_like(lse), lse.new_empty(*out.shape[:-1], dim)


def compute_gradients(
    results: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    inputs: Sequence[Tensor],
    structure: Structure,
    wanted: Sequence[int],
) -> list[Tensor]:
    """Gradients of query, key, value and the wanted arrays; see the groups in `functions`."""
    bound = BoundCall(structure, tuple(map(view_of, inputs)))
    residuals, leaves = Residuals(*map(view_of, results)), [3 + n for n in wanted]
    grad_out, grad_lse = map(view_of, cotangents)
    with on_torch_threads():
        gradients = pull_back(bound, residuals, grad_out, grad_lse, leaves)
    return _gradient_tensors(gradients, inputs[3:], wanted)


@torch.library.custom_op("qkv::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arrays: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    lse_rest: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
    structure: str,
    wanted: Sequence[int],
) -> list[Tensor]:
    """See `compute_gradients`."""
    results, cotangents = (out, lse, lse_rest), (grad_out, grad_lse)
    inputs, made = (query, key, value, *arrays), Structure.from_text(structure)
    return compute_gradients(results, cotangents, inputs, made, wanted)


@attention_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, arrays: Any, *given: Any) -> list[Tensor]:
    *_, wanted = given
    return [empty_dense(t) for t in (query, key, value, *(arrays[n] for n in wanted))]


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, arrays, ctx.structure, backward = inputs
    out, lse, rest, unrounded = output
    ctx.mark_non_differentiable(rest, unrounded)
    ctx.has_list = arrays is not None
    kept = unrounded if backward and is_rounded(query) else out
    ctx.save_for_backward(kept, lse, rest, query, key, value, *(arrays or ()))


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor, *_: None) -> Any:
    results, inputs = results_first(ctx.saved_tensors)
    query, key, value, *arrays = inputs
    needed = ctx.needs_input_grad[3] if arrays else ()
    wanted = numbers(
        [need and a.is_floating_point() for need, a in zip(needed, arrays, strict=True)]
    )
    gradients = attention_backward(
        query, key, value, arrays, *results, grad_out, grad_lse, ctx.structure, wanted
    )
    grad_query, grad_key, grad_value, *rest = of_inputs(gradients, wanted, inputs)
    return grad_query, grad_key, grad_value, rest if ctx.has_list else None, None, None


attention.register_autograd(_gradients, setup_context=_save_for_backward)


@torch.library.custom_op("qkv::attention_tangent", mutates_args=(), device_types="cpu")
def attention_tangent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arrays: Sequence[Tensor],
    tangents: Sequence[Tensor],
    structure: str,
    directions: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """How out and lse change along tangents of query, key, value and some of the arrays."""
    bound = _bound_call(query, key, value, arrays, Structure.from_text(structure))
    with on_torch_threads():
        out, lse = tangents_of(bound, _tangents(tangents, directions))
    return _tensor(out), _tensor(lse)


@attention_tangent.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    *_, structure, _ = given
    return empty_results(query, key, value, Structure.from_text(structure).layout)


@torch.library.custom_op("qkv::attention_second", mutates_args=(), device_types="cpu")
def attention_second(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arrays: Sequence[Tensor],
    grad_out: Tensor,
    grad_lse: Tensor,
    tangents: Sequence[Tensor],
    structure: str,
    directions: Sequence[int],
    wanted: Sequence[int],
) -> list[Tensor]:
    """Gradients with respect to query, key, value, grad_out, grad_lse and the wanted arrays."""
    with on_torch_threads():
        second = second_vjp(
            _bound_call(query, key, value, arrays, Structure.from_text(structure)),
            grad_out=view_of(grad_out),
            grad_lse=view_of(grad_lse),
            tangents=_tangents(tangents, directions),
            wrt=[3 + n for n in wanted],
        )
    operands = _gradient_tensors(second, arrays, wanted)
    return [*operands[:3], _tensor(second.grad_out), _tensor(second.grad_lse), *operands[3:]]


@attention_second.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, arrays: Any, *given: Any) -> list[Tensor]:
    grad_out, grad_lse, *_, wanted = given
    more = (arrays[n] for n in wanted)
    return [empty_dense(t) for t in (query, key, value, grad_out, grad_lse, *more)]


def _tensor(array: Any) -> Tensor:
    return contiguous(LIBRARY.restore(np.ascontiguousarray(array) if array.ndim else array))


def contiguous(tensor: Tensor) -> Tensor:
    """A dense tensor with torch's strides, which NumPy's are not where there are no entries."""
    return tensor if tensor.numel() else tensor.new_empty(tensor.shape)


def _bound_call(
    query: Tensor, key: Tensor, value: Tensor, arrays: Sequence[Tensor], structure: Structure
) -> BoundCall:
    bound = BoundCall(structure, (query, key, value, *arrays))
    return BoundCall(structure, tuple(map(LIBRARY.view, bound.leaves, bound.roles)))


def _gradient_tensors(
    gradients: Any, arrays: Sequence[Tensor], wanted: Sequence[int]
) -> list[Tensor]:
    of_arrays = [_tensor(np.asarray(gradients.of(3 + n))).to(arrays[n].dtype) for n in wanted]
    return [*map(_tensor, (gradients.query, gradients.key, gradients.value)), *of_arrays]


def _tangents(tangents: Sequence[Tensor], directions: Sequence[int]) -> Tangents:
    query, key, value, *own = map(view_of, tangents)
    of_variants = [(3 + n, None, tangent) for n, tangent in zip(directions, own, strict=True)]
    return Tangents(query, key, value, of_variants)


def empty_dense(tensor: Tensor) -> Tensor:
    """An unfilled tensor of this shape, with the strides of a dense one."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def check_shapes(query: Tensor, key: Tensor, value: Tensor, layout: str) -> None:
    """Raise for shapes as the real operator does; sizes that are not known yet become guards."""
    tensors = query, key, value
    if all(type(n) is int for t in tensors for n in t.shape):
        arrays = LIBRARY.described(query), LIBRARY.described(key), LIBRARY.described(value)
        # The layout in the text is "bhld" or "blhd", although its type is any string.
        check(*arrays, (), layout=layout)  # type: ignore[arg-type]
        return
    heads, length = (-2, -3) if layout == "blhd" else (-3, -2)
    q, k, v = (t if t.ndim > 2 else t[None].transpose(-3, length) for t in tensors)
    for fits, fact in (
        (q.shape[-1] == k.shape[-1], "query and key differ in head_dim"),
        (k.shape[length] == v.shape[length], "key and value differ in kv_len"),
        (k.shape[heads] == v.shape[heads], "key and value differ in heads"),
        (q.shape[heads] % k.shape[heads] == 0, "num_heads is not a multiple of num_kv_heads"),
    ):
        torch._check_with(ShapeError, fits, partial(_fact_with_shapes, fact, tensors))


def _fact_with_shapes(fact: str, tensors: Sequence[Tensor]) -> str:
    return f"{fact}: {', '.join(str(tuple(t.shape)) for t in tensors)}."


def empty_results(query: Tensor, key: Tensor, value: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Output and lse of a call, which have no heads where all operands are matrices."""
    heads, length = (-2, -3) if layout == "blhd" else (-3, -2)
    tensors = [t if t.ndim > 2 else t[None] for t in (query, key, value)]
    lead = torch.broadcast_shapes(*(t.shape[:-3] for t in tensors))
    sizes = (1, query.shape[0]) if query.ndim == 2 else (query.shape[heads], query.shape[length])
    rows = [*lead, *sizes]
    out_rows = [*lead, *sizes[::-1]] if layout == "blhd" else rows
    if query.ndim == key.ndim == value.ndim == 2:
        rows = out_rows = [query.shape[0]]
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return query.new_empty(*out_rows, value.shape[-1]), query.new_empty(rows, dtype=dtype)
