"""Whether an Arm processor multiplies bfloat16, as the system says: LLVM does not list that."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["multiplies_bfloat16"]

_AT_HWCAP2 = 26
_HWCAP2_BF16 = 1 << 14
"""Linux, `getauxval` and arch/arm64/include/uapi/asm/hwcap.h."""


def multiplies_bfloat16() -> bool:
    """Whether there are BFDOT and BFCVT (FEAT_BF16), as far as Linux or macOS tell."""
    try:
        library = ctypes.CDLL(None)
        if sys.platform == "darwin":
            found, size = ctypes.c_int32(0), ctypes.c_size_t(4)
            name = b"hw.optional.arm.FEAT_BF16"
            failed = library.sysctlbyname(name, ctypes.byref(found), ctypes.byref(size), None, 0)
            return failed == 0 and found.value == 1
        if sys.platform == "linux":
            library.getauxval.restype, library.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
            return bool(library.getauxval(_AT_HWCAP2) & _HWCAP2_BF16)
    except (AttributeError, OSError, TypeError):
        pass
    return False
