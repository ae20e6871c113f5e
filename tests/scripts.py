"""Scripts of `tools` and `examples` as modules, for tests of what is in them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def script_module(path: Path) -> ModuleType:
    """The script as a module, which is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
