"""The conformance check: a backend must refuse a case with a reason, or compute it right.

    for case in cases():
        for what in CHECKS:
            check_case(MyBackend(), case, what=what)

Every check runs through `qkv.attention`, `qkv.vjp` or `qkv.inspect`, as a user's call does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import shown
from qkv.arguments.spelling import did_you_mean
from qkv.backends import Backend, Refusal, backends, register, unregister
from qkv.errors import ArgumentError
from qkv.testing.case import DTYPES, Case, Inputs
from qkv.testing.properties import decoding, gradients, inspection, prepared, tensors
from qkv.testing.run import CaseRun

Array = NDArray[Any]

__all__ = ["CHECKS", "check_case"]


def check_case(
    backend: Backend | str,
    case: Case,
    dtype: str | None = None,
    *,
    what: str = "forward",
    device: str = "cpu",
) -> bool:
    """Hold a backend to one case.

    Refused means that `qkv.attention` raises UnsupportedError with the backend's own reasons.
    Accepted means, for "forward",

    - output and lse within `tolerances.bounds` of the truth; -inf in lse exactly where a row sees
      no key and has no sink, and output exactly 0 where it sees no key;
    - output of the query's dtype, of the shape and layout that the case asks for, lse of the type
      of computation;
    - arguments unchanged, and the same bits when called again over used memory;
    - rows that may not see a key keep every bit when it and its value become NaN, infinite or
      other numbers, and rows that see a NaN value become NaN.

    The other checks, of which a backend passes those that it has nothing for:

    - "gradients": of query, key and value, within `GradientOracle.bounds`; the same bits when
      they are asked for a second and a third time, which prepares them.
    - "inspection": weights, their entropy, largest entry and sum over queries, and the best keys.
    - "prepared": a second and a third call like the first give its bits; with other values in all
      arrays that are read in place, so does a call like these and a first call.
    - "decoding": one and three queries, with the variants of the case, over a number of keys that
      grows, jumps and was seen before, in buffers of one size; each step as "forward" has it.
    - "tensors": torch tensors in the place of NumPy arrays give the same bits. A backend of a
      device has tensors in every check.

    Parameters
    ----------
    backend : Backend or str
        An object with the protocol of `qkv.backends.Backend`, or the name of a known one. One with
        that of `DeviceBackend` is given torch tensors.
    case : Case
    dtype : str, optional
        One name of `DTYPES`; by default all that the case lists, one after another.
    what : str
        One name of `CHECKS`.
    device : str
        Where these tensors lie, as torch calls it: "cpu", or "cuda" to test a GPU.

    Returns
    -------
    bool
        True if it ran, False if every dtype was refused, or the case has nothing to check.

    Raises
    ------
    AssertionError
        On the first thing that is wrong; the message names backend, case and dtype.
    ArgumentError
        If there is no backend, dtype or check of that name.

    Notes
    -----
    Prepared calls of the process are forgotten by all checks but "forward".

    Examples
    --------
    >>> from qkv.testing import cases, check_case
    >>> check_case("blocked", cases()[0])
    True
    >>> check_case("blocked", cases()[0], "float32", what="gradients")
    True
    """
    _require_known("what", what, CHECKS)
    if dtype:
        _require_known("dtype", dtype, DTYPES)
    if isinstance(backend, str):
        _require_known("backend", backend, [each.name for each in backends()])
    with _known(backend) as name:
        dtypes = (dtype,) if dtype else case.dtypes
        ran = [CHECKS[what](CaseRun(name, case, d, device)) for d in dtypes]
    return any(ran)


def _require_known(role: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ArgumentError(
            f"{role}={shown(name)} is not known.",
            [("known", ", ".join(known))],
            f"{did_you_mean(str(name), known)}Use one of these.",
        )


@contextmanager
def _known(backend: Backend | str) -> Iterator[str]:
    """The backend's name, by which calls find it while it is registered."""
    if isinstance(backend, str):
        yield backend
        return
    before = backends()
    register(backend)
    try:
        yield backend.name
    finally:
        unregister(backend.name)
        # The caller may have registered this one, or another of its name.
        for known in before:
            if not any(each is known for each in backends()):
                register(known)


def _forward(run: CaseRun) -> bool:
    inputs, backend = run.case.build(run.dtype), run.backend_object
    spec = run.spec(inputs)
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
    run.form(out, lse)
    run.values(out, lse)
    for array in (out, lse):
        # Freed memory full of NaN is used again, so that an unwritten output shows as NaN.
        np.full(array.shape, np.nan, array.dtype)
    run.same(run.attention(inputs), (out, lse), "the same call gave other bits")
    _leaks(run, inputs, out, lse)
    return True


def _leaks(run: CaseRun, inputs: Inputs, out: Array, lse: Array) -> None:
    """Change keys that some row may not see; such rows must not notice, the others must."""
    case, truth = run.case, run.case.truth(run.dtype)
    allowed = truth.allowed
    blind = np.argwhere(~allowed.all(axis=-1))
    if not len(blind):
        return
    rng = np.random.default_rng(len(blind))
    hidden = np.flatnonzero(~allowed[tuple(rng.choice(blind))])
    hidden = hidden[rng.random(len(hidden)) < 0.7] if len(hidden) > 1 else hidden
    key, value = (case.plain_order(a).copy() for a in (inputs.key, inputs.value))
    key[..., hidden, :] = rng.normal(size=(*key.shape[:-2], len(hidden), key.shape[-1]))
    key[..., hidden[1::4], :] = np.inf
    key[..., hidden[2::4], :] = np.nan
    key[..., hidden[3::4], :] = np.nan
    value[..., hidden, :] = np.nan
    value[..., hidden[1::2], :] = -np.inf
    poisoned = [case.arrange(key, "key"), case.arrange(value, "value")]
    if not all(
        np.array_equal(case.plain_order(a).astype(float), b.astype(float), equal_nan=True)
        for a, b in zip(poisoned, (key, value), strict=True)
    ):
        return  # Rows that share memory cannot be changed one by one.
    got, got_lse = run.attention(
        Inputs(inputs.query, poisoned[0], poisoned[1], inputs.variants, inputs.keywords)
    )
    sees = allowed[..., hidden].any(axis=-1)
    before, after = (case.plain_order(a) for a in (out, got))
    rows = (lse, got_lse) if case.head_axis else (lse[None], got_lse[None])
    run.require(
        before[~sees].tobytes() == after[~sees].tobytes()
        and rows[0][~sees].tobytes() == rows[1][~sees].tobytes(),
        "what is forbidden changed a row",
    )
    if truth.heads[0].factors.all():
        reached = allowed[..., hidden[::2]].any(axis=-1)
        run.require(np.isnan(after[reached]).all(), "a NaN value did not reach its rows")


CHECKS: Mapping[str, Callable[[CaseRun], bool]] = {
    "forward": _forward,
    "gradients": gradients,
    "inspection": inspection,
    "prepared": prepared,
    "decoding": decoding,
    **({"tensors": tensors} if find_spec("torch") else {}),
}
"""The names of the checks of `check_case`; "tensors" is one where torch is installed."""
