"""Whether this machine multiplies bfloat16 tiles."""

import qkv
from qkv.backends.cpu.machine import host


def has_tiles() -> bool:
    """Whether it can be made to use them."""
    try:
        return host._host("amx").isa == "amx"
    except qkv.QkvError:
        return False
