"""The program `qkv`, which ends on Ctrl-C without a traceback from its first moment on.

It stands outside of the package because an import of anything inside imports NumPy as well, which
is most of the time that the program takes to start.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]

INTERRUPTED = 130


def main() -> int:
    """Run the command line of `qkv.cli` and return its exit code."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:  # a shell starts programs of the background so
        from qkv.cli import main as run

        return run()
    # While modules are imported there is nothing to clean up, and an exception out of the middle
    # of an import could be caught or reported by whatever is imported.
    signal.signal(signal.SIGINT, _leave)
    from qkv.cli import main as run

    try:
        signal.signal(signal.SIGINT, handler)
        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
