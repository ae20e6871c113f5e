"""`vjp`: attention, and the way back from a cotangent of its output to everything it read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from qkv._call import Call
from qkv._cotangents import cotangent_of_lse, cotangent_of_out, like_operand, shapes_of
from qkv._own_arrays import as_given, briefly, by_origin, made, wanted
from qkv.backends import Differentiable
from qkv.errors import ArgumentError
from qkv.partial import Partial
from qkv.problem.backward import BackwardInputs
from qkv.problem.check import Layout
from qkv.problem.spec import Origin

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
    in the type of computation. The rows of few queries are summed again
    before the way back, so that both add up in one order. What the arrays hold is read when
    `pullback` is called; do not change them in between. Rows without keys have gradients 0.
    Source: Dao et al., "FlashAttention" (2022), algorithm 4.

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
    shapes = shapes_of(query, key, value)
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
    partial = call.run_for_backward()
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
    known_as : callable
        The variant of the problem for one as it was given.

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
        self,
        query: Any,
        key: Any,
        value: Any,
        of_variants: Sequence[tuple[Origin, Any]] = (),
        known_as: Callable[[Any], Any] = lambda variant: variant,
    ) -> None:
        self.query = query
        self.key = key
        self.value = value
        self._of_variants = tuple(of_variants)
        self._known_as = known_as

    def of(self, variant: Any, array: Any = None) -> Any:
        """The gradient of a variant's own array, with its shape and dtype.

        Parameters
        ----------
        variant : Variant or array
            One that `wrt` named.
        array : array, optional
            Which of the variant's arrays, if a `ScoreMod` reads several.
        """
        known = self._known_as(variant)
        own = [(o, g) for o, g in self._of_variants if made(o, known)]
        if array is not None:
            own = [(o, g) for o, g in own if o.array is array]
        if len(own) == 1:
            return own[0][1]
        if not own:
            raise ArgumentError(
                f"there is no gradient of {briefly(variant if array is None else array)}.",
                action="Name its variant in the pullback: pullback(grad_out, wrt=[variant]).",
            )
        raise ArgumentError(
            f"{briefly(variant)} has {len(own)} arrays.",
            [(f"array {n}", f"{o.array.dtype} {o.array.shape}") for n, (o, _) in enumerate(own)],
            "Say which: gradients.of(variant, array), with the very array that it reads.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pullback:
    """The way back of one call; holds its arrays, its output and its lse."""

    _call: Call
    _partial: Partial
    _shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def resumed(
        cls,
        call: Call,
        out: Array,
        lse: Array,
        shapes: tuple[tuple[int, ...], ...],
        lse_rest: Array | None = None,
    ) -> Pullback:
        """The way back of a call whose output and lse were kept elsewhere.

        Where `lse_rest` is NaN or missing, the forward pass is run again.
        """
        rows = (*call.problem.spec.batch_shape, call.problem.spec.num_heads)
        plain = call.plain(out)
        shape = (*rows, plain.shape[-2])
        known = lse_rest is not None and not np.isnan(lse_rest).any()
        rest = lse_rest.reshape(shape) if lse_rest is not None and known else None
        return cls(call, Partial(plain, lse.reshape(shape), rest), shapes)

    def __call__(self, grad_out: Any, grad_lse: Any = None, wrt: Iterable[Any] = ()) -> Gradients:
        """Gradients for cotangents of the output and of lse; see `qkv.vjp`."""
        call, problem = self._call, self._call.problem
        inputs = self.inputs(grad_out, grad_lse)
        tables, sinks = wanted(problem, tuple(map(call.known_as, wrt)))
        inputs = replace(inputs, tables=frozenset(name for name, _ in tables))
        # A backend that has no backward pass was refused when the call was bound.
        found = cast(Differentiable, call.choice.backend).backward(problem, inputs)
        own = by_origin([(origin, found.tables[name]) for name, origin in tables])
        if sinks is not None:
            own.append((sinks, _of_sinks(problem.operands.sinks, inputs)))
        query, key, value = (
            like_operand(call, gradient, shape)
            for gradient, shape in zip(
                (found.query, found.key, found.value), self._shapes, strict=True
            )
        )
        of_variants = [(origin, call.library.restore(as_given(origin, g))) for origin, g in own]
        return Gradients(query, key, value, of_variants, call.known_as)

    def inputs(self, grad_out: Any, grad_lse: Any = None) -> BackwardInputs:
        """What a backend starts from; no table is named."""
        partial = self._partial
        cotangent = cotangent_of_out(self._call, partial.out, grad_out)
        of_lse = cotangent_of_lse(self._call, partial.lse, grad_lse)
        return BackwardInputs(
            partial.out, partial.lse, cotangent, of_lse, lse_rest=partial.lse_rest
        )


def _of_sinks(sinks: Array | None, inputs: BackwardInputs) -> Array:
    """`d sink[h] = -sum_i exp(sink[h] - lse[i]) * delta[i]`: a key of value 0 in every row."""
    assert sinks is not None
    with np.errstate(all="ignore"):
        along = inputs.out.astype(np.float64) * inputs.grad_out.astype(np.float64)
        delta = along.sum(axis=-1) - inputs.grad_lse
        shares = np.exp(sinks[:, None] - inputs.lse.astype(np.float64)) * delta
        total = -shares.sum(axis=-1)
    by_head: Array = total.reshape(-1, len(sinks)).sum(axis=0)
    return by_head
