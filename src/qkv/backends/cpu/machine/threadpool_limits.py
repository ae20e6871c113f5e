"""threadpoolctl, where it is installed, sees qkv's threads and limits them.

threadpoolctl finds a library by the name of its file among the files that are loaded. qkv's workers
run code that is made in memory and has no file. Where they are, NumPy is always loaded too, so the
file of NumPy's arrays is registered in their place.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from qkv._version import __version__
from qkv.process.threads import default_num_threads, get_num_threads, set_num_threads


@lru_cache(maxsize=1)
def register() -> None:
    """Register qkv with threadpoolctl, once."""
    try:
        import threadpoolctl
    except ImportError:
        return

    class QkvController(threadpoolctl.LibController):  # type: ignore[misc]  # has no types
        user_api = "qkv"
        internal_api = "qkv"
        filename_prefixes = ("_multiarray_umath",)

        def get_num_threads(self) -> int:
            return get_num_threads()

        def set_num_threads(self, num_threads: int) -> None:
            """A limit is lifted by setting the number from before it, which may be the default."""
            set_num_threads(None if num_threads == default_num_threads() else num_threads)

        def get_version(self) -> Any:
            return __version__

    threadpoolctl.register(QkvController)
