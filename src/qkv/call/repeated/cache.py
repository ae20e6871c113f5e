"""The cache of prepared calls: an entry for each structure, bounded, safe under threads and forks.

An entry holds the prepared calls of one structure by their forms (`qkv.call.repeated.forms`), and
those that are tried first: of NumPy arrays or views, of decoding steps, and of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from numpy.typing import NDArray

from qkv.backends import Passes, Prepared, conditions
from qkv.backends.conditions import Conditions
from qkv.call.binding.bound import Structure
from qkv.call.binding.flatten import without_arrays
from qkv.call.binding.options import OptionValues
from qkv.process.forks import RenewedLock

__all__ = ["CALLS", "CallCache", "Entry", "Form", "PreparedCall", "StepForm"]

CAPACITY = 1024
"""Prepared calls that are kept, some 30 KB each; those that were used least recently go first."""


class Form(NamedTuple):
    """What calls of one structure share to be alike; hashable, and holds no array.

    Attributes
    ----------
    passes : Passes
    any_length : bool
        Whether the number of keys is free, and with it the position of the queries and strides.
    values : tuple
        The arrays that are compared by value, in bytes, and the position of the queries, if a
        number was given that is not free.
    layouts : tuple
        dtypes, and the sizes and strides that are fixed.
    """

    passes: Passes
    any_length: bool
    values: tuple[Hashable, ...]
    layouts: tuple[Hashable, ...]


class StepForm(NamedTuple):
    """What a prepared call for any number of keys takes beside its arrays.

    Attributes
    ----------
    at_end : bool
        Whether the last query stands at the last key, if no position is given.
    lengths : int
        How many arrays of each step come from its numbers of keys: none, these numbers, or also
        where the queries of each batch row stand.
    every_length : bool
        Whether it serves all numbers of keys, or those with the same `length_key` of variants.
    rotates_per_batch_row : bool
        Whether queries are rotated, those of each batch row by a position of their own, which comes
        from its number of keys, or which the call states.
    offset_scale : float or None
        The scale of the scores, if keys have an offset: each step computes what that adds to them.
    """

    at_end: bool
    lengths: int
    every_length: bool
    rotates_per_batch_row: bool = False
    offset_scale: float | None = None


@dataclass(eq=False, slots=True)
class PreparedCall:
    """What a backend has prepared for calls of one structure and one form.

    Attributes
    ----------
    form : Form
    prepared : Prepared
    backend : str
    conditions : Conditions
        Under which it was prepared. What keeps a prepared call outside of the cache asks for them.
    step : StepForm or None
        If the number of keys is free.
    if_alike : callable or None
        `Prepared.if_alike`, unless lengths decide more than it asks. A step whose position is a
        number is one that it serves only at the end.
    sinks : array (num_heads,) or None
        Those of the calls.
    of_tensors : dict
        How tensors of torch run it, by what else they have in common.
    used : int
        When it was used, counted in insertions into the cache.
    """

    form: Form
    prepared: Prepared
    backend: str
    conditions: Conditions
    step: StepForm | None = None
    if_alike: Callable[..., Any] | None = None
    sinks: NDArray[Any] | None = None
    of_tensors: dict[Hashable, Any] = field(default_factory=dict)
    used: int = 0


class Entry:
    """The prepared calls of one structure.

    Attributes
    ----------
    calls : dict
        By form. None where backends prepare for no more than one number of keys.
    first_of_arrays : PreparedCall or None
        The latest of NumPy arrays; it is tried first.
    first_of_steps : object
        The `LatestStep` of those that `first_of_arrays` does not serve.
    first_of_tensors : object
        The latest `Run` of tensors of torch.
    """

    __slots__ = ("calls", "first_of_arrays", "first_of_steps", "first_of_tensors")

    def __init__(self) -> None:
        self.calls: dict[Form, PreparedCall | None] = {}
        self.first_of_arrays: PreparedCall | None = None
        self.first_of_steps: Any = None
        self.first_of_tensors: Any = None


class CallCache:
    """Entries by structure.

    A call is prepared when its form is seen a second time, because preparing would not pay off for
    lengths that change from call to call. Looking a call up takes no lock, unless conditions
    changed.
    """

    def __init__(self) -> None:
        self.capacity = CAPACITY
        self.clock = 0
        self._entries: dict[Structure, Entry] = {}
        self._seen: dict[tuple[Structure, Form], None] = {}
        self._conditions = conditions()
        self._exclusive = RenewedLock()

    def __len__(self) -> int:
        return sum([len(entry.calls) for entry in list(self._entries.values())])

    def entry(self, structure: Structure) -> Entry | None:
        """The entry of a structure, if anything is prepared for it."""
        if self._conditions != conditions():
            self._forget()
        # Most structures have no position, and a call of Python takes as long as the look-up.
        if type(structure.options.q_offset) is int:
            structure = _without_position(structure)
        return self._entries.get(structure)

    def is_repeated(self, structure: Structure, form: Form) -> bool:
        """Whether a form was seen before; it was, from then on.

        If several threads ask at once, the answer is no for one of them. Structures of which two
        calls may mean different things are never repeated.
        """
        if not structure.is_known:
            return False
        key = without_arrays(_without_position(structure)), form
        with self._exclusive.lock:
            if key in self._seen:
                return True
            while len(self._seen) >= self.capacity:
                # The oldest goes: a form that is seen again is prepared, and asked for no more.
                self._seen.pop(next(iter(self._seen)), None)
            self._seen[key] = None
            return False

    def insert(self, structure: Structure, form: Form, call: PreparedCall | None) -> None:
        """Keep what was prepared for a form, if it still holds.

        None says that calls of this form are prepared for one number of keys each.
        """
        key = without_arrays(_without_position(structure))
        with self._exclusive.lock:
            if call is not None and call.conditions != self._conditions:
                return
            self.clock += 1
            if call is not None:
                call.used = self.clock
            entry = self._entries.get(key)
            if entry is None or form not in entry.calls:
                while len(self) >= self.capacity:
                    self._drop_oldest()
            self._entries.setdefault(key, Entry()).calls[form] = call

    def discard(self, structure: Structure, call: PreparedCall) -> None:
        """Forget a prepared call, unless another has taken its place."""
        structure = _without_position(structure)
        with self._exclusive.lock:
            entry = self._entries.get(structure)
            if entry is not None and entry.calls.get(call.form) is call:
                self._drop(structure, call.form)

    def clear(self) -> None:
        """Forget everything."""
        with self._exclusive.lock:
            self._entries.clear()
            self._seen.clear()

    def _forget(self) -> None:
        """Forget what was prepared under other conditions."""
        with self._exclusive.lock:
            self.clear()
            self._conditions = conditions()

    def _drop_oldest(self) -> None:
        oldest = min(
            (
                (-1 if call is None else call.used, structure, form)
                for structure, entry in self._entries.items()
                for form, call in entry.calls.items()
            ),
            key=lambda oldest: oldest[0],
        )
        self._drop(*oldest[1:])

    def _drop(self, structure: Structure, form: Form) -> None:
        entry = self._entries[structure]
        del entry.calls[form]
        # Whatever is used again becomes the first again.
        entry.first_of_arrays = entry.first_of_steps = entry.first_of_tensors = None
        if not entry.calls:
            del self._entries[structure]


def _without_position(structure: Structure) -> Structure:
    """The structure of calls whose queries stand elsewhere: a number is part of the form."""
    options = structure.options
    if type(options.q_offset) is not int:
        return structure
    scale, layout, _, kv_offset, backend = options
    operands, variants, _, by_value, lengths, per_step = structure
    elsewhere = _at_any_position(scale, layout, kv_offset, backend)
    return Structure(operands, variants, elsewhere, by_value, lengths, per_step)


@lru_cache(maxsize=256)
def _at_any_position(scale: Any, layout: Any, kv_offset: Any, backend: Any) -> OptionValues:
    return OptionValues(scale, layout, int, kv_offset, backend)


CALLS = CallCache()
"""Every prepared call of the process."""
