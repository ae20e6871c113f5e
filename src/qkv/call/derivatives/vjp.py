"""`vjp`: attention, and the pullback from cotangents of its output to gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack

from qkv._dynamo import ends_graph
from qkv.arguments.declarations import shown
from qkv.arguments.readable_checks import checked_flag
from qkv.arrays import is_array
from qkv.arrays.views import view
from qkv.call.attend import attend
from qkv.call.binding.bound import BoundCall, bind
from qkv.call.binding.options import Options, option_values, with_options
from qkv.call.binding.variant_arrays import without_repeats
from qkv.call.checked import CheckedCall, check_call
from qkv.call.derivatives.cotangents import shapes_of
from qkv.call.derivatives.gradients import Gradients, gradients_of
from qkv.call.derivatives.pull_back import Residuals, pull_back
from qkv.errors import ArgumentError
from qkv.partial import Partial

__all__ = ["Gradients", "Pullback", "vjp"]


@ends_graph
@with_options
def vjp(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> tuple[Any, Pullback]:
    """Attention and its vector-Jacobian product: `out, pullback = qkv.vjp(...)`.

    `pullback(grad_out)` gives, for the cotangent dO of the output,

        dP[i, j] = dO[i] . v[j],   dS[i, j] = w[i, j] * (dP[i, j] - dO[i] . out[i])
        dQ[i] = scale * sum_j dS[i, j] k[j],   dK[j] = scale * sum_i dS[i, j] q[i]
        dV[j] = sum_i w[i, j] dO[i]

    with w the weights of the forward pass, and dS continued through the score variants.

    Parameters
    ----------
    query, key, value, *variants, scale, layout, q_offset, kv_offset, return_lse, backend
        As for `attention`. The backend computes both ways.

    Returns
    -------
    out : array or (array, array)
        What `attention` returns; with `return_lse`, `(output, lse)`.
    pullback : callable
        `pullback(grad_out, grad_lse=None, wrt=())` returns `Gradients`. `grad_out` is like the
        output, `grad_lse` like lse. `wrt` names variants of the call whose own arrays are to have
        gradients: `Bias`, `ALiBi`, `RelativeBias`, `Softcap`, `ScoreMod`, `Sinks`, or a bare bias.
        It may be called again.

    Raises
    ------
    QkvError
        As `attention` does; `pullback` raises ShapeError, DTypeError or ArgumentError for
        cotangents or variants that do not fit.

    Notes
    -----
    Weights are computed again from lse, tile by tile: `6 head_dim + 4 v_head_dim` operations for
    each pair in a tile that is not empty, 2.5 times those of the forward pass. Memory beyond the
    gradients grows with the lengths, never with their product: at most eight arrays like query, in
    the type of computation. The rows of few queries are summed again before the backward pass, so
    that both passes add up in one order. What the arrays hold is read when `pullback` is called; do
    not change them in between. Rows without keys have gradients 0. Source: Dao et al.,
    "FlashAttention" (2022), algorithm 4.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> q, v = np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[1.0], [3.0]])
    >>> bias = qkv.Bias(np.zeros((2, 2)))
    >>> out, pullback = qkv.vjp(q, q, v, bias)
    >>> gradients = pullback(np.ones_like(out), wrt=[bias])
    >>> gradients.value
    array([[1.],
           [1.]])
    >>> gradients.of(bias).round(3)
    array([[-0.442,  0.442],
           [-0.442,  0.442]])
    """
    bound = bind(query, key, value, variants, option_values("vjp", options))
    shapes = shapes_of(query, key, value)
    attended = attend(bound, backward=True, differentiable=True, given=variants)
    pullback: Pullback
    if attended.call is not None and attended.partial is not None:
        pullback = Pullback(bound, variants, shapes, None, attended.call, attended.partial)
    else:
        out = view(attended.out, "out") if attended.unrounded is None else attended.unrounded
        residuals = Residuals(out, view(attended.lse, "lse"), attended.lse_rest)
        pullback = Pullback(bound, variants, shapes, residuals, None, None)
    return_lse = checked_flag("return_lse", return_lse)
    return ((attended.out, attended.lse) if return_lse else attended.out), pullback


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pullback:
    """The backward pass of one call, as `qkv.vjp` gives it; keeps the call's arrays and its lse.

    Call it as `pullback(grad_out, grad_lse=None, wrt=())`; it returns `Gradients`.

    Raises
    ------
    ShapeError, DTypeError
        When it is called with cotangents that do not fit.
    ArgumentError
        If `wrt` names no variant of the call.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(2)
    >>> out, pullback = qkv.vjp(x, x, x)
    >>> isinstance(pullback, qkv.Pullback), pullback(np.ones_like(out)).value.round(3).tolist()
    (True, [[1.0, 1.0], [1.0, 1.0]])
    """

    _bound: BoundCall
    _variants: tuple[Any, ...]
    _shapes: tuple[tuple[int, ...], ...]
    _residuals: Residuals | None
    _call: CheckedCall | None
    _partial: Partial | None

    def __repr__(self) -> str:
        named = zip(("query", "key", "value"), self._shapes, strict=False)
        shapes = ", ".join(f"{name} {shape}" for name, shape in named)
        return f"Pullback({', '.join((shapes, *map(repr, self._variants)))})"

    def __call__(self, grad_out: Any, grad_lse: Any = None, wrt: Iterable[Any] = ()) -> Gradients:
        """Gradients for cotangents of the output and of lse; see `qkv.vjp`."""
        if isinstance(grad_out, tuple) and all(map(is_array, grad_out)):  # As JAX takes them.
            raise ArgumentError(
                f"grad_out is a tuple of {len(grad_out)} arrays.",
                action="Pass the cotangents one by one, pullback(grad_out, grad_lse).",
            )
        if not isinstance(wrt, Iterable):
            raise ArgumentError(
                f"wrt is a {type(wrt).__name__}, not a list of variants.", action="Pass a list."
            )
        try:
            named = tuple(wrt)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"wrt is a {type(wrt).__name__}, not a list of variants.", action="Pass a list."
            ) from error
        if any(isinstance(variant, int) for variant in named):
            raise ArgumentError(
                f"wrt={shown(wrt)} holds integers, not variants.",
                action="Name variants of the call, the very objects.",
            )
        if self._residuals is not None:
            return pull_back(
                self._bound, self._residuals, grad_out, grad_lse, named, self._variants
            )
        assert self._call is not None
        assert self._partial is not None
        call = self._call
        dense = without_repeats(self._bound, named, self._variants) if named else self._bound
        if dense is not self._bound:
            call = check_call(dense, self._variants, backward=True)
        return gradients_of(call, self._partial, self._shapes, grad_out, grad_lse, named)
