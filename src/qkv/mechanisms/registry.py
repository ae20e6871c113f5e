"""Every mechanism by its command-line name; a new one adds its class to the list."""

from __future__ import annotations

from qkv.mechanisms.base import Mechanism

__all__ = ["MECHANISMS"]

_CLASSES: tuple[type[Mechanism], ...] = ()

MECHANISMS: dict[str, type[Mechanism]] = {cls.name: cls for cls in _CLASSES}
"""Command-line name to class, in the order in which tables show them."""
