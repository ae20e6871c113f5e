"""Kernels that are built anew, since what emits them was broken on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from qkv.backends.cpu.compiler.compile import Code, EmitFunction, build
from qkv.backends.cpu.passes import backward, decode, forward, replay
from watched import forget_prepared_calls

PASSES = (forward, backward, decode, replay)


@contextmanager
def rebuilt_kernels() -> Iterator[list[tuple[EmitFunction, Any]]]:
    """Use only kernels that are built inside, and forget these afterwards.

    Gives a list of what is built, the function that emits and the key that it is given, so that a
    test can tell that the broken kernel was the one that ran.
    """
    built: list[tuple[EmitFunction, Any]] = []

    def record(emit: EmitFunction, arguments: tuple[Any, ...], *rest: Any, **shared: Any) -> Code:
        built.append((emit, *arguments))
        return build(emit, arguments, *rest, **shared)

    def forget() -> None:
        forget_prepared_calls()
        for module in PASSES:
            module._kernel.cache_clear()

    with ExitStack() as stack:
        stack.callback(forget)
        stack.enter_context(patch.dict("os.environ", QKV_CACHE_DIR=""))
        for module in PASSES:
            stack.enter_context(patch.object(module, "build", record))
        forget()
        yield built
