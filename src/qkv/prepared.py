"""`qkv.prepare`: a call made ready once, for loops that repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from qkv._dynamo import ends_graph
from qkv.arguments.declarations import is_integer, shown
from qkv.arguments.readable_checks import array_shape, checked_flag
from qkv.arrays import library_named, library_of
from qkv.backends import Passes, conditions
from qkv.bridges import bridge_of
from qkv.call.attend import attend, run_alike
from qkv.call.binding.bound import BoundCall, Structure, bind
from qkv.call.binding.options import Options, option_values, with_options
from qkv.call.checked import CheckedCall, check_call, views_of
from qkv.call.device_call import is_device_call
from qkv.call.repeated.cache import PreparedCall
from qkv.call.repeated.forms import fixed_form, heads_first, step_form
from qkv.call.repeated.preparing import prepared_by
from qkv.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from qkv.problem.building.builder import INDEX_LIMIT
from qkv.process.forks import importing

if TYPE_CHECKING:
    from qkv.planning import Plan

__all__ = ["ArrayForm", "CallForm", "PreparedAttention", "prepare"]

Array = NDArray[Any]


class ArrayForm(NamedTuple):
    """What is expected of one array of a prepared call.

    Attributes
    ----------
    dtype : str
    shape : tuple of (int or None)
        None for a size that is free.
    strides : tuple of int, or None
        In elements; None if any will do.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.ones((2, 3, 4), np.float32)
    >>> qkv.prepare(x, x, x).form.value
    ArrayForm(dtype='float32', shape=(2, 3, 4), strides=(12, 4, 1))
    """

    dtype: str
    shape: tuple[int | None, ...]
    strides: tuple[int, ...] | None


class CallForm(NamedTuple):
    """What is expected of query, key and value, in the layout of the call.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.ones((2, 3, 4), np.float32)
    >>> qkv.prepare(x, x, x).form.query.shape
    (2, 3, 4)
    """

    query: ArrayForm
    key: ArrayForm
    value: ArrayForm


class PreparedAttention:
    """A call of `qkv.attention` that was made ready by `qkv.prepare`.

    `copy.deepcopy` and `pickle` take its form and its variants, and make it ready anew on the
    machine where they are. A variant with a function that Python cannot pickle, such as a lambda,
    cannot be pickled here either.

    Attributes
    ----------
    form : CallForm
        dtype, shape and strides that arrays must have.
    plan : Plan
        As `qkv.plan` gives it for the arrays that were prepared for.

    Raises
    ------
    DTypeError, ShapeError
        When it is called with an array of another form.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.ones((2, 3, 4), np.float32)
    >>> prepared = qkv.prepare(x, x, x)
    >>> prepared(2 * x, x, x).shape
    (2, 3, 4)
    """

    def __init__(self, _bound: BoundCall, _passes: Passes, _free: bool) -> None:
        self._bound, self._passes, self._free = _bound, _passes, _free
        self._prepared, call = _prepared(_bound, _passes, _free)
        self.form = CallForm(*self._forms(_bound.leaves))
        self._library = library_of(_bound.leaves[0], "query").name
        with importing():
            from qkv.planning import make_plan

        self.plan: Plan = make_plan(call.problem, call.choice, self._library)
        # The arrays of variants are kept, query, key and value are not.
        self._views = [(view.dtype, view.shape, view.strides) for view in call.leaves[:3]]
        self._arrays = tuple(_bound.leaves[3:])
        self._bound = _bound._replace(leaves=())

    def __call__(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        q_offset: int | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Output, with lse if asked for, of arrays of the same form, in the library of `query`.

        Parameters
        ----------
        query, key, value : array
            As `form` says. A call that was prepared with arrays of NumPy takes tensors of torch
            too, which torch differentiates as usual, and the other way round.
        q_offset : int, optional
            The position of query row 0, if a number was prepared for; else that number holds.
        return_lse : bool
            Return `(output, lse)`.

        Raises
        ------
        DTypeError, ShapeError
            If an array is not as it was prepared for; the message says which and how.
        UnsupportedError
            If `query` is an array of JAX.
        """
        if return_lse is not True and return_lse is not False:
            return_lse = checked_flag("return_lse", return_lse)
        structure = self._bound.structure
        if q_offset is not None:
            structure = self._placed(q_offset)
        bound = BoundCall(structure, (query, key, value, *self._arrays))
        if self._prepared.conditions != conditions():
            self._prepared, _ = _prepared(bound, self._passes, self._free)
        bridge = None if type(query) is np.ndarray else bridge_of(type(query))
        if bridge is None:
            attended = run_alike(self._prepared, bound, return_lse)
            if attended is None:
                self._require_form(bound)
                attended = attend(bound, rows=return_lse)
            return (attended.out, attended.lse) if return_lse else attended.out
        if not hasattr(bridge, "run_alike"):
            raise _not_prepared(library_of(query, "query").name)
        results = bridge.run_alike(self._prepared, bound, return_lse)
        if results is None:
            self._require_form(bound)
            whole = bound.unflatten()
            return bridge.attention(query, key, value, whole.variants, whole.options, return_lse)
        return results

    def __repr__(self) -> str:
        return f"PreparedAttention({self.plan.problem}; backend {self.plan.backend})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Compiled code and addresses are left out: it is made ready anew."""
        call = self._bound._replace(leaves=(None, None, None, *self._arrays)).unflatten()
        about = self._views, call.variants, call.options, self._passes, self._free
        return _prepared_again, (self._library, *about)

    def _placed(self, q_offset: int) -> Structure:
        """The structure with the queries at another position."""
        structure = self._bound.structure
        given, options = structure.options.q_offset, structure.options
        if type(given) is not int:
            other = shown(given) if given is None or isinstance(given, str) else "an array"
            raise ArgumentError(
                f"q_offset={shown(q_offset)} was given, and the call was prepared with "
                f"q_offset={other}.",
                action="Pass a number as q_offset to qkv.prepare too.",
            )
        if not is_integer(q_offset):
            raise ArgumentError(
                f"q_offset={shown(q_offset)} is not a whole number.",
                action="Pass an integer, the position of query row 0.",
            )
        if abs(q_offset) > INDEX_LIMIT:
            raise ArgumentError(
                f"q_offset reaches beyond {INDEX_LIMIT}.", action="Use smaller offsets."
            )
        return structure._replace(options=options._replace(q_offset=int(q_offset)))

    def _forms(self, operands: Sequence[Any]) -> list[ArrayForm]:
        """The forms of query, key and value, but for what is free."""
        layout, free = self._bound.structure.layout, self._free
        forms = [_form_of(array, free and n > 0, layout) for n, array in enumerate(operands[:3])]
        return [form._replace(strides=None) for form in forms] if free else forms

    def _require_form(self, bound: BoundCall) -> None:
        """Raise an error if an array is not as it was prepared for."""
        operands = bound.leaves[:3]
        for name, array in zip(self.form._fields, operands, strict=True):
            library_of(array, name)  # An error for what is no array, as pages and int8 rows are.
            array_shape(name, array)
        for (name, expected), seen in zip(
            self.form._asdict().items(), self._forms(operands), strict=True
        ):
            if _is_alike(seen, expected):
                continue
            rows = [("given", _words(seen)), ("prepared for", _words(expected))]
            again = "Pass such an array, or call qkv.prepare for arrays like this one."
            if seen.dtype != expected.dtype:
                raise DTypeError(f"{name} has another dtype than the call has.", rows, again)
            what = "another shape" if seen.shape != expected.shape else "other strides"
            raise ShapeError(f"{name} has {what} than the call was prepared for.", rows, again)


@ends_graph
@with_options
def prepare(
    query: Any,
    key: Any,
    value: Any,
    *variants: Any,
    free: Sequence[str] = (),
    backward: bool = False,
    **options: Unpack[Options],
) -> PreparedAttention:
    """Make a call of `attention` ready, for loops that repeat it with other arrays.

    `attention` prepares calls by itself when it sees them again, so this changes no result. It says
    at once whether a call can be prepared, looks nothing up, and refuses arrays of another form
    instead of checking them anew.

    Parameters
    ----------
    query, key, value, *variants, scale, layout, q_offset, kv_offset, backend
        As for `attention`: arrays of NumPy, or tensors of torch in main memory. The arrays of
        variants are kept, those of query, key and value are not.
    free : sequence of str
        `("kv_len",)` leaves the number of keys free, and with it the position of the queries and
        all strides, as in steps of decoding with a cache that grows: for variants that depend on
        positions only, and up to 12 queries with AVX-512, 6 with AVX2, else 3 (float64: half).
    backward : bool
        Tensors of torch will want gradients, as these do.

    Returns
    -------
    PreparedAttention
        `prepared(query, key, value)` is the output; `.form` and `.plan` say what it is for.

    Raises
    ------
    UnsupportedError
        The call cannot be prepared; the message says why.
    QkvError
        As `attention` does.

    Notes
    -----
    Costs a plan of the problem; nothing is computed.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> query, cache = np.ones((1, 2, 1, 4)), np.ones((1, 2, 9, 4))
    >>> step = qkv.prepare(query, cache, cache, qkv.Causal("end"), free=("kv_len",))
    >>> step(query, cache[:, :, :5], cache[:, :, :5]).shape
    (1, 2, 1, 4)
    >>> step.form.key
    ArrayForm(dtype='float64', shape=(1, 2, None, 4), strides=None)
    """
    values = option_values("prepare", options)
    if is_integer(values.q_offset):
        values = values._replace(q_offset=int(values.q_offset))
    names = tuple(free) if isinstance(free, (list, tuple)) else (free,)
    if not all(isinstance(name, str) for name in names) or names not in ((), ("kv_len",)):
        raise ArgumentError(
            f"free={shown(free)} is not known.", action='Use free=("kv_len",), or leave it out.'
        )
    bound = bind(query, key, value, variants, values)
    backward = checked_flag("backward", backward)
    if backward and not hasattr(bridge_of(type(query)), "run_alike"):
        raise ArgumentError(
            "backward=True is for tensors of torch, which ask for gradients by themselves.",
            action="Leave it out; qkv.vjp gives gradients, and prepares them when it repeats.",
        )
    return PreparedAttention(bound, "residuals" if backward else "forward", bool(names))


def _prepared(bound: BoundCall, passes: Passes, free: bool) -> tuple[PreparedCall, CheckedCall]:
    """The call made ready, and checked."""
    if is_device_call(bound):
        raise UnsupportedError(
            "the arrays are on a device, where nothing is prepared.",
            action="Call qkv.attention, or move the arrays to the CPU.",
        )
    library, leaves = views_of(bound)
    if library.name not in ("numpy", "torch"):
        raise _not_prepared(library.name)
    seen = bound._replace(leaves=leaves)
    call = check_call(seen, backward=passes == "residuals")
    views = heads_first(seen)
    if views is None or call.ndim == 2:
        raise UnsupportedError(
            "only plain arrays of three dimensions or more are prepared.",
            action="Call qkv.attention, or add a dimension of heads, as in query[None].",
        )
    if any(0 in view.shape for view in views):
        raise UnsupportedError(
            "a size is 0, so that there is nothing to prepare.",
            [
                (name, str(tuple(view.shape)))
                for name, view in zip(("query", "key", "value"), views, strict=True)
            ],
            "Call qkv.attention, which takes such arrays.",
        )
    if not bound.structure.is_known:
        raise UnsupportedError(
            "a variant does not declare what it reads, so that calls are checked each time.",
            action="Declare the roles of the fields of a class; let a function capture arrays and "
            "constants by name; or call qkv.attention.",
        )
    form = (step_form if free else fixed_form)(seen, views, passes)
    made, name = form and prepared_by(seen, form, call), call.choice.backend.name
    if made is None and free:
        queries, keys = (view.shape[-2] for view in views[:2])
        raise UnsupportedError(
            f"the number of keys cannot be free in calls of the backend {name} like this one.",
            [("queries", f"{queries} of {views[0].dtype}"), ("keys", str(keys))],
            "Use fewer queries, another number of keys, variants of positions; or leave free out.",
        )
    if made is None:
        raise UnsupportedError(
            f"the backend {name} prepares no calls like this one, because "
            "values in arrays decide what is computed, or because it prepares none.",
            action="Call qkv.attention, which checks each call.",
        )
    return made, call


def _not_prepared(library: str) -> UnsupportedError:
    return UnsupportedError(
        f"arrays of {library} are compiled by {library}, not prepared.",
        action="Call qkv.attention inside of jax.jit.",
    )


def _prepared_again(
    library: str, views: Sequence[Any], variants: Any, options: Any, passes: Passes, free: bool
) -> PreparedAttention:
    """A prepared call of arrays with these dtypes, shapes and strides."""
    query, key, value = [library_named(library).restore(_like(*view)) for view in views]
    return PreparedAttention(bind(query, key, value, variants, options), passes, free)


def _like(dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """An array of this form, with memory that nobody writes to or reads."""
    spans = [(size - 1) * step for size, step in zip(shape, strides, strict=True)]
    begin = -sum(min(span, 0) for span in spans)
    memory = np.empty(begin + sum(max(span, 0) for span in spans) + dtype.itemsize, np.uint8)
    return np.ndarray(shape, dtype, memory, begin, strides)


def _form_of(array: Any, has_free_rows: bool, layout: str) -> ArrayForm:
    """The form of an array or tensor, whether its memory can be read or not."""
    shape: list[int | None] = list(array.shape)
    if hasattr(array, "stride"):
        strides = tuple(array.stride())
    elif not hasattr(array, "strides"):  # of JAX, beside a query of another library
        strides = tuple([prod(shape[axis + 1 :]) for axis in range(len(shape))])
    else:
        strides = tuple([step // array.itemsize for step in array.strides])
    if has_free_rows and len(shape) > 2:
        shape[-2 if layout == "bhld" else -3] = None
    return ArrayForm(str(array.dtype).removeprefix("torch."), tuple(shape), strides)


def _is_alike(seen: ArrayForm, expected: ArrayForm) -> bool:
    """Whether two forms are the same, whatever the stride of an axis with one entry is."""
    if seen[:2] != expected[:2] or seen.strides is None or expected.strides is None:
        return seen == expected
    of_axes = zip(seen.shape, seen.strides, expected.strides, strict=True)
    return all(one == other for size, one, other in of_axes if size != 1)


def _words(form: ArrayForm) -> str:
    shape = ", ".join("any" if size is None else str(size) for size in form.shape)
    strides = "" if form.strides is None else f", strides {form.strides}"
    return f"{form.dtype} ({shape}){strides}"
