"""Prepared calls with a compiled pass before them (rotary embedding) or after them (sinks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.backends import AddressedCall, Addresses, Prepared, RepeatedCall, RepeatingCall
from qkv.backends.cpu.machine.addresses import quick_address_of
from qkv.backends.cpu.prepared.placeholders import placeholder
from qkv.backends.cpu.python_calls.filled_block import FilledBlock
from qkv.backends.cpu.rows.rotation import AngleTable, CosSin, Rotation, angle_tables
from qkv.backends.cpu.rows.sinks import Sinks
from qkv.partial import RowStatistics, share_with_sinks
from qkv.problem.spec import Problem
from qkv.problem.stored_rows import plain

Array = NDArray[Any]
Results = tuple[Array, Any, Any, Any]
Gradients = tuple[Array, Array, Array]

__all__ = [
    "AnyLengthRotation", "RotatedBackward", "RotatedCall", "SinksCall", "is_rotation_kept",
    "rotated_form",
]  # fmt: skip

_MOST_ANGLES = 2**19
"""The most angles of one prepared call: 8 MiB of cosines and sines."""
_MOST_REUSED = 2**17
"""The most elements of rotated query and key whose memory a prepared call keeps for the next
one."""


class InnerCall(Prepared, AddressedCall, Protocol):
    """A prepared call that can be made with addresses too."""


def rotated_form(problem: Problem) -> Problem:
    """The problem that is left once query and key have been rotated: they are dense arrays then."""
    operands, compute = problem.operands, problem.spec.compute_dtype
    query, key = (np.empty(a.shape, compute) for a in (operands.query, plain(operands.key)))
    return replace(problem, operands=replace(operands, query=query, key=key, angles=None))


def is_rotation_kept(problem: Problem) -> bool:
    """Whether the angles of all rows are few enough to be kept with a prepared call."""
    angles = problem.operands.angles
    assert angles is not None
    positions = angles.q_pos.size + angles.kv_pos.size
    return positions * len(angles.inv_freq) <= _MOST_ANGLES


class RotatedCall:
    """A prepared call whose query and key are rotated first."""

    def __init__(self, problem: Problem, inner: InnerCall) -> None:
        operands = problem.operands
        assert operands.angles is not None
        self._inner = inner
        self._rotation = Rotation(problem, [operands.query, plain(operands.key)])
        self._angles = angle_tables(operands.angles, "q"), angle_tables(operands.angles, "kv")
        self._is_reused = sum(a.entries for a in self._rotation.layouts) <= _MOST_REUSED
        self._free: list[list[Array]] = []
        given = operands.query, plain(operands.key), plain(operands.value)
        self._operands = list(map(placeholder, given))

    def repeated(self, at_end: bool = False) -> RepeatedRotation | None:
        """See `qkv.backends.RepeatingCall`."""
        inner = self._inner.repeated() if isinstance(self._inner, RepeatingCall) else None
        if inner is None or not (self._is_reused and self._rotation.row_pass.is_brief):
            return None
        filled = self._rotation.filled_block(self._operands, self._angles)
        return RepeatedRotation(inner, self._rotation, filled)

    def __call__(
        self, query: Array, key: Array, value: Array, rows: bool, arrays: Sequence[Array] = ()
    ) -> Results | None:
        """See `qkv.backends.Prepared`."""
        rotated = self._rotate(quick_address_of(query), quick_address_of(key))
        found = self._inner(rotated[0], rotated[1], value, rows, arrays)
        self._give_back(rotated)
        return found

    def run(self, addresses: Addresses, keep_alive: Any) -> bool:
        """See `qkv.backends.AddressedCall`."""
        query, key, value, out, lse, rest, arrays = addresses
        rotated = self._rotate(query, key)
        own = quick_address_of(rotated[0]), quick_address_of(rotated[1])
        inner = (*own, value, out, lse, rest, arrays)
        found = self._inner.run(inner, (keep_alive, rotated))
        self._give_back(rotated)
        return found

    def _rotate(self, query: int, key: int) -> list[Array]:
        """Rotate query and key, into the memory of an earlier call if there is any.

        New memory would cost more than a small rotation.
        """
        try:
            outputs = self._free.pop()
        except IndexError:
            outputs = self._rotation.outputs()
        self._rotation((query, key), self._angles, outputs)
        return outputs

    def _give_back(self, rotated: list[Array]) -> None:
        if self._is_reused and not self._free:
            self._free.append(rotated)


class RepeatedRotation:
    """A prepared call whose query and key are rotated by the code that reads them."""

    def __init__(self, inner: RepeatedCall, rotation: Rotation, filled: FilledBlock) -> None:
        self._inner, self._rotation, self._filled = inner, rotation, filled
        self._free: list[list[Array]] = []

    def _rotated(self) -> list[Array]:
        """Memory for rotated query and key, which is given back to `_free`."""
        try:
            return self._free.pop()
        except IndexError:
            return self._rotation.outputs()

    def __call__(self, query: Array, key: Array, value: Array, rows: bool) -> Results | None:
        """See `qkv.backends.RepeatedCall`."""
        read = self._filled.read
        if read is None:
            return None
        rotated, found = self._rotated(), None
        if read(query, key, value, *rotated):
            found = self._inner(rotated[0], rotated[1], value, rows)
        self._free.append(rotated)
        return found

    def run(self, addresses: Addresses, keep_alive: Any) -> bool:
        """See `qkv.backends.AddressedCall`."""
        query, key, value, out, lse, rest, arrays = addresses
        rotated = self._rotated()
        own = quick_address_of(rotated[0]), quick_address_of(rotated[1])
        self._filled.write(query, key, value, *own)
        done = self._inner.run((*own, value, out, lse, rest, arrays), keep_alive)
        self._free.append(rotated)
        return done

    def brief(self) -> None:
        """See `qkv.backends.RepeatedCall`."""


class SinksCall:
    """A prepared call whose sinks take their share afterwards, of statistics too."""

    def __init__(self, problem: Problem, inner: InnerCall, *, backward: bool = False) -> None:
        spec, sinks = problem.spec, problem.operands.sinks
        assert sinks is not None
        self._inner = inner
        self._shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.v_head_dim)
        self._compute, self._dtype = spec.compute_dtype, problem.operands.query.dtype
        self._rounds = self._dtype != self._compute
        self._keeps = backward and self._rounds
        self._sinks = Sinks(sinks, self._shape, self._compute, self._dtype, keeps=self._keeps)
        self._sinks_of_heads = np.array(sinks)

    def repeated(self, at_end: bool = False) -> RepeatedSinks | None:
        """See `qkv.backends.RepeatingCall`."""
        inner = self._inner.repeated() if isinstance(self._inner, RepeatingCall) else None
        return None if inner is None or self._keeps else RepeatedSinks(self, inner)

    def __call__(
        self, query: Array, key: Array, value: Array, rows: bool, arrays: Sequence[Array] = ()
    ) -> Results | None:
        """See `qkv.backends.Prepared`."""
        found = self._inner(query, key, value, True, arrays)
        return None if found is None else self.finish(found)

    def finish(self, found: Results) -> Results:
        """Results with the share of the sinks, of those without."""
        keys_out, lse, rest, _ = found
        out = np.empty(self._shape, self._dtype) if self._rounds else keys_out
        at = 0
        if isinstance(rest, RowStatistics):
            rest = share_with_sinks(rest, self._sinks_of_heads)
        elif rest is not None:
            at = quick_address_of(rest)
        place = quick_address_of(lse)
        self._sinks(quick_address_of(keys_out), place, at, quick_address_of(out), place, found)
        return out, lse, rest, keys_out if self._keeps and rest is not None else None

    def run(
        self, addresses: Addresses, keep_alive: Any, repeated: RepeatedCall | None = None
    ) -> bool:
        """See `qkv.backends.AddressedCall`; `repeated` is the repeated form of the inner call."""
        own: list[Array] = []
        query, key, value, out, lse, rest, arrays = addresses
        keys_out, place = out, lse
        if self._rounds:
            own.append(np.empty(self._shape, self._compute))
            keys_out = quick_address_of(own[-1])
        if not lse:
            own.append(np.empty(self._shape[:-1], self._compute))
            place = quick_address_of(own[-1])
        held = keep_alive, own
        inner = query, key, value, keys_out, place, rest, arrays
        if not (repeated or self._inner).run(inner, held):
            return False
        self._sinks(keys_out, place, rest, out, place, held)
        return True


class RepeatedSinks:
    """A prepared call whose sinks take their share of what another one leaves."""

    def __init__(self, call: SinksCall, inner: RepeatedCall) -> None:
        self._call, self._inner = call, inner

    def __call__(self, query: Array, key: Array, value: Array, rows: bool) -> Results | None:
        """See `qkv.backends.RepeatedCall`."""
        found = self._inner(query, key, value, True)
        return None if found is None else self._call.finish(found)

    def run(self, addresses: Addresses, keep_alive: Any) -> bool:
        """See `qkv.backends.AddressedCall`."""
        return self._call.run(addresses, keep_alive, self._inner)

    def brief(self) -> None:
        """See `qkv.backends.RepeatedCall`."""


class AnyLengthRotation:
    """Steps of decoding whose query and keys are rotated first."""

    def __init__(self, problem: Problem, inner: Any) -> None:
        operands = problem.operands
        assert operands.angles is not None
        self._problem, self._inner = problem, inner
        angles = operands.angles.inv_freq, operands.angles.factor
        self._of_query, self._of_key = AngleTable(*angles), AngleTable(*angles)
        self._kv_shift = int(operands.positions.kv_shift[0])

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        rows: bool,
        arrays: Sequence[Array] = (),
        q_shift: int = 0,
    ) -> Results | None:
        """See `qkv.backends.Prepared`."""
        angles = (
            self._of_query.rows(q_shift, query.shape[-2]),
            self._of_key.rows(self._kv_shift, key.shape[-2]),
        )
        rotation = Rotation(self._problem, [query, key])
        rotated = rotation.outputs()
        rotation((quick_address_of(query), quick_address_of(key)), angles, rotated)
        found: Results | None = self._inner(*rotated, value, rows, arrays, q_shift)
        return found


class RotatedBackward:
    """Prepared gradients whose query and key are rotated first, and their gradients back."""

    def __init__(self, problem: Problem, inner: Any) -> None:
        operands = problem.operands
        assert operands.angles is not None
        self._inner = inner
        self._forth = Rotation(problem, [operands.query, plain(operands.key)])
        form = rotated_form(problem).operands
        self._back = Rotation(problem, [form.query, plain(form.key)])
        self._angles = angle_tables(operands.angles, "q"), angle_tables(operands.angles, "kv")
        self._reverse = tuple([CosSin(t.cosines, -t.sines) for t in self._angles])

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        out: Array,
        lse: Array,
        lse_rest: Array,
        grad_out: Array,
        grad_lse: Array | None,
        arrays: Sequence[Array] = (),
    ) -> Gradients | None:
        """See `qkv.backends.PreparedGradients`."""
        rotated = self._forth.outputs()
        self._forth((quick_address_of(query), quick_address_of(key)), self._angles, rotated)
        beside = out, lse, lse_rest, grad_out, grad_lse, arrays
        found = self._inner(*rotated, value, *beside)
        if found is None:
            return None
        back = self._back.outputs()
        gradients = quick_address_of(found[0]), quick_address_of(found[1])
        self._back(gradients, self._reverse, back)
        return back[0], back[1], found[2]
