"""The cache of prepared calls: bounded, and safe under threads and after a fork."""

from __future__ import annotations

from typing import Any, TypeAlias

from qkv._forks import RenewedLock

__all__ = ["CALLS", "CallCache", "Key"]

Key: TypeAlias = tuple[Any, ...]
"""A cache key; its first entry names the purpose, such as "forward"."""

CAPACITY = 1024
"""Prepared calls that are kept, some 30 KB each; those that were used least recently go first."""


class CallCache:
    """Prepared calls, by a key that holds everything on which preparation depends.

    A call is prepared when it is seen a second time, because preparing would not pay off for
    lengths that change from call to call.

    Prepared calls are in two tables. When both are full together, those of the older one go, in
    their order; what is used in it moves to the other, and when none is left they change places.
    So whatever goes was not used since they last did, and what stays was. A call that is found in
    the first table, as most are, costs no lock and no entry about its use.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._prepared: dict[Key, Any] = {}
        self._older: dict[Key, Any] = {}
        self._seen: dict[Key, None] = {}
        self._exclusive = RenewedLock()

    def __len__(self) -> int:
        return len(self._prepared) + len(self._older)

    def count(self, *purposes: str) -> int:
        """How many calls were prepared whose key begins with one of the purposes."""
        with self._exclusive.lock:
            return sum(key[0] in purposes for key in (*self._prepared, *self._older))

    def get(self, key: Key) -> Any:
        """The prepared call for the key, or None."""
        found = self._prepared.get(key)
        if found is None and self._older:
            return self._used_again(key)
        return found

    def is_new(self, key: Key) -> bool:
        """Whether a key is seen for the first time; it is not, from then on.

        Of several threads that ask at once, one is told so.
        """
        with self._exclusive.lock:
            if key in self._seen:
                return False
            while len(self._seen) >= self.capacity:
                # The oldest goes: a key that is seen again is prepared, and asked for no more.
                self._seen.pop(next(iter(self._seen)), None)
            self._seen[key] = None
            return True

    def insert(self, key: Key, prepared: Any) -> None:
        """Store what was prepared for the key."""
        with self._exclusive.lock:
            self._insert(key, prepared)

    def replace(self, key: Key, prepared: Any) -> bool:
        """Store something else for a key; False if there is nothing for it yet."""
        with self._exclusive.lock:
            if key not in self._prepared and key not in self._older:
                return False
            self._insert(key, prepared)
            return True

    def discard(self, key: Key) -> None:
        """Forget what was prepared for the key."""
        with self._exclusive.lock:
            self._prepared.pop(key, None)
            self._older.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._exclusive.lock:
            self._prepared.clear()
            self._older.clear()
            self._seen.clear()

    def _used_again(self, key: Key) -> Any:
        """What is found in the older table moves to the other."""
        with self._exclusive.lock:
            if key in self._older:
                self._insert(key, self._older[key])
            return self._prepared.get(key)

    def _insert(self, key: Key, prepared: Any) -> None:
        self._older.pop(key, None)
        while key not in self._prepared and len(self) >= max(self.capacity, 1):
            if not self._older:
                self._older, self._prepared = self._prepared, {}
            self._older.pop(next(iter(self._older)), None)
        self._prepared[key] = prepared


CALLS = CallCache()
"""Every prepared call of the process."""
