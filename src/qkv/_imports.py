"""What to do when a module of another library has been imported, whoever imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]


def when_imported(name: str, act: Callable[[Any], None]) -> None:
    """Call `act` with the module of this name: now if it has been imported, else when it is."""
    if name in sys.modules:
        # `import_module` waits for a thread that is still importing it.
        act(import_module(name))
    elif not any(type(finder) is _Finder and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder:
    """Finds the module, once, with a loader that acts after it has been loaded.

    This and the loader have no base classes, because `importlib.abc` is slow to import.
    """

    def __init__(self, name: str, act: Callable[[Any], None]) -> None:
        self.name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec.loader, self._act)
            spec.loader = loader
        return spec


class _Loader:
    """The loader of the module, which acts once it has been loaded."""

    def __init__(self, loader: Any, act: Callable[[Any], None]) -> None:
        self._loader, self._act = loader, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._act(module)
