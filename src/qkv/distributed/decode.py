"""Decoding over a KV cache whose tokens are spread over ranks: one merge of (out, lse) a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch

from qkv.arguments.readable_checks import checked_flag
from qkv.arrays.torch_arrays import TorchArrays
from qkv.call.binding.bound import bind
from qkv.call.binding.options import DEFAULTS, Options, OptionValues, option_values, with_options
from qkv.call.checked import CheckedCall, check_call
from qkv.distributed.calls.agreed_call import Place
from qkv.distributed.calls.parts import Merged, Parts, ShardRows
from qkv.distributed.messages.agreement import fingerprint
from qkv.distributed.messages.links import TIMEOUT, Links, group_of, outside_of_graphs
from qkv.distributed.orders.order import Order
from qkv.errors import QkvError, UnsupportedError
from qkv.partial import Partial
from qkv.problem.part import check_parts, placeholder
from qkv.problem.stored_rows import Paged, Quantized, Rows, StoredRows

__all__ = ["decode"]

Tensor = torch.Tensor
_LIBRARY = TorchArrays()


@partial(with_options, name="distributed.decode")
@outside_of_graphs
def decode(
    query: Tensor,
    key: Any,
    value: Any,
    *variants: Any,
    mesh: Any = None,
    dim: str | None = None,
    return_lse: bool = False,
    timeout: float = TIMEOUT,
    **options: Unpack[Options],
) -> Any:
    """Attention of the same queries on every rank over keys that are spread over ranks.

        out = sum_r exp(lse_r - lse) out_r,   lse = log sum_r exp(lse_r)

    Parameters
    ----------
    query : Tensor (..., num_heads, q_len, head_dim)
        The same on every rank. Values are not compared: of queries that differ, the output
        is that of none.
    key, value : Tensor, Paged or Quantized (..., num_kv_heads, own tokens, dim)
        The tokens that this rank holds: those of rank 0 come first, then those of rank 1, and so
        on. Ranks may hold different numbers of tokens, and none. Every row of pages counts as a
        token: only the last pages of the last rank may have free rows, and `KeyLengths` then says
        how many tokens there are on all ranks.
    *variants
        As for `qkv.attention`, of all tokens.
    mesh, dim, timeout
        As for `qkv.distributed.attention`.
    return_lse : bool
        Return `(output, lse)`.
    scale, layout, q_offset, kv_offset, backend : optional
        As for `qkv.attention`; `q_offset="end"` puts the last query at the last token of all ranks.

    Returns
    -------
    Tensor, or (Tensor, Tensor)
        The output for all tokens, with the same bits on every rank.

    Raises
    ------
    DistributedError
        If ranks were called with different things, or one does not answer within the timeout.
    UnsupportedError
        If torch differentiates the call: a step has no gradient.
    QkvError
        As `qkv.attention` does.

    Notes
    -----
    A step sends `num_heads * q_len * (v_head_dim + 2)` numbers to every other rank, whatever the
    number of tokens. Source: Hong et al., "FlashDecoding++" (2023), section 3, for split keys.

    Examples
    --------
    On every rank, with its own part of the cache:

        out = qkv.distributed.decode(q, keys, values, qkv.Causal(), q_offset="end")
    """
    links = Links(group_of(mesh, dim))
    where = Place(links, Links(None))
    with where.told():
        where.limit(timeout)
        values = option_values("distributed.decode", options)
        return_lse = checked_flag("return_lse", return_lse)
        if not isinstance(query, Tensor) or hasattr(query, "placements"):
            raise UnsupportedError(
                f"query is a {type(query).__name__}, not a plain tensor.",
                action="Pass the same tensor of queries on every rank.",
            )
        own = _checked(query, key, value, values)
    said = {
        "function": "decode",
        "query": f"{query.dtype} {tuple(query.shape)}",
        "shapes without tokens": _without_tokens(own),
        "number of variants": len(variants),
        "own tokens": own.problem.spec.kv_len,
    }
    everyone = where.everyone(said, query.device)
    tokens = Order.of_sizes([of["own tokens"] for of in everyone])
    with where.told():
        whole = _whole(own, tokens.length, variants, values)
        mine, rows = _with_offset(own, whole, variants, values)
        said = {"what variants and options come to": fingerprint(whole.problem)}
    where.everyone(said, query.device)
    return _run(links, own, mine, rows, tokens, values, return_lse)


def _run(
    links: Links,
    own: CheckedCall,
    whole: CheckedCall,
    key: Rows,
    tokens: Order,
    options: OptionValues,
    return_lse: bool,
) -> Any:
    spec, operands = whole.problem.spec, own.problem.operands
    parts = Parts(whole.problem, options.backend, range(spec.num_heads), range(spec.num_kv_heads))
    shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
    mine = Merged.empty(shape, spec.compute_dtype)
    queries, keys = ShardRows((range(spec.q_len),)), ShardRows(tokens.runs[links.rank])
    parts.attend(mine, operands.query, queries, key, operands.value, keys)
    together = Merged.empty(shape, spec.compute_dtype)
    outs = links.all_to_all(torch.from_numpy(np.ascontiguousarray(mine.out)))
    sums = links.all_to_all(torch.from_numpy(mine.lse))
    for of_rank, its_lse in zip(outs, sums, strict=True):
        together.add(slice(None), Partial(of_rank.numpy(), its_lse.numpy()))
    out, lse, _ = together.finished(whole.problem.operands.sinks)
    output = own.output(Partial(out, lse))
    return (output, own.rows(lse)) if return_lse else output


def _checked(query: Tensor, key: Any, value: Any, options: OptionValues) -> CheckedCall:
    """This rank's arrays, without variants, which are of the whole."""
    plain = DEFAULTS._replace(layout=options.layout, backend=options.backend)
    bound = bind(query, key, value, (), plain)
    _refuse_gradients(bound.leaves)
    return check_call(bound)


def _without_tokens(own: CheckedCall) -> str:
    """What every rank's keys and values have alike, whatever they are stored as."""
    spec = own.problem.spec
    key, value = (
        (*spec.batch_shape, spec.num_kv_heads, dim) for dim in (spec.head_dim, spec.v_head_dim)
    )
    return f"key {key}, value {value}"


def _refuse_gradients(leaves: Sequence[Any]) -> None:
    tracked = [of for of in leaves if isinstance(of, Tensor) and _LIBRARY.is_tracked(of)]
    if tracked:
        raise UnsupportedError(
            f"torch differentiates this call, in {len(tracked)} of its arrays, and decoding over "
            "ranks has no gradient.",
            [("array", f"{of.dtype} {tuple(of.shape)}") for of in tracked],
            "Call it under torch.no_grad(), or qkv.distributed.attention to train.",
        )


def _with_offset(
    own: CheckedCall, whole: CheckedCall, variants: Any, options: OptionValues
) -> tuple[CheckedCall, Rows]:
    """The call of all tokens with the offset of this rank's quantised keys, and these keys.

    Each rank may have an offset of its own. Scores over the rank's keys contain it, or the keys
    themselves where they are rotated.
    """
    given, key = own.unbound.key, own.problem.operands.key
    stored = given.pages if isinstance(given, Paged) else given
    if not isinstance(stored, Quantized) or stored.offset is None:
        return whole, key
    with_offset = _whole(own, whole.problem.spec.kv_len, variants, options, stored.offset)
    assert isinstance(key, StoredRows)
    is_rotated = with_offset.problem.spec.rotation is not None
    return with_offset, replace(key, offset=stored.offset) if is_rotated else key


def _whole(
    own: CheckedCall, tokens: int, variants: Any, options: OptionValues, offset: Any = None
) -> CheckedCall:
    """The checked call of all tokens, which no rank holds; with the offset of quantised keys."""
    spec = own.problem.spec
    dtype = own.dtype
    batch = spec.batch_shape
    query = placeholder((*batch, spec.num_heads, spec.q_len, spec.head_dim), dtype)
    shape = *batch, spec.num_kv_heads, tokens, spec.head_dim
    key: Any = placeholder(shape, dtype)
    if offset is not None:
        query = own.problem.operands.query
        scales = placeholder(shape[:-1], np.dtype(np.float32))
        key = Quantized(placeholder(shape, np.dtype(np.int8)), scales, offset)
    value = placeholder((*batch, spec.num_kv_heads, tokens, spec.v_head_dim), dtype)
    try:
        heads_first = options._replace(layout="bhld")
        bound = bind(query, key, value, variants, heads_first)
        _refuse_gradients(bound.leaves)
        whole = check_call(bound)
        check_parts(whole.problem.spec)
        return whole
    except QkvError as error:
        raise error.with_action(_LIBRARY.in_words(error.action)) from None
