"""`qkv.explain`: the trace of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from qkv._dynamo import ends_graph
from qkv.arguments.declarations import checked_size, is_integer, shown
from qkv.arrays.views import view
from qkv.call.binding.options import Options, option_values, with_options
from qkv.call.checked import CheckedCall
from qkv.call.device_call import DeviceCall
from qkv.call.dispatch import checked
from qkv.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from qkv.inspection.traces.gradient import BackwardSteps, backward_steps, gradients
from qkv.inspection.traces.steps import Steps, steps
from qkv.inspection.traces.streaming import TileState, stream
from qkv.inspection.traces.trace import Trace
from qkv.inspection.traces.trace_fields import (
    MaskStage,
    Projections,
    RowGradients,
    ScoreStage,
    Slope,
    TracedGradients,
    TracedHead,
    TracedLedger,
    TracedMechanism,
    TracedProblem,
    TracedRow,
)
from qkv.problem.building.builder import FLOATS
from qkv.problem.building.check import Layout
from qkv.problem.scores import Scores
from qkv.problem.spec import Problem, Spec
from qkv.problem.stored_rows import read_rows

Array = NDArray[Any]

TRACE_LIMIT = 2**22
"""Products, contributions and entries of Jacobians that one trace may hold."""


@ends_graph
@with_options
def explain(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    q_index: int | None = None,
    batch: int | None = None,
    head: int | None = None,
    tokens: Sequence[str] | None = None,
    kv_tokens: Sequence[str] | None = None,
    grad: bool = False,
    cotangent: Any = None,
    block_kv: int | None = None,
    projections: Projections | None = None,
    mechanism: TracedMechanism | None = None,
    **options: Unpack[Options],
) -> Trace:
    """Every step of attention for some queries, as data that can be printed.

    Dot products with all their terms, scaling, each score variant, each mask, the softmax (largest
    score, shift, exp, sum, division), and what each value adds to the output, in float64 from the
    definition.

    Parameters
    ----------
    query, key, value, *variants, scale, layout, q_offset, kv_offset
        As `qkv.attention` takes them.
    backend : str
        Checked as by `qkv.attention`; the trace is computed from the definition whichever it is.
    q_index : int, optional
        Row of query to trace; all by default. Negative counts from the end, as for the next two.
    batch : int, optional
        Flat index over the leading dimensions; all by default.
    head : int, optional
        Query head; all by default.
    tokens : sequence of str (q_len,), optional
        Names of the query rows, and of the key rows if q_len = kv_len.
    kv_tokens : sequence of str (kv_len,), optional
        Names of the key rows.
    grad : bool
        Add the step back: for each row that is traced the softmax Jacobian, and dQ, dK, dV of the
        loss over all rows, batches and heads, whichever `q_index`, `batch` and `head` choose. For
        the gradients of one row alone, pass a `cotangent` that is 0 elsewhere.
    cotangent : array like the output, optional
        What the output is multiplied with before it is summed to a loss; ones by default.
    block_kv : int, optional
        Add the states of the streaming algorithm, for tiles of so many keys.
    projections : Projections, optional
        Where query, key and value come from; kept with the trace.
    mechanism : TracedMechanism, optional
        What is traced, if it has a name; kept with the trace.

    Returns
    -------
    Trace
        `print(trace)` shows it, `trace.to_json()` is its versioned form.

    Raises
    ------
    ShapeError, DTypeError, AmbiguityError, ArgumentError
        The arguments do not fit.
    UnsupportedError
        The trace would hold more than 2**22 numbers, or the step back more than the reference
        limit.

    Notes
    -----
    `rows * kv_len * (head_dim + v_head_dim)` numbers; with `grad=True` also one head's matrices at
    a time. Source: Vaswani et al. (2017), section 3.2.1.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(2)
    >>> trace = qkv.explain(x, x, x, scale=1.0, q_index=0, tokens=["a", "b"])
    >>> trace.heads[0].rows[0].softmax.weights.round(3)
    array([0.731, 0.269])
    """
    if cotangent is not None and not grad:
        raise ArgumentError("a cotangent was given, but grad is False.", action="Pass grad=True.")
    for name, given, kind in (
        ("projections", projections, Projections),
        ("mechanism", mechanism, TracedMechanism),
    ):
        if given is not None and not isinstance(given, kind):
            raise ArgumentError(
                f"{name} is a {type(given).__name__}, not a {kind.__name__}.",
                action=f"Pass {kind.__name__}({', '.join(f.name for f in fields(kind))}).",
            )
    call = checked(query, key, value, variants, option_values("explain", options))
    if isinstance(call, DeviceCall):  # The values will be read.
        call = call.on_host()
    problem, spec = call.problem, call.problem.spec
    batches = selected_indices(batch, spec.batch_size, "batch", "batch_size").tolist()
    heads = selected_indices(head, spec.num_heads, "head", "num_heads").tolist()
    q_rows = selected_indices(q_index, spec.q_len, "q_index", "q_len")
    _check_size(spec, len(batches) * len(heads) * len(q_rows), grad)
    names = _tokens(tokens, spec.q_len, "tokens", "q_len")
    kv_names = _tokens(kv_tokens, spec.kv_len, "kv_tokens", "kv_len")
    if block_kv is not None:
        block_kv = checked_size("block_kv", block_kv)
    if kv_names is None and spec.q_len == spec.kv_len:
        kv_names = names
    d_out = d_query = gradient = None
    if grad:
        d_out = _cotangent(cotangent, call)
        d_query, d_key, d_value = gradients(problem, d_out)
        gradient = TracedGradients(
            call.arranged(d_out),
            _like_argument(d_query, view(query, "query"), call.layout),
            _like_argument(d_key, view(key, "key"), call.layout),
            _like_argument(d_value, view(value, "value"), call.layout),
        )
    traced = tuple(
        _traced_head(problem, b, h, q_rows, d_out, d_query, block_kv)
        for b in batches
        for h in heads
    )
    return Trace(
        _traced_problem(problem),
        names,
        kv_names,
        traced,
        gradient,
        mechanism,
        None if projections is None else projections.kept(),
        TracedLedger.of(traced, spec.head_dim, spec.v_head_dim),
    )


def _traced_problem(problem: Problem) -> TracedProblem:
    spec, operands = problem.spec, problem.operands
    return TracedProblem(
        summary=spec.summary,
        dtype=spec.dtype,
        batch_shape=spec.batch_shape,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        q_len=spec.q_len,
        kv_len=spec.kv_len,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        scale=operands.scale,
        rotation=spec.rotation.label if spec.rotation else None,
        dropout=operands.dropout.p if operands.dropout else None,
    )


def _traced_head(
    problem: Problem,
    batch: int,
    head: int,
    q_rows: Array,
    d_out: Array | None,
    d_query: Array | None,
    block_kv: int | None,
) -> TracedHead:
    spec, operands = problem.spec, problem.operands
    index: tuple[Any, ...] = np.unravel_index(batch, spec.batch_shape)
    q_head = (*index, head)
    forward = steps(Scores(problem, np.dtype(np.float64)), batch, head, q_rows)
    back = None if d_out is None else backward_steps(problem, forward, d_out[q_head][q_rows])
    kv_head = head // spec.group_size
    positions = operands.positions.query_positions(), operands.positions.key_positions()
    q_pos, kv_pos = (p[batch if len(p) > 1 else 0] for p in positions)
    given = operands.query[q_head][q_rows].astype(np.float64)
    states = None
    if block_kv is not None:
        sink = None if operands.sinks is None else float(operands.sinks[head])
        states = tuple(stream(forward.scores, forward.value, block_kv, sink, forward.factors))
    rows = []
    for i, row in enumerate(q_rows):
        tiles = None if states is None else tuple(state.row(i) for state in states)
        row_back = None
        if back is not None and d_out is not None and d_query is not None:
            row_back = _row_back(forward, back, i, d_out[q_head][row], d_query[q_head][row])
        rows.append(_traced_row(forward, i, int(q_pos[row]), given[i], tiles, row_back, spec))
    key = read_rows(operands.key, index, kv_head, slice(None), np.dtype(np.float64))
    return TracedHead(
        batch=batch,
        head=head,
        kv_head=kv_head,
        kv_pos=kv_pos,
        # Copies, because rows of float64 are read in place, and the caller may change them later.
        key=key.copy(),
        rotated_key=forward.key if spec.rotation else None,
        value=forward.value.copy(),
        rows=tuple(rows),
    )


def _traced_row(
    forward: Steps,
    i: int,
    q_pos: int,
    given: Array,
    tiles: tuple[TileState, ...] | None,
    back: RowGradients | None,
    spec: Spec,
) -> TracedRow:
    allowed = ~np.isneginf(forward.scores[i])
    with np.errstate(all="ignore"):
        products = forward.query[i] * forward.key
        # `where` rather than a product with 0, because a forbidden value may be NaN.
        contributions = np.where(allowed[:, None], forward.dropped[i, :, None] * forward.value, 0.0)
    return TracedRow(
        q_index=int(forward.q_index[i]),
        q_pos=q_pos,
        query=given,
        rotated_query=forward.query[i] if spec.rotation else None,
        products=products,
        raw=forward.raw[i],
        scaled=forward.scaled[i],
        stages=tuple(ScoreStage(label, scores[i]) for label, scores in forward.stages),
        masks=tuple(MaskStage(label, allows[i]) for label, allows in forward.masks),
        allowed=allowed,
        scores=forward.scores[i],
        softmax=forward.softmax.row(i),
        factors=None if forward.factors is None else forward.factors[i],
        contributions=contributions,
        output=contributions.sum(axis=0),
        tiles=tiles,
        back=back,
    )


def _row_back(
    forward: Steps, back: BackwardSteps, i: int, d_out: Array, d_query: Array
) -> RowGradients:
    weights = forward.softmax.weights[i]
    with np.errstate(all="ignore"):
        jacobian = np.diag(weights) - np.outer(weights, weights)
    return RowGradients(
        cotangent=d_out,
        d_weights=back.d_weights[i],
        jacobian=jacobian,
        d_scores=back.d_scores[i],
        slopes=tuple(Slope(label, values[i]) for label, values in back.slopes),
        d_scaled=back.d_scaled[i],
        d_raw=back.d_raw[i],
        d_query=d_query,
    )


def selected_indices(value: Any, size: int, name: str, of: str) -> Array:
    """All indices, or the requested one."""
    if value is None:
        return np.arange(size)
    if not is_integer(value) or not -size <= value < size:
        raise ArgumentError(
            f"{name}={shown(value)} is not one of the {size} indices.",
            [(of, str(size))],
            f"Pass an integer from 0 to {size - 1}, or leave it out for all."
            if size
            else f"Pass one row or more: {of}=0.",
        )
    return np.array([int(value) % size])


def _tokens(tokens: Any, size: int, name: str, of: str) -> tuple[str, ...] | None:
    if tokens is None:
        return None
    try:
        given = (tokens,) if isinstance(tokens, str | bytes) else tuple(tokens)
    except (TypeError, RuntimeError):
        given = (tokens,)
    if len(given) != size or not all(isinstance(token, str) for token in given):
        kinds = ", ".join(sorted({type(token).__name__ for token in given}))
        raise ArgumentError(
            f"{name} must be {size} strings, one for each row.",
            [(name, f"{len(given)} of type {kinds or 'nothing'}"), (of, str(size))],
            "Pass a list of one string for each row.",
        )
    return tuple(map(str, given))


def _check_size(spec: Spec, rows: int, grad: bool) -> None:
    if not isinstance(grad, bool | np.bool_):
        raise ArgumentError(f"grad={shown(grad)} is not a bool.", action="Pass True or False.")
    each = spec.kv_len * (spec.head_dim + spec.v_head_dim + (spec.kv_len if grad else 0))
    if rows * each > TRACE_LIMIT:
        sizes = f"kv_len={spec.kv_len}, head_dim={spec.head_dim}, v_head_dim={spec.v_head_dim}"
        raise UnsupportedError(
            f"the trace of {rows} rows would hold {rows * each} numbers (limit {TRACE_LIMIT}).",
            [("one row", f"{each} numbers: {sizes}{', grad=True' if grad else ''}")],
            "Choose rows with q_index=, head= and batch=, or use qkv.inspect, which has no limit.",
        )


def _cotangent(cotangent: Any, call: CheckedCall) -> Array:
    """dO as `(*batch_shape, num_heads, q_len, v_head_dim)` in float64."""
    spec = call.problem.spec
    shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
    if cotangent is None:
        return np.ones(shape)
    given = view(cotangent, "cotangent")
    outside = call.arranged(np.broadcast_to(0.0, shape)).shape
    if given.dtype.name not in FLOATS:
        raise DTypeError(
            f"cotangent has dtype {given.dtype}, not a floating type.",
            action="Convert it, as in cotangent.astype('float64').",
        )
    if given.shape != outside:
        raise ShapeError(
            f"cotangent has shape {given.shape}; the output has {outside}.",
            action="Pass one number for each entry of the output.",
        )
    return np.array(call.plain(given).reshape(shape), np.float64)


def _like_argument(gradient: Array, array: Array, layout: Layout) -> Array:
    """The gradient of an argument: summed over the dimensions it was broadcast along."""
    is_blhd = layout == "blhd" and array.ndim > 2
    shape = array.swapaxes(-3, -2).shape if is_blhd else array.shape
    padded = (1,) * (gradient.ndim - len(shape)) + shape
    axes = tuple(i for i, n in enumerate(padded) if n == 1 and gradient.shape[i] != 1)
    summed: Array = gradient.sum(axis=axes, keepdims=True).reshape(shape)
    return summed.swapaxes(-3, -2) if is_blhd else summed
