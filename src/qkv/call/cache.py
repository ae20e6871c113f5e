"""The cache of prepared calls: bounded, and safe under threads and after a fork."""

from __future__ import annotations

import os
from threading import Lock
from typing import Any, TypeAlias
from weakref import WeakSet

__all__ = ["CALLS", "CallCache", "Key"]

Key: TypeAlias = tuple[Any, ...]
"""A cache key; its first entry names the purpose, such as "forward"."""

CAPACITY = 1024
"""Prepared calls that are kept, some 30 KB each; the oldest go first."""


class CallCache:
    """Prepared calls, by a key that holds everything on which preparation depends.

    A call is prepared when it is seen a second time, because preparing would not pay off for
    lengths that change from call to call.
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
        """The prepared call for the key, or None."""
        return self._prepared.get(key)

    def is_new(self, key: Key) -> bool:
        """Whether a key is seen for the first time; it is not, from then on."""
        if key in self._seen:
            return False
        self._insert(self._seen, key, None)
        return True

    def insert(self, key: Key, prepared: Any) -> None:
        """Store what was prepared for the key."""
        self._insert(self._prepared, key, prepared)

    def replace(self, key: Key, prepared: Any) -> bool:
        """Store something else for a key; False if there is nothing for it yet."""
        if key not in self._prepared:
            return False
        self._prepared[key] = prepared
        return True

    def discard(self, key: Key) -> None:
        """Forget what was prepared for the key."""
        with self._lock:
            self._prepared.pop(key, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._prepared.clear()
            self._seen.clear()

    def _insert(self, table: dict[Key, Any], key: Key, value: Any) -> None:
        with self._lock:
            while len(table) >= self.capacity:
                del table[next(iter(table))]
            table[key] = value


_every_cache: WeakSet[CallCache] = WeakSet()


def _new_locks() -> None:
    # Another thread of the parent process may have held the old locks.
    for cache in _every_cache:
        cache._lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_locks)

CALLS = CallCache()
"""Every prepared call of the process."""
