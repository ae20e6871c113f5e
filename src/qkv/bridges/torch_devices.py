"""Attention on tensors of other devices: torch's own kernels, a block of queries at a time.

The problem is checked as on the CPU, its expressions become operations of torch on the device, and
torch differentiates them. Blocks are computed again on the way back, so that memory stays O(n);
under `torch.func` and forward mode, which do not take that, the weights are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from qkv.arrays import library_of, view
from qkv.bridges.torch_operators import without_values
from qkv.bridges.torch_prepared import looks_on
from qkv.call.bound import BoundCall, Structure, UnboundCall
from qkv.call.variant_arrays import made
from qkv.errors import UnsupportedError
from qkv.problem.check import check
from qkv.problem.expressions import Const, Load, Node, Op, Var
from qkv.problem.philox import dropout_factors
from qkv.problem.spec import Origin, Problem
from qkv.variants import Bias, Causal
from qkv.variants.bare import as_variant

__all__ = ["attend", "check_backend"]

_PAIRS = 2**24
"""Scores that are held at once."""

_OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "floordiv": partial(torch.div, rounding_mode="floor"), "mod": torch.remainder,
    "min": torch.minimum, "max": torch.maximum, "neg": torch.neg, "abs": torch.abs,
    "lt": torch.lt, "le": torch.le, "eq": torch.eq, "ne": torch.ne,
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not,
    "where": torch.where, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "tanh": torch.tanh, "floor": lambda x: x.floor().to(torch.int64),
}  # fmt: skip


def check_backend(query: Tensor, backend: str) -> None:
    """Raise for backends that are not of the query's device."""
    if backend not in ("auto", "torch"):
        raise UnsupportedError(
            f"backend {backend!r} computes on the CPU; query is on {query.device}.",
            action='Pass backend="auto", or tensors on the CPU.',
        )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    leaves: list[Tensor],
    text: str,
    return_lse: bool,
) -> Any:
    """Output, and lse if asked for, on the query's device; `leaves` and `text` of a statement."""
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # The operands have the type that it asks for; scores and sums keep their own.
        with torch.autocast(device, enabled=False):
            return attend(query, key, value, leaves, text, return_lse)
    structure = Structure.from_text(text)
    values = _values(query, key, value, leaves, structure)
    said = BoundCall(structure, values).unflatten()
    problem = check(
        without_values(query),
        without_values(key),
        without_values(value),
        tuple(map(as_variant, said.variants)),
        scale=said.options.scale,
        layout=said.options.layout,
        q_offset=said.options.q_offset,
        kv_offset=said.options.kv_offset,
    )
    followed = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    followed = followed or forward_ad._current_level >= 0 or _are_transforms_active()
    # Fused kernels have no second derivative, none in forward mode, no batches, and give no lse.
    if not return_lse and not followed and _is_fused(problem, said, key, value):
        return _fused(query, key, value, problem, said)
    out, lse = _Device(problem, said, leaves, values[3:], query, key, value).attend(
        said.options.layout
    )
    return (out.to(query.dtype), lse) if return_lse else out.to(query.dtype)


def _values(
    query: Tensor, key: Tensor, value: Tensor, leaves: list[Tensor], structure: Structure
) -> list[Any]:
    """The leaves of the call, as the checks read them."""
    hidden = [
        type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.is_meta
        or torch._C._functorch.is_functorch_wrapped_tensor(leaf)
        for leaf in leaves
    ]  # fmt: skip
    operands = [without_values(t) for t in (query, key, value)]
    owners = BoundCall(structure, (query, key, value, *leaves)).unflatten().owners[3:]
    found = []
    for leaf, hides, owner in zip(leaves, hidden, owners, strict=True):
        if not hides:
            found.append(view(leaf.detach().cpu(), "an array of a variant"))
        elif (owner is leaf or isinstance(owner, Bias)) and leaf.is_floating_point():
            found.append(np.ascontiguousarray(without_values(leaf)))  # only their shape is read
        else:
            raise UnsupportedError(
                "the values of an array are asked for while torch traces or transforms the call, "
                f"on {leaf.device} or with backend='torch'.",
                [(type(owner).__name__, f"{leaf.dtype} {tuple(leaf.shape)}")],
                "Pass it as a floating bias (0 or -inf), or call attention outside of that.",
            )
    return [*operands, *found]


torch.compiler.allow_in_graph(attend)  # checks stay outside of what Dynamo reads


def _is_fused(problem: Problem, said: UnboundCall, key: Tensor, value: Tensor) -> bool:
    """Whether torch's fused kernels mean the same: no mask, or a causal one that hides no NaN."""
    spec = problem.spec
    if 0 in (spec.batch_size, spec.num_heads, spec.q_len, spec.kv_len, spec.v_head_dim):
        return False
    if not said.variants:
        return True
    aligned = spec.q_len == spec.kv_len and not any(
        np.any(offset) for offset in (said.options.q_offset, said.options.kv_offset)
    )
    if len(said.variants) > 1 or not isinstance(said.variants[0], Causal) or not aligned:
        return False
    if _is_looked_on(key, value):
        return False
    return bool(key.isfinite().all()) and bool(value.isfinite().all())


def _fused(
    query: Tensor, key: Tensor, value: Tensor, problem: Problem, said: UnboundCall
) -> Tensor:
    turned = said.options.layout == "blhd"
    rank = max(t.ndim for t in (query, key, value))
    rows = [
        t[None] if t.ndim == 2 else t.transpose(-3, -2) if turned else t
        for t in (query, key, value)
    ]
    q, k, v = [t.expand(*problem.spec.batch_shape, *t.shape[-3:]) for t in rows]
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=bool(said.variants),
        scale=problem.operands.scale,
        enable_gqa=problem.spec.group_size > 1,
    )
    if rank == 2:
        return out[0]
    return out.transpose(-3, -2).contiguous() if turned else out


_are_transforms_active = torch._C._are_functorch_transforms_active


def _is_looked_on(*tensors: Tensor) -> bool:
    """Whether values cannot be asked for, since torch traces or transforms, or there are none."""
    return looks_on() or any(t.is_meta for t in tensors)


@dataclass(slots=True)
class _Evaluation:
    """Values of expressions on a device."""

    variables: Mapping[str, Tensor]
    tables: Mapping[str, Tensor]
    dtype: torch.dtype

    def value(self, node: Node) -> Tensor:
        match node:
            case Const(kind=kind, value=number):
                device = self.variables["q_index"].device
                dtype = self.dtype if kind == "float" else None
                return torch.tensor(number, dtype=dtype, device=device)
            case Var(name=name):
                return self.variables[name]
            case Load(table=table, indices=indices):
                found = self.tables[table]
                # A number on the device would have to be fetched from there.
                places = tuple(
                    int(i.value) if isinstance(i, Const) else self.value(i) for i in indices
                )
                return found[places] if indices else found
            case Op(name=name, kind=kind, args=args):
                values = [self.value(arg) for arg in args]
                if "float" in [arg.kind for arg in args] or (kind == "float" and name != "where"):
                    values = [
                        v.to(self.dtype) if arg.kind == "int" else v
                        for v, arg in zip(values, args, strict=True)
                    ]
                return _OPERATIONS[name](*values)
        raise AssertionError(node)


class _Device:
    """One problem, with tensors for its operands and tables."""

    def __init__(
        self,
        problem: Problem,
        said: UnboundCall,
        leaves: list[Tensor],
        values: list[Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> None:
        spec, operands = problem.spec, problem.operands
        self.problem, self.said, self.leaves, self.values = problem, said, leaves, values
        self.device = query.device
        self.looked_on = _is_looked_on(query, key, value)
        self.dtype = torch.float64 if spec.dtype == "float64" else torch.float32
        blhd = said.options.layout == "blhd"
        self.rank = max(t.ndim for t in (query, key, value))
        rows = [
            (t[None] if t.ndim == 2 else t.transpose(-3, -2) if blhd else t)
            for t in (query, key, value)
        ]
        self.query, self.key, self.value = (
            t.expand(*spec.batch_shape, *t.shape[-3:])
            .reshape(spec.batch_size, *t.shape[-3:])
            .to(self.dtype)
            for t in rows
        )
        self._rotate()
        self.tables = {
            name: self._table(array, operands.origins[name]) if name in operands.origins
            else self._moved(array)
            for name, array in operands.tables.items()
        }  # fmt: skip
        self.sinks = None
        if operands.sinks is not None:
            assert operands.sink_origin is not None
            leaf = self._leaf(operands.sink_origin)
            own = self._moved(operands.sinks) if leaf is None else leaf
            self.sinks = own.to(self.device, self.dtype).expand(spec.num_heads)

    def attend(self, layout: str) -> tuple[Tensor, Tensor]:
        spec = self.problem.spec
        step = max(1, _PAIRS // max(1, spec.batch_size * spec.num_heads * spec.kv_len))
        parts = []
        for start in range(0, max(spec.q_len, 1), step):
            stop = min(start + step, spec.q_len)
            # What torch.func and compilers do not take; they hold what they need.
            if torch.is_grad_enabled() and not self.looked_on:
                parts.append(checkpoint(self._block, start, stop, use_reentrant=False))
            else:
                parts.append(self._block(start, stop))
        outs, rows = zip(*parts, strict=True)
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len)
        out = torch.cat(outs, -2).reshape(*shape, spec.v_head_dim)
        lse = torch.cat(rows, -1).reshape(shape)
        if self.rank == 2:
            return out[0], lse[0]
        return (out.transpose(-3, -2) if layout == "blhd" else out), lse

    def _block(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Output and lse of some queries, `(batch, num_heads, queries, ...)`."""
        spec, scale = self.problem.spec, self.problem.operands.scale
        groups = spec.num_kv_heads, spec.group_size
        grouped = self.query[:, :, start:stop].unflatten(1, groups)
        key = self.key[:, :, None]
        clean = torch.where(key.isfinite(), key, 0.0)
        scaled = (grouped @ clean.mT * scale).flatten(1, 2)
        if self.looked_on or not bool(key.isfinite().all()):
            # Nothing flows back through what is not finite; a forbidden pair must not see it.
            raw = (grouped.detach() @ key.detach().mT * scale).flatten(1, 2)
            spoiled = ~key.isfinite().all(-1).repeat_interleave(spec.group_size, 1)
            scaled = torch.where(spoiled.flatten(1, 2)[:, :, None], raw, scaled)
        places = self._places(start, stop) | {"score": scaled}
        evaluation = _Evaluation(places, self.tables, self.dtype)
        allowed = evaluation.value(spec.mask)
        scores = torch.where(allowed, evaluation.value(spec.score), -torch.inf)
        scores = scores.expand(scaled.shape)
        lse = _log_sum(scores, self.sinks)
        empty = torch.isneginf(lse)
        weights = torch.exp(scores - torch.where(empty, 0.0, lse)[..., None])
        weights = torch.where(torch.isneginf(scores), 0.0, weights)
        if self.problem.operands.dropout is not None:
            weights = weights * self._factors(places)
        return self._weighted(weights, ~torch.isneginf(scores)), lse

    def _places(self, start: int, stop: int) -> dict[str, Tensor]:
        spec = self.problem.spec
        sizes = {
            "batch": (0, spec.batch_size), "head": (0, spec.num_heads),
            "q_index": (start, stop), "kv_index": (0, spec.kv_len),
        }  # fmt: skip
        return {
            name: torch.arange(first, last, device=self.device).view(
                *(-1 if n == axis else 1 for n in range(4))
            )
            for axis, (name, (first, last)) in enumerate(sizes.items())
        }

    def _weighted(self, weights: Tensor, allowed: Tensor) -> Tensor:
        value = self.value.repeat_interleave(self.problem.spec.group_size, 1)
        finite = value.isfinite()
        out = weights @ torch.where(finite, value, 0.0)
        if self.looked_on:
            return out + self._not_finite(weights, allowed, value)
        for j in torch.nonzero(~finite.all(-1).all(0).all(0)).flatten().tolist():
            rest = torch.where(finite[:, :, j], 0.0, value[:, :, j])[:, :, None]
            share = weights[..., j, None] * rest
            out = out + torch.where(allowed[..., j, None], share, 0.0)
        return out

    @staticmethod
    def _not_finite(weights: Tensor, allowed: Tensor, value: Tensor) -> Tensor:
        """What entries that are not finite add to the output, as constants: counts say where."""
        dtype = weights.dtype
        heavy, weightless = (weights.detach() > 0).to(dtype), allowed & (weights.detach() == 0)
        up, down = (heavy @ (value == limit).to(dtype) > 0 for limit in (torch.inf, -torch.inf))
        nan = allowed.to(dtype) @ value.isnan().to(dtype) > 0
        nan = nan | (weightless.to(dtype) @ value.isinf().to(dtype) > 0) | (up & down)
        infinite = torch.where(up, torch.inf, torch.where(down, -torch.inf, 0.0))
        return torch.where(nan, torch.nan, infinite).to(dtype)

    def _factors(self, places: Mapping[str, Tensor]) -> Tensor:
        dropout = self.problem.operands.dropout
        assert dropout is not None
        at = {n: places[n].cpu().numpy() for n in ("batch", "head", "q_index", "kv_index")}
        wide = np.dtype(np.float64 if self.dtype is torch.float64 else np.float32)
        return self._moved(dropout_factors(dropout, **at, dtype=wide))

    def _rotate(self) -> None:
        """Turn query and key rows by their positions."""
        rotation, angles = self.problem.spec.rotation, self.problem.operands.angles
        if rotation is None or angles is None:
            return

        def turned(rows: Tensor, side: str) -> Tensor:
            turns = [angles.turns(side, b) for b in range(angles.rows(side))]
            cos, sin = (
                self._moved(np.stack(part)).to(self.dtype)[:, None]
                for part in zip(*turns, strict=True)
            )
            n = rotation.rotary_dim
            own, rest = rows[..., :n], rows[..., n:]
            if rotation.layout == "half_split":
                a, b = own.chunk(2, -1)
                return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)
            a, b = own[..., ::2], own[..., 1::2]
            pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
            return torch.cat([pairs, rest], -1)

        self.query, self.key = turned(self.query, "q"), turned(self.key, "kv")

    def _moved(self, array: NDArray[Any]) -> Tensor:
        restored: Tensor = library_of(self.query, "query").restore(np.array(array, order="C"))
        return restored.to(self.device)

    def _leaf(self, origin: Origin) -> Tensor | None:
        """The tensor whose values these are, if gradients may flow to it."""
        own = [n for n, owner in enumerate(self.said.owners[3:]) if made(origin, owner)]
        own = [n for n in own if self.leaves[n].is_floating_point()]
        if len(own) > 1:
            own = [n for n in own if self.values[n] is origin.array]
        return self.leaves[own[0]] if own else None

    def _table(self, array: NDArray[Any], origin: Origin) -> Tensor:
        leaf = self._leaf(origin)
        if array.dtype.kind in "biu" or leaf is None:
            moved = self._moved(array)
            return moved.to(self.dtype) if moved.is_floating_point() else moved
        padded = leaf.reshape((1,) * (array.ndim - leaf.ndim) + tuple(leaf.shape))
        for axis, size in enumerate(array.shape):
            padded = padded.narrow(axis, 0, size)  # axes that repeat are read once
        return padded.to(self.device, self.dtype)


def _log_sum(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """`log(sum exp(scores) + exp(sink))` of each row; -inf, with gradient 0, for an empty one."""
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -torch.inf)
    empty = torch.isneginf(scores).all(-1)
    safe = torch.where(empty[..., None], 0.0, scores)
    return torch.where(empty, -torch.inf, safe.logsumexp(-1))
