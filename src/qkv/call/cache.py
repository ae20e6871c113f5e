"""The cache of prepared calls: bounded, and safe under threads and after a fork."""

from __future__ import annotations

import os
from threading import Lock
from typing import Any, TypeAlias
from weakref import WeakSet

__all__ = ["CALLS", "CallCache", "Key"]

Key: TypeAlias = tuple[Any, ...]
"""Begins with a word that says what the call was prepared for."""

CAPACITY = 1024
"""Prepared calls that are kept, some 4 KB each; the oldest go first."""


class CallCache:
    """What was prepared for calls, by a key that says all that preparing depends on.

    A call is prepared for when it is seen a second time: lengths that change from call to call
    would not be worth it.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self._prepared: dict[Key, Any] = {}
        self._seen: dict[Key, None] = {}
        self._lock = Lock()
        _every_cache.add(self)

    def __len__(self) -> int:
        return len(self._prepared)

    def count(self, *purposes: str) -> int:
        """How many calls were prepared whose key begins with one of the purposes."""
        return sum(key[0] in purposes for key in self._prepared)

    def get(self, key: Key) -> Any:
        """What was prepared for the key, None if nothing was."""
        return self._prepared.get(key)

    def is_new(self, key: Key) -> bool:
        """Whether a key is seen for the first time; it is not, from then on."""
        if key in self._seen:
            return False
        self._insert(self._seen, key, None)
        return True

    def insert(self, key: Key, prepared: Any) -> None:
        """Keep what was prepared for the key."""
        self._insert(self._prepared, key, prepared)

    def discard(self, key: Key) -> None:
        """Forget what was prepared for the key."""
        self._prepared.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        self._prepared.clear()
        self._seen.clear()

    def _insert(self, table: dict[Key, Any], key: Key, value: Any) -> None:
        with self._lock:
            while len(table) >= self.capacity:
                del table[next(iter(table))]
            table[key] = value


_every_cache: WeakSet[CallCache] = WeakSet()


def _new_locks() -> None:
    # Another thread of the parent may have held the old ones.
    for cache in _every_cache:
        cache._lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_locks)

CALLS = CallCache()
"""Every prepared call of the process."""
