"""Names that older revisions, beside which `--compare` runs, have in other modules.

mypy ignores those lines, because this revision does not have these modules.
"""

from __future__ import annotations

try:
    from qkv.call.binding.options import OptionValues
except ImportError:
    from qkv.call.options import OptionValues  # type: ignore
try:
    from qkv.problem.building.builder import Builder, Shape
except ImportError:
    from qkv.problem.builder import Builder, Shape  # type: ignore

__all__ = ["Builder", "OptionValues", "Shape"]
