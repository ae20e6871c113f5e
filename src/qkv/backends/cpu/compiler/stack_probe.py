"""What compiled code calls on Windows when its frame is larger than a page.

Windows gives a thread the pages of its stack one after another, as each is touched for the first
time. LLVM therefore begins a function with a frame above 4 KiB with a call of `__chkstk`, which
touches the pages in order. Without the call (the attribute "no-stack-arg-probe") the first access
may be to a page further down, and the process ends; probes without a call ("inline-asm") LLVM has
for other systems only. The function belongs to Microsoft's static runtime library, where code that
is made at run time does not find it; ntdll, which is in every process, has the same function.
"""

from __future__ import annotations

import ctypes
import sys

STACK_PROBE = "__chkstk"


def register_stack_probe() -> None:
    """Tell LLVM's linker where the probe is; without effect except on Windows.

    Raises
    ------
    OSError
        If ntdll lacks it. LLVM would end the process when it finds no address for a name.
    """
    if sys.platform != "win32":
        return
    import llvmlite.binding as llvm

    try:
        function = getattr(ctypes.WinDLL("ntdll"), STACK_PROBE)
    except AttributeError as error:
        raise OSError(f"this Windows has no {STACK_PROBE} in ntdll") from error
    llvm.add_symbol(STACK_PROBE, ctypes.cast(function, ctypes.c_void_p).value)
