"""The program `qkv`, which ends on Ctrl-C without a traceback from its first moment on.

It stands outside of the package because an import of anything inside imports NumPy as well, which
is most of the time that the program takes to start.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["leave_on_interrupt", "main"]

INTERRUPTED = 130


def main() -> int:
    """Run the command line of `qkv.cli` and return its exit code."""
    leaves = leave_on_interrupt()
    from qkv.cli import main as run

    if not leaves:
        return run()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, _leave)


def leave_on_interrupt() -> bool:
    """Let Ctrl-C end the process at once, and say whether it does.

    While modules are imported there is nothing to clean up, and an exception out of the middle of
    an import could be caught or reported by whatever is imported. A shell starts programs of the
    background so that they ignore Ctrl-C; those go on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return False
    signal.signal(signal.SIGINT, _leave)
    return True


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
