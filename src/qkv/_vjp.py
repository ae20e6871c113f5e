"""`vjp`: attention, and the way back from a cotangent of its output to everything it read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv._call import Call
from qkv.arrays import library_of
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.partial import Partial
from qkv.problem.backward import BackwardInputs, reads
from qkv.problem.check import Layout
from qkv.problem.spec import Operands, Origin, Spec

__all__ = ["Gradients", "vjp"]

Array = NDArray[Any]


def vjp(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    scale: float | None = None,
    layout: Layout = "bhld",
    q_offset: Any = None,
    kv_offset: Any = 0,
    return_lse: bool = False,
    backend: str = "auto",
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
    gradients grows with the lengths, never with their product: at most eight arrays like query,
    in the type of computation. What the arrays hold is read when `pullback` is called; do not
    change them in between. Rows without keys have gradients 0. Source: Dao et al.,
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
    shapes = tuple(
        library_of(array, role).view(array, role).shape
        for array, role in ((query, "query"), (key, "key"), (value, "value"))
    )
    call = Call.bind(
        query,
        key,
        value,
        variants,
        scale=scale,
        layout=layout,
        q_offset=q_offset,
        kv_offset=kv_offset,
        backend=backend,
        backward=True,
    )
    partial = call.run()
    out = call.output(partial)
    pullback = Pullback(call, partial, shapes)
    return ((out, call.rows(partial.lse)) if return_lse else out), pullback


class Gradients:
    """Gradients of one call: of `query`, `key`, `value`, and `of(variant)`.

    Attributes
    ----------
    query, key, value : array
        With the library, dtype, shape and layout of the operand; where its leading dimensions were
        broadcast, `sum` over them.

    Parameters
    ----------
    of_variants : sequence of (origin, array)
        What `of` looks up; `qkv.vjp` fills it in.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(2)
    >>> out, pullback = qkv.vjp(x, x, x, qkv.Sinks(0.0))
    >>> pullback(np.ones_like(out)).value.round(3)
    array([[0.752, 0.752],
           [0.752, 0.752]])
    """

    def __init__(
        self, query: Any, key: Any, value: Any, of_variants: Sequence[tuple[Origin, Any]] = ()
    ) -> None:
        self.query = query
        self.key = key
        self.value = value
        self._of_variants = tuple(of_variants)

    def of(self, variant: Any, array: Any = None) -> Any:
        """The gradient of a variant's own array, with its shape and dtype.

        Parameters
        ----------
        variant : Variant or array
            One that `wrt` named.
        array : array, optional
            Which of the variant's arrays, if a `ScoreMod` reads several.
        """
        own = [(o, g) for o, g in self._of_variants if _made(o, variant)]
        if array is not None:
            own = [(o, g) for o, g in own if o.array is array]
        if len(own) == 1:
            return own[0][1]
        if not own:
            raise ArgumentError(
                f"there is no gradient of {_briefly(variant if array is None else array)}.",
                action="Name its variant in the pullback: pullback(grad_out, wrt=[variant]).",
            )
        raise ArgumentError(
            f"{_briefly(variant)} has {len(own)} arrays.",
            [(f"array {n}", f"{o.array.dtype} {o.array.shape}") for n, (o, _) in enumerate(own)],
            "Say which: gradients.of(variant, array), with the very array that it reads.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pullback:
    """The way back of one call; holds its arrays, its output and its lse."""

    _call: Call
    _partial: Partial
    _shapes: tuple[tuple[int, ...], ...]

    def __call__(self, grad_out: Any, grad_lse: Any = None, wrt: Iterable[Any] = ()) -> Gradients:
        """Gradients for cotangents of the output and of lse; see `qkv.vjp`."""
        call, partial = self._call, self._partial
        problem = call.problem
        spec, operands = problem.spec, problem.operands
        cotangent = self._cotangent(grad_out)
        of_lse = self._of_lse(grad_lse)
        tables, sinks = _wanted(spec, operands, tuple(wrt))
        inputs = BackwardInputs(
            partial.out, partial.lse, cotangent, of_lse, frozenset(n for n, _ in tables)
        )
        found = call.choice.backend.backward(problem, inputs)  # type: ignore[attr-defined]
        own = _by_origin([(origin, found.tables[name]) for name, origin in tables])
        if sinks is not None:
            own.append((sinks, _of_sinks(sinks, operands.sinks, inputs)))
        query, key, value = (
            self._like(gradient, shape)
            for gradient, shape in zip(
                (found.query, found.key, found.value), self._shapes, strict=True
            )
        )
        of_variants = [(origin, call.library.restore(_as_given(origin, g))) for origin, g in own]
        return Gradients(query, key, value, of_variants)

    def _cotangent(self, grad_out: Any) -> Array:
        """`grad_out` as `(*batch_shape, num_heads, q_len, v_head_dim)`."""
        call = self._call
        view = library_of(grad_out, "grad_out").view(grad_out, "grad_out")
        expected: tuple[int, ...] = self._partial.out.shape
        if call.ndim == 2:
            expected = expected[-2:]
        elif call.layout == "blhd":
            expected = (*expected[:-3], expected[-2], expected[-3], expected[-1])
        _fits("grad_out", view, expected, call.dtype, "the output")
        if call.ndim == 2:
            return view[None]
        return view.swapaxes(-3, -2) if call.layout == "blhd" else view

    def _of_lse(self, grad_lse: Any) -> Array:
        lse = self._partial.lse
        if grad_lse is None:
            return np.zeros_like(lse)
        view = library_of(grad_lse, "grad_lse").view(grad_lse, "grad_lse")
        expected = lse.shape[-1:] if self._call.ndim == 2 else lse.shape
        _fits("grad_lse", view, expected, lse.dtype, "lse")
        return view.reshape(lse.shape)

    def _like(self, gradient: Array, shape: tuple[int, ...]) -> Any:
        """Like the operand: leading dimensions that were broadcast are summed."""
        call = self._call
        turned = call.layout == "blhd" and len(shape) > 2
        plain = (1, *shape) if len(shape) == 2 else shape
        if turned:
            plain = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        extra = gradient.ndim - len(plain)
        repeated = [
            axis
            for axis in range(gradient.ndim - 3)
            if axis < extra or (plain[axis - extra] == 1 and gradient.shape[axis] != 1)
        ]
        with np.errstate(all="ignore"):
            if repeated:
                gradient = gradient.sum(axis=tuple(repeated), keepdims=True)
            gradient = gradient.reshape(plain)
            gradient = gradient.swapaxes(-3, -2) if turned else gradient
            return call.library.restore(np.asarray(gradient.reshape(shape), call.dtype, order="C"))


def _fits(role: str, view: Array, shape: tuple[int, ...], dtype: np.dtype[Any], other: str) -> None:
    if view.shape != shape:
        raise ShapeError(
            f"{role} has shape {view.shape}, {other} {shape}.",
            action=f"Pass a cotangent for each entry of {other}.",
        )
    if view.dtype != dtype:
        raise DTypeError(
            f"{role} has dtype {view.dtype}, {other} {dtype}.",
            action=f"Convert it, as in {role}.astype('{dtype}').",
        )


# Variants' own arrays


def _made(origin: Origin, variant: Any) -> bool:
    """Whether a variant, or the bare array in its place, is where values came from."""
    return origin.variant is variant or (
        isinstance(variant, np.ndarray) and getattr(origin.variant, "array", None) is variant
    )


def _wanted(
    spec: Spec, operands: Operands, wrt: tuple[Any, ...]
) -> tuple[list[tuple[str, Origin]], Origin | None]:
    """Tables whose gradients are wanted, and the sinks if theirs is."""
    tables: list[tuple[str, Origin]] = []
    sinks = None
    for variant in wrt:
        own = [
            (table.name, operands.origins[table.name])
            for table in spec.tables
            if table.kind == "float"
            and _made(operands.origins[table.name], variant)
            and reads(spec, frozenset({table.name}))
        ]
        for name, origin in own:
            if operands.tables[name].size != origin.array.size:
                raise ArgumentError(
                    f"an array of {_briefly(variant)} repeats its entries (strides "
                    f"{origin.array.strides}).",
                    action="Pass it as it was before it was broadcast; its gradient is then a sum.",
                )
        tables += [entry for entry in own if entry not in tables]
        if operands.sink_origin is not None and _made(operands.sink_origin, variant):
            sinks = operands.sink_origin
        elif not own:
            raise ArgumentError(
                f"no score of this call changes with an array of {_briefly(variant)}.",
                [("variants", spec.summary)],
                "Name variants of the call, the very objects, that hold floating numbers.",
            )
    return tables, sinks


def _by_origin(found: list[tuple[Origin, Array]]) -> list[tuple[Origin, Array]]:
    """One gradient for each array: a variant that was given twice has the sum."""
    sums: dict[tuple[int, int], tuple[Origin, Array]] = {}
    for origin, gradient in found:
        place = id(origin.variant), origin.place
        sums[place] = (origin, sums[place][1] + gradient if place in sums else gradient)
    return list(sums.values())


def _of_sinks(origin: Origin, sinks: Array | None, inputs: BackwardInputs) -> Array:
    """`d sink[h] = -sum_i exp(sink[h] - lse[i]) * delta[i]`: a key of value 0 in every row."""
    assert sinks is not None
    with np.errstate(all="ignore"):
        along = inputs.out.astype(np.float64) * inputs.grad_out.astype(np.float64)
        delta = along.sum(axis=-1) - inputs.grad_lse
        shares = np.exp(sinks[:, None] - inputs.lse.astype(np.float64)) * delta
        total = -shares.sum(axis=-1)
    by_head: Array = total.reshape(-1, len(sinks)).sum(axis=0)
    return by_head if origin.array.ndim else by_head.sum()


def _as_given(origin: Origin, gradient: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(gradient).reshape(origin.array.shape).astype(origin.array.dtype)


def _briefly(thing: Any) -> str:
    if isinstance(thing, np.ndarray):
        return f"a {thing.dtype} array {thing.shape}"
    return f"{thing!r:.80}"
