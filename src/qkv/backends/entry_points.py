"""Backends of other packages, as their installation announces them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["backend_entry_points"]

GROUP = "qkv.backends"


def backend_entry_points() -> tuple[EntryPoint, ...]:
    """The entry points of the group `qkv.backends`.

    Importing `importlib.metadata` takes longer than a short call of attention. It is left out where
    no package in the folders of `sys.path` names the group.
    """
    if "importlib.metadata" not in sys.modules and not _may_be_announced():
        return ()
    from importlib.metadata import entry_points

    return tuple(entry_points(group=GROUP))


def _may_be_announced() -> bool:
    """False only where `importlib.metadata` would find nothing: packages lie in folders alone."""
    if any(
        hasattr(finder, "find_distributions") and getattr(finder, "__module__", "") not in _STANDARD
        for finder in sys.meta_path
    ):
        return True
    try:
        return any(_is_announced_in(os.fspath(entry) or ".") for entry in sys.path)
    except (OSError, TypeError):
        return True


_STANDARD = ("_frozen_importlib_external", "importlib._bootstrap_external")
"""The modules of Python's own finder, which looks into the entries of `sys.path`."""


def _is_announced_in(place: str) -> bool:
    if not os.path.isdir(place):
        return os.path.exists(place)  # An archive, which is not looked into here.
    if place.endswith(".egg"):
        return _names_group(os.path.join(place, "EGG-INFO"))
    return any(
        _names_group(os.path.join(place, name))
        for name in os.listdir(place)
        if name.endswith((".dist-info", ".egg-info"))
    )


def _names_group(folder: str) -> bool:
    file = os.path.join(folder, "entry_points.txt")
    if not os.path.isfile(file):
        return False
    with open(file, "rb") as content:
        return GROUP.encode() in content.read()
