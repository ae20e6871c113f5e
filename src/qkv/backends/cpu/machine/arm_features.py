"""What an Arm processor multiplies, as the system says: LLVM does not list that."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

__all__ = ["arm_features"]

_AT_HWCAP, _AT_HWCAP2 = 16, 26
_FEATURES = {
    "bf16": (_AT_HWCAP2, 1 << 14, b"hw.optional.arm.FEAT_BF16"),
    "fp16fml": (_AT_HWCAP, 1 << 23, b"hw.optional.arm.FEAT_FHM"),
}
"""Where Linux (`getauxval`, arch/arm64/include/uapi/asm/hwcap.h) and macOS (`sysctl`) tell of the
features."""


def arm_features() -> frozenset[str]:
    """The features of this processor among "bf16" (FEAT_BF16: BFDOT, BFMMLA, BFCVTN) and "fp16fml"
    (FEAT_FHM: FMLAL), by LLVM's names. Linux and macOS tell them; elsewhere there are none."""
    try:
        has = _asker()
        return frozenset(name for name, places in _FEATURES.items() if has(*places))
    except (AttributeError, OSError, TypeError):
        return frozenset()


def _asker() -> Callable[[int, int, bytes], bool]:
    """A function that asks the system for one feature."""
    library = ctypes.CDLL(None)
    if sys.platform == "darwin":

        def ask_sysctl(_kind: int, _bit: int, name: bytes) -> bool:
            found, size = ctypes.c_int32(0), ctypes.c_size_t(4)
            failed = library.sysctlbyname(name, ctypes.byref(found), ctypes.byref(size), None, 0)
            return failed == 0 and found.value == 1

        return ask_sysctl
    if sys.platform == "linux":
        library.getauxval.restype, library.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
        return lambda kind, bit, _name: bool(library.getauxval(kind) & bit)
    return lambda _kind, _bit, _name: False
