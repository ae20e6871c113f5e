"""Kernels for platforms that are not here, and what their object files expect from the system.

    python -m tests.platforms.cross_compiled

prints a table of platforms and symbols. Kernels are those that a few calls of every kind need. The
calls run here, with the tile shapes of the other processor, so that the same text is compiled for
both.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest

import qkv
from qkv.backends.cpu.backward.delta_correction import emit_delta_correction
from qkv.backends.cpu.backward.kernel import emit_backward
from qkv.backends.cpu.bf16_pairs.kernel import emit_bf16_pairs
from qkv.backends.cpu.compiler import compile as compiler
from qkv.backends.cpu.compiler import stored_kernels
from qkv.backends.cpu.forward.kernel import emit_forward
from qkv.backends.cpu.machine import host as machine
from qkv.backends.cpu.machine.host import Host
from qkv.backends.cpu.python_calls.code import emit_calls
from qkv.backends.cpu.replay.kernel import emit_replay
from qkv.backends.cpu.replay.weight_blocks import emit_weight_blocks
from qkv.backends.cpu.threads.gate import emit_gate
from qkv.backends.cpu.threads.openmp_code import emit_team
from qkv.backends.cpu.threads.pool_code import emit_pool
from qkv.cache import ContiguousCache, PagedCache
from qkv.call.binding.bound import bind
from qkv.call.binding.options import option_values
from qkv.call.derivatives.jvp import second_vjp
from qkv.call.repeated.cache import CALLS
from qkv.testing import DTYPES

from .object_files import undefined_symbols

Made = tuple[Callable[..., str], tuple[Any, ...]]
"""A function that emits a module, and its arguments."""


@dataclass(frozen=True, slots=True)
class Target:
    """A platform, a processor of it by LLVM's name, and the instruction set that qkv uses there."""

    triple: str
    cpu: str
    isa: str

    def __str__(self) -> str:
        return f"{self.triple} {self.isa}"

    @property
    def system(self) -> str:
        return self.triple.split("-")[-1] if "linux" not in self.triple else "linux"

    @property
    def processor(self) -> str:
        return "x86" if self.triple.startswith("x86") else "arm"


TARGETS = (
    Target("aarch64-unknown-linux-gnu", "cortex-a57", "neon"),
    Target("aarch64-unknown-linux-gnu", "neoverse-v2", "neon-bf16"),
    Target("arm64-apple-macosx", "apple-m1", "neon"),
    Target("x86_64-apple-macosx", "haswell", "avx2"),
    Target("x86_64-pc-windows-msvc", "znver4", "avx512"),
    Target("x86_64-pc-windows-msvc", "haswell", "avx2"),
    Target("x86_64-pc-windows-msvc", "x86-64", "sse"),
)

KNOWN = {
    "linux": {"memset", "syscall", "clock_gettime", "sched_yield"},
    "macosx": {
        "_memset", "_bzero", "___bzero", "_clock_gettime", "_sched_yield", "_pthread_cond_wait",
        "_pthread_cond_broadcast", "_pthread_cond_signal", "_pthread_mutex_lock",
        "_pthread_mutex_unlock",
    },
    "msvc": {"memset", "__chkstk", "_fltused"},
}  # fmt: skip
"""What the C library of each system has. On Windows `__chkstk` touches the pages of a large frame
one by one; the compiler module says where it comes from. `_fltused` only tells Microsoft's linker
that there are numbers; nothing refers to it."""


def _arrays(dtype: str, q_len: int, kv_len: int = 40, dim: int = 24) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    q = rng.normal(size=(4, q_len, dim)).astype(kind)
    k, v = rng.normal(size=(2, 2, kv_len, dim)).astype(kind)
    return q, k, v


def _forward(dtype: str, *variants: Any, q_len: int = 40, **keywords: Any) -> None:
    qkv.attention(*_arrays(dtype, q_len), *variants, backend="cpu", **keywords)


def _gradients(dtype: str, *variants: Any) -> None:
    out, pullback = qkv.vjp(*_arrays(dtype, 40), *variants, backend="cpu")
    pullback(out)


def _second_derivatives(dtype: str, *variants: Any) -> None:
    arrays = _arrays(dtype, 40)
    out, _ = qkv.jvp(*arrays, *variants, tangents=qkv.Tangents(*arrays), backend="cpu")
    bound = bind(*arrays, variants, option_values("second_vjp", {"backend": "cpu"}))
    second_vjp(bound, grad_out=out, tangents=qkv.Tangents(*arrays), wrt=variants, given=variants)


def _inspection(dtype: str) -> None:
    record = qkv.inspect(*_arrays(dtype, 40), qkv.Causal(), backend="cpu")
    np.asarray(record.entropy), np.asarray(record.received), record.top(3)
    np.asarray(record.weights[0, :3])


def _cached(cache: Any) -> None:
    """One more token of a cache, whose rows lie in pages or are int8."""
    q, k, v = (array[None] for array in _arrays("float32", 40))
    rows = cache.append(k, v)
    qkv.attention(q[:, :, -1:], rows.key, rows.value, qkv.Causal(), q_offset="end", backend="cpu")


def _wide(kind: str) -> None:
    """Rows of 257 numbers have the largest frames."""
    arrays = _arrays("float16", 1 if kind == "decode" else 40, dim=257)
    if kind == "gradients":
        out, pullback = qkv.vjp(*arrays, backend="cpu")
        pullback(out)
    else:
        qkv.attention(*arrays, backend="cpu")


_mod = qkv.ScoreMod(lambda s, b, h, i, j: s - 0.1 * np.sqrt(abs(i - j)) + np.exp(-abs(s)))

CALLS_OF_EVERY_KIND: dict[str, Callable[[], None]] = {
    **{f"forward {t}": partial(_forward, t, qkv.Causal(), qkv.ALiBi()) for t in DTYPES},
    **{f"decode {t}": partial(_forward, t, qkv.Causal(), q_len=1, q_offset="end") for t in DTYPES},
    **{f"gradients {t}": partial(_gradients, t, qkv.Causal(), qkv.Softcap(9.0)) for t in DTYPES},
    "gradients of a bias": partial(_gradients, "float32", qkv.Bias(np.zeros((4, 40, 40), "f4"))),
    "second derivatives float32": partial(_second_derivatives, "float32", qkv.Softcap(9.0)),
    "second derivatives float64": partial(_second_derivatives, "float64"),
    "inspection float32": partial(_inspection, "float32"),
    "inspection bfloat16": partial(_inspection, "bfloat16"),
    "rotation and sinks": partial(_forward, "float32", qkv.RoPE(), qkv.Sinks(np.arange(4.0))),
    "dropout": partial(_forward, "float32", qkv.Dropout(0.3, 11), qkv.SlidingWindow(9, 0)),
    "score mod": partial(_forward, "float32", _mod),
    "pages": lambda: _cached(PagedCache()),
    "int8": lambda: _cached(ContiguousCache(dtype="int8")),
    **{f"wide {kind}": partial(_wide, kind) for kind in ("forward", "decode", "gradients")},
}


PAIRS = {
    "avx512": Host("znver4", "", "avx512-bf16").bfloat16_shape,
    "neon-bf16": Host("neoverse-v2", "", "neon-bf16").bfloat16_shape,
}
"""The shape of tiles of bfloat16 for targets that multiply pairs of it."""


@lru_cache(maxsize=256)
def modules(call: str, isa: str) -> tuple[Made, ...]:
    """What a call compiles with the tile shapes of `isa`, which run on this machine as well."""
    made: list[Made] = []
    here, digest = machine.host(), stored_kernels.digest

    def noted(module: str, function: str, arguments: tuple[Any, ...], host: Host) -> str | None:
        made.append((getattr(import_module(module), function), arguments))
        return digest(module, function, arguments, host)

    # Kernels are kept by the machine they are for. Commas mean nothing to LLVM, and with another
    # number of them all kernels of the call are made anew.
    commas = "," * (1 + list(CALLS_OF_EVERY_KIND).index(call))
    # Instructions for bfloat16 would not run here: those kernels are added below.
    unknown = replace(here, isa=isa.replace("neon-bf16", "neon"), features=here.features + commas)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_host", lambda forced: unknown)
        patch.setattr(stored_kernels, "digest", noted)
        CALLS.clear()
        CALLS_OF_EVERY_KIND[call]()
        CALLS.clear()
    kernels = [m for m in made if not re.search(r"\.(threads|python_calls)\.", m[0].__module__)]
    return (*kernels, *_made_from_the_same(kernels, isa))


def _made_from_the_same(made: list[Made], isa: str) -> Iterator[Made]:
    """Kernels that rarer calls make from the keys of these."""
    for emit, arguments in made:
        if emit is emit_backward:
            yield emit_delta_correction, arguments
        elif emit is emit_replay:
            yield emit_weight_blocks, (replace(arguments[0], question="blocks"),)
        elif emit is emit_forward and isa in PAIRS and arguments[0].spec.dtype == "bfloat16":
            yield emit_bf16_pairs, (replace(arguments[0], shape=PAIRS[isa]),)


def modules_of_threads(target: Target) -> tuple[Made, ...]:
    """What is compiled besides kernels; there are no native workers on Windows."""
    made: list[Made] = [(emit_calls, (object.__basicsize__,)), (emit_gate, ((0, 8),))]
    made.append((emit_team, (target.processor,)))
    if target.system == "linux":
        made.append((emit_pool, (target.processor, "futex", time.CLOCK_MONOTONIC)))
    elif target.system == "macosx":
        made.append((emit_pool, (target.processor, "condition", 6)))
    return tuple(made)


@lru_cache(maxsize=8)
def _target_machine(target: Target) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    found = llvm.Target.from_triple(target.triple)
    return found.create_target_machine(cpu=target.cpu, features="", opt=2, jit=True)


def object_file(made: Made, target: Target) -> bytes:
    """What the compiler makes of a module there."""
    emit, arguments = made
    there = _target_machine(target)
    module = compiler.parsed_for(emit(*arguments), there, target.triple)
    return bytes(there.emit_object(module))


def expected_symbols(call: str, target: Target) -> set[str]:
    """What all modules of a call expect from the system."""
    all_modules = modules(call, target.isa)
    files = [object_file(made, target) for made in all_modules]
    return set().union(*map(undefined_symbols, files)) - public_functions(all_modules, target)


def public_functions(made: Sequence[Made], target: Target) -> set[str]:
    """Symbols of the functions that modules have for one another."""
    mark = "_" if target.system == "macosx" else ""
    defined = re.compile(r'^define (?!internal)[^@]*@"?(\w+)', re.MULTILINE)
    return {mark + name for emit, arguments in made for name in defined.findall(emit(*arguments))}


def main() -> int:
    """Print the table; the exit code is 1 if a symbol is not known."""
    unknown = False
    print(f"{'platform':<28}{'processor':<13}{'set':<8}{'modules':>8}{'KiB':>7}  expects")
    for target in TARGETS:
        all_modules = [m for call in CALLS_OF_EVERY_KIND for m in modules(call, target.isa)]
        files = [object_file(m, target) for m in (*all_modules, *modules_of_threads(target))]
        symbols = set().union(*map(undefined_symbols, files))
        symbols -= public_functions(all_modules, target)
        size = sum(map(len, files)) / 1024
        new = symbols - KNOWN[target.system]
        unknown |= bool(new)
        print(
            f"{target.triple:<28}{target.cpu:<13}{target.isa:<8}{len(files):>8}{size:>7.0f}  "
            + ", ".join(sorted(symbols))
            + (f"; UNKNOWN: {', '.join(sorted(new))}" if new else ""),
            flush=True,
        )
    return int(unknown)


if __name__ == "__main__":
    sys.exit(main())
