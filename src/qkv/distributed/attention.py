"""Attention over a sequence that is spread over ranks: the public function."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch

from qkv.arguments.readable_checks import checked_flag
from qkv.arrays.copies import own_copy
from qkv.arrays.torch_arrays import TorchArrays
from qkv.bridges.learnable import with_scale
from qkv.bridges.torch.operands import autocast, is_tracked
from qkv.call.binding.options import Options, option_values, with_options
from qkv.distributed.calls.agreed_call import Place, agreed_call, check_strategy
from qkv.distributed.calls.dtensors import placed, refuse_transformed
from qkv.distributed.calls.heads import from_heads, to_heads
from qkv.distributed.calls.sharded_call import attend_sharded
from qkv.distributed.inspection.record import DistributedRecord, ShardOperands, with_own_arrays
from qkv.distributed.messages.links import TIMEOUT, outside_of_graphs
from qkv.distributed.orders.order import Order
from qkv.errors import ArgumentError

__all__ = ["attention", "inspect"]

Tensor = torch.Tensor


@partial(with_options, name="distributed.attention")
@outside_of_graphs
def attention(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    mesh: Any = None,
    dim: str | tuple[str, str] | None = None,
    strategy: str = "auto",
    order: Order | None = None,
    kv_order: Order | None = None,
    return_lse: bool = False,
    timeout: float = TIMEOUT,
    **options: Unpack[Options],
) -> Any:
    """Attention over a sequence whose rows are spread over ranks; exact, in O(n / ranks) memory.

        out = softmax(scale * Q K^T + ...) V   over the rows of all ranks

    Every rank calls it with its own rows, and with the same variants and options, which describe
    the *whole* sequence: a mask array is of all rows, a `Segments` has the ids of all rows.

    Parameters
    ----------
    query : Tensor or DTensor (..., num_heads, own rows, head_dim)
        The rows of this rank; float64, float32, float16 or bfloat16. A DTensor is sharded along the
        length, on the dimension of the mesh that `dim` names.
    key : Tensor or DTensor (..., num_kv_heads, own rows, head_dim)
    value : Tensor or DTensor (..., num_kv_heads, own rows, v_head_dim)
    *variants
        As for `qkv.attention`, of the whole sequence; all but `Dropout`.
    mesh : DeviceMesh or ProcessGroup, optional
        All processes unless given.
    dim : str or (str, str), optional
        Dimension of the mesh. Two names are two dimensions: keys travel along the first, and heads
        are shared out along the second. An order then counts the ranks place by place along the
        second, within each place along the first; ranks of the mesh rise along both. Along one
        dimension it counts them as torch does, by `mesh.get_local_rank(dim)`.
    strategy : "auto", "ring", "gather" or "ulysses"
        "ring": keys travel, and each rank holds those of three ranks at most: its own, those that
        are computed and those that arrive. "gather": each rank holds all keys. "ulysses": each rank
        computes some heads of all rows. "auto" takes what `qkv.distributed.plan` predicts to be the
        quickest. With two dimensions, "ring" or "gather" for the first.
    order : Order, optional
        Which rows of the whole each rank holds. Neighbouring rows in the order of ranks, unless
        given.
    kv_order : Order, optional
        That of keys and values; `order` unless given.
    return_lse : bool
        Return `(output, lse)`.
    timeout : float
        Seconds that this rank waits for a message of another.
    scale, layout, q_offset, kv_offset, backend : optional
        As for `qkv.attention`; offsets are those of the whole sequence.

    Returns
    -------
    Tensor, or (Tensor, Tensor)
        Output of this rank's rows, like the query (a DTensor for one), and lse `(..., num_heads,
        own rows)`. Both can be differentiated once. The gradient of an array of a variant (bias,
        sinks, slopes) is that of the whole, on every rank; that of a `scale` is of own rows, to be
        added up over ranks.

    Raises
    ------
    DistributedError
        If ranks were called with different things, or one does not answer within the timeout; the
        message names it. Nothing wrong is computed.
    UnsupportedError, ShapeError, DTypeError, ArgumentError
        As `qkv.attention` does.

    Notes
    -----
    Parts are merged, and gradients added up, in an order that does not depend on timing: every run
    gives the same bits. A ring sends `(head_dim + v_head_dim) * num_kv_heads` numbers for each key
    to every rank whose queries may see it. `torch.compile` leaves the call out of its graph.
    Source: Liu, Zaharia and Abbeel, "Ring Attention" (2023); Jacobs et al., "DeepSpeed Ulysses"
    (2023).

    Examples
    --------
    In a program started by `torchrun --nproc-per-node 2`:

        torch.distributed.init_process_group("gloo")
        order = qkv.distributed.balanced(16384, 2, qkv.Causal())
        q, k, v = (order.shard(x, torch.distributed.get_rank()) for x in (q, k, v))
        out = qkv.distributed.attention(q, k, v, qkv.Causal(), order=order)
    """
    where = Place.of(mesh, dim)
    with where.told():
        where.limit(timeout)
        values = option_values("distributed.attention", options)
        return_lse = checked_flag("return_lse", return_lse)
        check_strategy(strategy, dim)
        if all(isinstance(given, Tensor) for given in (query, key, value)):
            query, key, value = autocast(query, key, value)
        shards = placed(query, key, value, values.layout, (where.ring, where.heads))
        said = {"function": "attention", "return_lse": return_lse, "scale": ""}
        refuse_transformed(values.scale, "scale")
        if isinstance(values.scale, Tensor) and (values.scale.ndim or is_tracked(values.scale)):
            of_heads = values._replace(layout="bhld")  # as `placed` has arranged them
            said["scale"] = f"a tensor of {_LIBRARY.view(values.scale, 'scale').tolist()}"
            scaled, values = with_scale(shards.tensors[0], of_heads)
            shards = replace(shards, tensors=(scaled, *shards.tensors[1:]))
    call, exchanges = agreed_call(
        where, shards, variants, values, strategy, order, kv_order, **said
    )
    out, lse = attend_sharded(call, *to_heads(exchanges, shards.tensors))
    if not return_lse:
        return shards.restored(*from_heads(exchanges[:1], [out]))
    out, lse = from_heads(exchanges[:1] * 2, [out, lse[..., None]])
    return shards.restored(out), shards.rows(lse[..., 0])


@partial(with_options, name="distributed.inspect")
@outside_of_graphs
def inspect(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    mesh: Any = None,
    dim: str | None = None,
    order: Order | None = None,
    kv_order: Order | None = None,
    timeout: float = TIMEOUT,
    **options: Unpack[Options],
) -> DistributedRecord:
    """Attention over ranks by a ring, kept so that it can be looked into.

        w[i, j] = exp(s[i, j] - lse[i])

    Parameters
    ----------
    query, key, value, *variants, mesh, dim, order, kv_order, timeout
        As for `qkv.distributed.attention`.
    layout : "bhld"
        Heads before rows; no other layout is taken.
    scale, q_offset, kv_offset, backend : optional
        As for `qkv.attention`.

    Returns
    -------
    DistributedRecord
        `.output`, `.lse`, `.entropy`, `.max_weight`, `.received()`, `.top(k)`, `.tile(...)`.

    Raises
    ------
    DistributedError, QkvError
        As `qkv.distributed.attention` does.

    Notes
    -----
    No rank holds more than the keys of two others and a block of weights. A record keeps copies of
    the rank's rows and of the arrays of variants, so that what is done to these later does not
    change it.

    Examples
    --------
    On every rank:

        record = qkv.distributed.inspect(q, k, v, qkv.Causal(), order=order)
        numbers, weights = record.top(3)
    """
    where = Place.of(mesh, dim)
    with where.told():
        where.limit(timeout)
        values = option_values("distributed.inspect", options)
        if values.layout != "bhld" or isinstance(dim, tuple):
            raise ArgumentError(
                "inspection over ranks takes (..., heads, rows, dim) and one dimension of the "
                "mesh.",
                [("layout", repr(values.layout)), ("dim", repr(dim))],
                "Pass x.swapaxes(-3, -2) for the layout 'blhd'.",
            )
        shards = placed(query, key, value, values.layout, (where.ring, where.heads))
    call, _ = agreed_call(
        where, shards, variants, values, "ring", order, kv_order, function="inspect"
    )
    call.ring.parts.whole = with_own_arrays(call.ring.parts.whole)
    q, k, v = map(own_copy, shards.tensors)
    operands = ShardOperands(_LIBRARY.view(q, "query"), k, v)
    merged = call.ring.forward(operands.query, k, v, statistics=True)
    sinks = call.sinks
    out, lse, rest = merged.finished(sinks)
    output = shards.restored(_LIBRARY.restore(out.astype(call.call.dtype)))
    exact = lse.astype("float64") + rest
    return DistributedRecord(call, operands, output, exact, *merged.statistics(sinks))


_LIBRARY = TorchArrays()
