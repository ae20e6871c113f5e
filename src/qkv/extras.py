"""How a person installs what an optional part of qkv needs."""

from __future__ import annotations

import json
from functools import cache

__all__ = ["install_command", "missing"]


def install_command(extra: str) -> str:
    """The command that installs an extra: of a checkout in its folder, of a wheel by name."""
    return f'pip install -e ".[{extra}]"' if _is_checkout() else f'pip install "qkv[{extra}]"'


def missing(what: str, library: str | None, extra: str) -> ModuleNotFoundError:
    """The error where `what` needs a library that is not installed."""
    return ModuleNotFoundError(
        f"{what} needs {library}, which is not installed. "
        f"Install qkv with its extra [{extra}], as in: {install_command(extra)}",
        name=library,
    )


@cache
def _is_checkout() -> bool:
    """Whether qkv is run out of a checkout; pip writes that down when it installs one."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        direct_url = distribution("qkv").read_text("direct_url.json")
    except PackageNotFoundError:
        return True
    if direct_url is None:
        return False
    return bool(json.loads(direct_url).get("dir_info", {}).get("editable", False))
