"""The public functions `attention`, `inspect`, `plan` and `merge`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

import numpy as np

from qkv._dynamo import ends_graph
from qkv.arguments.readable_checks import check_layout, checked_flag
from qkv.arrays import library_of
from qkv.backends import Progress
from qkv.bridges import bridge_of
from qkv.call.attend import attend
from qkv.call.binding.bound import bind
from qkv.call.binding.options import DEFAULTS, Options, OptionValues, option_values, with_options
from qkv.call.dispatch import checked
from qkv.call.inspected import attend_for_inspection
from qkv.call.merging import merge_parts
from qkv.errors import ArgumentError
from qkv.problem.building.check import Layout
from qkv.process.forks import importing

if TYPE_CHECKING:
    from qkv.inspection.records.record import Record
    from qkv.planning import Plan

__all__ = ["attention", "attention_of", "inspect", "merge", "plan"]

Array = TypeVar("Array")
"""The type of the query, of which the output is one too. The lse of 16-bit queries is wider."""


@overload
def attention(
    query: Array,
    key: Any,
    value: Any,
    *variants: Any,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Array: ...
@overload
def attention(
    query: Array,
    key: Any,
    value: Any,
    *variants: Any,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Array, Any]: ...
@overload
def attention(
    query: Array,
    key: Any,
    value: Any,
    *variants: Any,
    return_lse: bool,
    **options: Unpack[Options],
) -> Array | tuple[Array, Any]: ...
@with_options
def attention(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Scaled dot-product attention, `softmax(scale * Q K^T + ...) V`, exact and in O(n) memory.

        s[i, j] = scale * q[i] . k[j], changed by the score variants in the order given
        out[i]  = sum_j exp(s[i, j] - lse[i]) v[j],   lse[i] = log sum_j exp(s[i, j])

    over the pairs that every mask allows.

    Parameters
    ----------
    query : array (..., num_heads, q_len, head_dim)
        float64, float32, float16 or bfloat16; two dimensions are one head. Read in place.
    key : array (..., num_kv_heads, kv_len, head_dim)
        num_kv_heads divides num_heads; query head h reads kv head `h // group_size`.
    value : array (..., num_kv_heads, kv_len, v_head_dim)
    *variants
        Masks (`Causal()`, `SlidingWindow(...)`, ...), score variants (`ALiBi()`, `Softcap(30.0)`,
        ...), and others (`RoPE()`, `Sinks(...)`). A bare boolean array is a mask (True = may
        attend), a floating one a bias; they broadcast to (..., num_heads, q_len, kv_len).
    scale : float, optional
        `head_dim ** -0.5` unless given.
    layout : "bhld" or "blhd"
        Order of heads and length in query, key, value and output.
    q_offset : int, integer array over the leading dimensions, "start", "end" or None
        Position of query row 0. "start" is 0, "end" puts the last query at the last key.
    kv_offset : int or integer array over the leading dimensions
        Position of key row 0.
    return_lse : bool
        Return `(output, lse)`; lse, natural, is (..., num_heads, q_len) in either layout.
    backend : str
        "auto", or a name that `qkv.plan` lists.

    Returns
    -------
    array or (array, array)
        Output with the query's dtype and layout, (..., num_heads, q_len, v_head_dim). A row with
        no allowed key is 0, its lse -inf.

    Raises
    ------
    ShapeError, DTypeError, AmbiguityError, ArgumentError
        The arguments do not fit; the message says which and how to mend it.
    UnsupportedError
        No backend can run the problem.

    Notes
    -----
    `2 (head_dim + v_head_dim)` operations for each pair in a tile that is not empty; memory beyond
    the output does not grow with the lengths. Source: Vaswani et al. (2017), equation 1.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> q = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> qkv.attention(q, q, q, qkv.Causal()).round(3)
    array([[1.  , 0.  ],
           [0.33, 0.67]])
    """
    values = DEFAULTS if not options else option_values("attention", options)
    if return_lse is not False and return_lse is not True:
        return_lse = checked_flag("return_lse", return_lse)
    return attention_of(query, key, value, variants, values, return_lse)


def attention_of(
    query: Any,
    key: Any,
    value: Any,
    variants: tuple[Any, ...],
    options: OptionValues,
    return_lse: bool,
) -> Any:
    """`attention` with all options."""
    bridge = None if type(query) is np.ndarray else bridge_of(type(query))
    if bridge is not None:
        return bridge.attention(query, key, value, variants, options, return_lse)
    attended = attend(bind(query, key, value, variants, options), rows=return_lse)
    return (attended.out, attended.lse) if return_lse else attended.out


def _as_attended(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Query, key and value in the types in which `attention` takes them, also under autocast."""
    in_autocast = getattr(bridge_of(type(query)), "in_autocast", None)
    return (query, key, value) if in_autocast is None else in_autocast(query, key, value)


@ends_graph
@with_options
def inspect(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Record:
    """Run attention and keep what is needed to look into it at any length.

        w[i, j] = exp(s[i, j] - lse[i]),   recomputed tile by tile from query, key and lse

    Parameters
    ----------
    query, key, value, *variants, scale, layout, q_offset, kv_offset, backend
        As for `attention`.
    progress : callable (done, total), optional
        Told of blocks done while a statistic, or a picture of the weights, is computed.

    Returns
    -------
    Record
        `.output`, `.lse`, `.entropy`, `.max_weight`, `.received`, `.top(k)`, `.mass(keys)`,
        `.mass_at(offset)`, and `.weights`, a lazy array.

    Raises
    ------
    QkvError
        As `attention` does.

    Notes
    -----
    With the backend "cpu", entropy and largest weight come with the output, for up to 5 % more than
    `attention` takes; `received` and `top(k)` are one more pass over query and key each, `2
    head_dim` operations for each pair, which takes a half to four fifths as long for k = 8 and up
    to twice as long for k = 64. Every other question, and every one to other backends, is such a
    pass in NumPy, several times as slow. None holds more than a tile of weights. A record keeps
    copies of query, key, value and the arrays of variants, so that what is done to these later does
    not change it.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(3)
    >>> record = qkv.inspect(x, x, x, qkv.Causal())
    >>> record.entropy.round(4)
    array([0.    , 0.6532, 1.0581])
    >>> record.top(1)[0][:, 0]
    array([0, 1, 2])
    >>> record.weights[2, :2].round(4)
    array([0.2645, 0.2645])
    """
    operands = _as_attended(query, key, value)
    bound = bind(*operands, variants, option_values("inspect", options)).of_copies()
    inspected = attend_for_inspection(bound)
    if not bound.structure.is_known:
        inspected.copy_tables()
    with importing():
        from qkv.inspection.records.record import Record

    return Record(inspected, progress)


@ends_graph
@with_options
def plan(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    **options: Unpack[Options],
) -> Plan:
    """Say what `attention` would do with the same arguments, without doing it.

    Parameters
    ----------
    query, key, value, *variants, scale, layout, q_offset, kv_offset, backend
        As for `attention`.

    Returns
    -------
    Plan
        `.backend`, `.refusals` of the others, `.tiles`, `.operations`, `.output_bytes`,
        `.scratch_bytes`, `.dense_bytes`; `str()` of it is a table.

    Raises
    ------
    QkvError
        As `attention` does.

    Notes
    -----
    Reads the values of masks, not of query, key and value; takes less than a microsecond for a
    tile of a causal mask.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((1000, 512))
    >>> qkv.plan(x, x, x, backend="blocked").operations
    2048000000
    """
    operands = _as_attended(query, key, value)
    call = checked(*operands, variants, option_values("plan", options))
    with importing():
        from qkv.planning import make_plan

    return make_plan(call.problem, call.choice, library_of(query, "query").name)


def merge(*parts: tuple[Any, Any], layout: Layout = "bhld") -> tuple[Any, Any]:
    """Join attention over separate sets of keys into attention over all of them.

        lse = log sum_i exp(lse_i),   out = sum_i exp(lse_i - lse) out_i

    Parameters
    ----------
    *parts : (out, lse)
        As `attention(..., return_lse=True)` returns them, for the same queries. Give sinks to one
        part only.
    layout : "bhld" or "blhd"
        That of the outputs.

    Returns
    -------
    (out, lse)
        In the library and dtype of the first part; differentiable where its library follows it.

    Raises
    ------
    ArgumentError, ShapeError, DTypeError
        If there is no part, or parts do not fit one another.
    UnsupportedError
        If a library follows a later part, and the first is of another library.

    Notes
    -----
    `2 v_head_dim` operations for each row of each part.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.arange(8.0).reshape(4, 2)
    >>> halves = [qkv.attention(x, x[i:i+2], x[i:i+2], return_lse=True) for i in (0, 2)]
    >>> bool(np.allclose(qkv.merge(*halves)[0], qkv.attention(x, x, x)))
    True
    """
    if not parts:
        raise ArgumentError("merge was given no parts.", action="Pass at least one (out, lse).")
    check_layout(layout)
    for part in parts:
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise ArgumentError(
                f"merge was given a {type(part).__name__}, not a pair (out, lse) of arrays.",
                action="Pass what attention returns with return_lse=True.",
            )
    of_library = getattr(bridge_of(type(parts[0][0])), "merge", None)
    merged = None if of_library is None else of_library(parts, layout)
    return merge_parts(parts, layout) if merged is None else merged
