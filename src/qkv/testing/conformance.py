"""What a backend must do with a case: refuse it and say why, or get it right.

    for case in cases():
        check_case(MyBackend(), case)

Every check runs through `qkv.attention`, as a user's call does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv._api import attention
from qkv.backends import Backend, Refusal, backends, register, unregister
from qkv.errors import UnsupportedError
from qkv.problem.check import check
from qkv.problem.spec import Spec
from qkv.testing.case import DTYPES, Case, Inputs
from qkv.testing.oracle import Truth
from qkv.variants import Bias, Mask

Array = NDArray[Any]

__all__ = ["check_case"]


def check_case(backend: Backend | str, case: Case, dtype: str | None = None) -> bool:
    """Hold a backend to one case.

    Refused means that `qkv.attention` raises UnsupportedError with the backend's own reasons.
    Accepted means

    - output and lse within `tolerances.bounds` of the truth; -inf in lse exactly where a row sees
      no key and has no sink, and output exactly 0 where it sees no key;
    - output of the query's dtype, of the shape and layout that the case asks for, lse of the type
      of computation;
    - arguments unchanged, and the same bits when called again over used memory;
    - rows that may not see a key keep every bit when it and its value become NaN, infinite or
      other numbers, and rows that see a NaN value become NaN.

    Parameters
    ----------
    backend : Backend or str
        An object with the protocol of `qkv.backends.Backend`, or the name of a known one.
    case : Case
    dtype : str, optional
        One name of `DTYPES`; by default all that the case lists, one after another.

    Returns
    -------
    bool
        True if it ran, False if every dtype was refused.

    Raises
    ------
    AssertionError
        On the first thing that is wrong; the message names backend, case and dtype.

    Examples
    --------
    >>> from qkv.testing import cases, check_case
    >>> check_case("blocked", cases()[0])
    True
    """
    with _known(backend) as name:
        ran = [_check(name, case, d) for d in ((dtype,) if dtype else case.dtypes)]
    return any(ran)


@contextmanager
def _known(backend: Backend | str) -> Iterator[str]:
    """The backend's name, by which the front door finds it meanwhile."""
    if isinstance(backend, str):
        yield backend
        return
    register(backend)
    try:
        yield backend.name
    finally:
        unregister(backend.name)


def _check(name: str, case: Case, dtype: str) -> bool:
    inputs = case.build(dtype)
    run = _Run(name, case, dtype)
    backend = next(b for b in backends() if b.name == name)
    spec = _spec(inputs)
    reasons = backend.refusals(spec)
    run.require(
        isinstance(reasons, tuple) and all(isinstance(r, Refusal) for r in reasons),
        "refusals is not a tuple of Refusal",
    )
    if reasons:
        run.refuses(inputs, reasons)
        return False
    run.require(min(backend.blocks(spec)) >= 1, "blocks are not positive")
    run.require(backend.scratch_bytes(spec) >= 0, "scratch_bytes is negative")
    before = [a.tobytes() for a in inputs.arrays]
    out, lse = run.attention(inputs)
    run.require(before == [a.tobytes() for a in inputs.arrays], "an argument was changed")
    run.form(inputs, out, lse)
    truth = case.truth(dtype)
    run.values(truth, case.plain_order(out), lse if case.head_axis else lse[None])
    for array in (out, lse):
        # Memory that is freed full of NaN is what an output that is not written would show.
        np.full(array.shape, np.nan, array.dtype)
    again = run.attention(inputs)
    run.require(
        again[0].tobytes() == out.tobytes() and again[1].tobytes() == lse.tobytes(),
        "the same call gave other bits",
    )
    run.leaks(inputs, truth, out, lse)
    return True


def _spec(inputs: Inputs) -> Spec:
    variants = [
        (Mask(v) if v.dtype == bool else Bias(v)) if isinstance(v, np.ndarray) else v
        for v in inputs.variants
    ]
    return check(*inputs.arrays, variants, **inputs.keywords).spec


class _Run:
    """One backend, case and dtype, and what is required of them."""

    def __init__(self, backend: str, case: Case, dtype: str) -> None:
        self.backend, self.case, self.dtype = backend, case, dtype

    def require(self, condition: Any, fact: str) -> None:
        if not condition:
            raise AssertionError(f"{self.backend} on {self.case.name!r} in {self.dtype}: {fact}.")

    def attention(self, inputs: Inputs) -> tuple[Array, Array]:
        out, lse = attention(
            *inputs.arrays,
            *inputs.variants,
            backend=self.backend,
            return_lse=True,
            **inputs.keywords,
        )
        return out, lse

    def refuses(self, inputs: Inputs, reasons: tuple[Refusal, ...]) -> None:
        try:
            self.attention(inputs)
        except UnsupportedError as error:
            expected = (self.backend, "; ".join(map(str, reasons)))
            self.require(expected in error.seen, f"the error does not give its reasons {expected}")
        else:
            self.require(False, "it ran although it refuses")

    def form(self, inputs: Inputs, out: Array, lse: Array) -> None:
        shape = self.case.shape
        lead = (*shape.batch_shape, shape.num_heads, shape.q_len)
        full = self.case.arrange(np.empty((*lead, shape.v_head_dim), bool)).shape
        rows = lead if self.case.head_axis else lead[-1:]
        compute = np.float64 if self.dtype == "float64" else np.float32
        self.require(out.dtype == DTYPES[self.dtype], f"output has dtype {out.dtype}")
        self.require(out.shape == full, f"output has shape {out.shape}, not {full}")
        self.require(lse.dtype == compute, f"lse has dtype {lse.dtype}")
        self.require(lse.shape == rows, f"lse has shape {lse.shape}, not {rows}")

    def values(self, truth: Truth, out: Array, lse: Array) -> None:
        empty = ~truth.allowed.any(axis=-1)
        self.require((out[empty] == 0).all(), "a row that sees no key is not 0")
        nothing = np.isneginf(truth.lse)
        self.require((np.isneginf(lse) == nothing).all(), "lse is -inf in the wrong rows")
        errors = (
            ("output", _largest(out - truth.out)),
            ("lse", _largest(lse[~nothing] - truth.lse[~nothing])),
        )
        for orders in self.case.orders:  # mostly the first is enough
            bounds = self.case.bounds(self.dtype, orders)
            limits = bounds.out, bounds.lse
            if all(error <= limit for (_, error), limit in zip(errors, limits, strict=True)):
                return
        for (what, error), limit in zip(errors, limits, strict=True):
            self.require(error <= limit, f"{what} is {error:.3g} off, allowed is {limit:.3g}")

    def leaks(self, inputs: Inputs, truth: Truth, out: Array, lse: Array) -> None:
        """Change keys that some row may not see; such rows must not notice, the others must."""
        allowed = truth.allowed
        blind = np.argwhere(~allowed.all(axis=-1))
        if not len(blind):
            return
        rng = np.random.default_rng(len(blind))
        hidden = np.flatnonzero(~allowed[tuple(rng.choice(blind))])
        hidden = hidden[rng.random(len(hidden)) < 0.7] if len(hidden) > 1 else hidden
        key, value = (self.case.plain_order(a).copy() for a in (inputs.key, inputs.value))
        key[..., hidden, :] = rng.normal(size=(*key.shape[:-2], len(hidden), key.shape[-1]))
        key[..., hidden[1::4], :] = np.inf
        key[..., hidden[2::4], :] = np.nan
        key[..., hidden[3::4], :] = np.nan
        value[..., hidden, :] = np.nan
        value[..., hidden[1::2], :] = -np.inf
        poisoned = [self.case.arrange(key, "key"), self.case.arrange(value, "value")]
        if not all(
            np.array_equal(self.case.plain_order(a).astype(float), b.astype(float), equal_nan=True)
            for a, b in zip(poisoned, (key, value), strict=True)
        ):
            return  # rows that share their memory cannot be changed one by one
        got, got_lse = self.attention(
            Inputs(inputs.query, poisoned[0], poisoned[1], inputs.variants, inputs.keywords)
        )
        sees = allowed[..., hidden].any(axis=-1)
        before, after = (self.case.plain_order(a) for a in (out, got))
        rows = (lse, got_lse) if self.case.head_axis else (lse[None], got_lse[None])
        self.require(
            before[~sees].tobytes() == after[~sees].tobytes()
            and rows[0][~sees].tobytes() == rows[1][~sees].tobytes(),
            "what is forbidden changed a row",
        )
        if truth.heads[0].factors.all():
            reached = allowed[..., hidden[::2]].any(axis=-1)
            self.require(np.isnan(after[reached]).all(), "a NaN value did not reach its rows")


def _largest(array: Array) -> float:
    return float(np.max(np.abs(array), initial=0.0))
