"""What the machine can do at most: multiply-adds and reading of memory.

Two ceilings: multiply-adds on numbers that stay in registers, and reading memory from end to end.
Both are a few lines of LLVM IR, run by threads of their own: the benchmark measures them between
its libraries, and the pool of none of them may be part of the measure. Threads take tasks from one
counter: when a core slows down, the other takes more, as in the kernels.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PRODUCTS", "Ceiling", "Product", "product_ceiling", "read_ceiling", "survey"]

_CHAINS = 12
"""Independent sums: two multiply-adds begin in each of the four cycles that one takes."""
_STEPS = 20_000
_REPEATS = 4
_TILE_CHAINS = 6
_TILE_STEPS = 1_000
_TASKS = 64
_BURSTS = 3
"""Runs of some 10 ms each, of which the fastest counts."""
_CHUNK = 2**20
"""Bytes of one task of reading."""
_TRIES = 5
_BEYOND_CACHES = 2**30
"""Bytes of a buffer that no cache holds, even one that several machines share."""
_HELD = 2.0
"""A buffer that is read so many times as fast as main memory is held by a cache."""
_WORD = 8
_COUNT, _BUFFER, _FACTORS, _UNUSED = 8, 9, 16, 32
"""Words of the block; the counter is word 0 and has a cache line of its own."""
_HALVES = 0x3F003F003F003F00
"""0.5 in every bfloat16, about 0.5 in every float32, and an ordinary float64."""


@dataclass(frozen=True, slots=True)
class Product:
    """One multiply-add instruction: what it is called, and on what.

    Attributes
    ----------
    name : str
        As reports show it.
    call : str
        The LLVM intrinsic.
    total, factor : str
        Types of the running sum and of the two factors; tiles are numbered and have none.
    operations : int
        Multiplications and additions of one instruction.
    feature : str
        What the processor must have, if anything.
    """

    name: str
    call: str
    total: str
    factor: str
    operations: int
    feature: str


def _fma(element: str, short: str, bits: int, feature: str) -> Product:
    lanes = bits // (32 if element == "float" else 64)
    vector = f"<{lanes} x {element}>"
    name = f"{'float32' if element == 'float' else 'float64'} FMA, {bits} bits"
    return Product(name, f"llvm.fma.v{lanes}{short}", vector, vector, 2 * lanes, feature)


_TILES = Product("bfloat16 tiles (AMX)", "llvm.x86.tdpbf16ps", "", "", 2 * 16 * 16 * 32, "amx-bf16")
_SINGLE = (
    _fma("float", "f32", 512, "avx512f"),
    _fma("float", "f32", 256, "fma"),
    _fma("float", "f32", 128, ""),
)
_DOUBLE = (
    _fma("double", "f64", 512, "avx512f"),
    _fma("double", "f64", 256, "fma"),
    _fma("double", "f64", 128, ""),
)
_DOT = Product(
    "bfloat16 dot product, 512 bits",
    "llvm.x86.avx512bf16.dpbf16ps.512",
    "<16 x float>",
    "<32 x bfloat>",
    64,
    "avx512bf16",
)

PRODUCTS: dict[str, tuple[tuple[Product, ...], ...]] = {
    "float32": (_SINGLE,),
    "float32, 256 bits": (_SINGLE[1:],),
    "float64": (_DOUBLE,),
    "bfloat16": ((_TILES,), (_DOT,), _SINGLE),
    "bfloat16 pairs": ((_DOT, *_SINGLE),),
}
"""The instructions that could do the work of each ceiling, in families from the widest.

The widest of a family that the processor has takes part; of several families the fastest does.

bfloat16 can be widened to float32: on some processors that is faster than its dot product.
"""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A limit; `measure()` runs the measurement once and gives operations or bytes a second."""

    name: str
    unit: str
    measure: Callable[[], float]


def product_ceiling(kind: str, threads: int) -> Ceiling:
    """Operations a second of the fastest multiply-add that this processor has for a kind."""
    has = _features()
    usable = [[p for p in family if p.feature in has] for family in PRODUCTS[kind]]
    ceilings = [_of(family[0], threads) for family in usable if family]
    if len(ceilings) == 1:
        return ceilings[0]
    tries = [[ceiling.measure() for ceiling in ceilings] for _ in range(_TRIES)]
    return ceilings[int(np.argmax(np.max(tries, axis=0)))]


def survey(threads: int) -> dict[str, float]:
    """Every multiply-add of this processor, operations a second, and its reading of main memory."""
    has = _features()
    products = {p for kind in PRODUCTS.values() for family in kind for p in family}
    ceilings = [_of(p, threads) for p in sorted(products, key=lambda p: p.name) if p.feature in has]
    ceilings.append(_reading(_BEYOND_CACHES, threads))
    return {ceiling.name: ceiling.measure() for ceiling in ceilings}


def _of(product: Product, threads: int) -> Ceiling:
    crew = _Crew(_product_source(product) if product.total else _tile_source(product), threads)
    tasks = _TASKS * threads
    chains = _CHAINS if product.total else _TILE_CHAINS
    steps = _STEPS if product.total else _TILE_STEPS
    operations = product.operations * chains * _REPEATS * steps * tasks
    return Ceiling(product.name, "operations", lambda: operations / crew.seconds(tasks))


def read_ceiling(size: int, threads: int) -> Ceiling:
    """Bytes a second when memory is read once, in order: main memory, unless a cache holds `size`.

    A cache that neighbours share holds a part that changes from moment to moment: 66 MiB were read
    at 26 to 38 GB/s in the best of three bursts, at 40 to 49 in the best of forty, and main memory
    at 33 to 35 in both, but for some moments of 26 to 32.
    """
    main, own = _reading(_BEYOND_CACHES, threads), _reading(size, threads)
    rates = [median(ceiling.measure() for _ in range(_TRIES)) for ceiling in (main, own)]
    return own if rates[1] > _HELD * rates[0] else main


def _reading(size: int, threads: int) -> Ceiling:
    chunks = max(threads, size // _CHUNK)
    buffer = np.ones(chunks * _CHUNK // _WORD)
    crew = _Crew(_read_source(), threads)

    name = f"memory read over {buffer.nbytes / 2**20:.0f} MiB"
    return Ceiling(name, "bytes", lambda: buffer.nbytes / crew.seconds(chunks, buffer))


class _Crew:
    """Threads that run one compiled job until its tasks are taken."""

    def __init__(self, source: str, threads: int) -> None:
        self._job = _compiled(source)
        self._workers = range(threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="qkv-peak")

    def seconds(self, tasks: int, buffer: NDArray[Any] | None = None) -> float:
        return min(self._burst(_Block(tasks, buffer)) for _ in range(_BURSTS))

    def _burst(self, block: _Block) -> float:
        began = time.perf_counter()
        list(self._pool.map(lambda worker: self._job.run(block, worker), self._workers))
        return time.perf_counter() - began


class _Block:
    """What the job reads: a counter, the number of tasks, a buffer, factors; room for results."""

    def __init__(self, tasks: int, buffer: NDArray[Any] | None) -> None:
        words = np.zeros(64, np.int64)
        words[_COUNT] = tasks
        words[_FACTORS : _FACTORS + 8] = _HALVES
        if buffer is not None:
            words[_BUFFER] = buffer.__array_interface__["data"][0]
        self._kept = words, buffer
        self.address = int(words.__array_interface__["data"][0])


def _compiled(source: str) -> Any:
    """Machine code with `run(block, worker)`; the one place that knows the compiler."""
    from qkv.backends.cpu.compiler.compile import EmitFunction, Kernel, build
    from qkv.backends.cpu.machine.host import host

    return Kernel(build(EmitFunction("builtins", "str"), (source,), host()))


def _features() -> set[str]:
    from qkv.backends.cpu.machine.host import host
    from qkv.backends.cpu.machine.tile_permission import may_use_tiles

    features = host().features.split(",")
    names = {"", *(name[1:] for name in features if name.startswith("+"))}
    return names if may_use_tiles() else names - {_TILES.feature}


def _job(declarations: str, task: str) -> str:
    """A module whose job does `task` for each `%task` of the counter; it leaves to `%take`."""
    return f"""
{declarations}
define void @job(ptr %block, i64 %worker) "prefer-vector-width"="512" {{
  %count_at = getelementptr i64, ptr %block, i64 {_COUNT}
  %count = load i64, ptr %count_at
  %buffer_at = getelementptr i64, ptr %block, i64 {_BUFFER}
  %buffer = load ptr, ptr %buffer_at
  %factors = getelementptr i64, ptr %block, i64 {_FACTORS}
  %unused = getelementptr i64, ptr %block, i64 {_UNUSED}
  br label %take
take:
  %task = atomicrmw add ptr %block, i64 1 monotonic
  %more = icmp slt i64 %task, %count
  br i1 %more, label %work, label %done
work:
{task}
done:
  ret void
}}
"""


def _loop(
    total: str, begins: list[str], steps: int, body: list[str], after: list[str]
) -> list[str]:
    """Sums `%s` from values on, each `%n` after one of `steps` turns; the last ones are stored."""
    return [
        "  br label %loop",
        "loop:",
        "  %i = phi i64 [0, %work], [%next, %loop]",
        *(
            f"  %s{c} = phi {total} [{begin}, %work], [%n{c}, %loop]"
            for c, begin in enumerate(begins)
        ),
        *body,
        "  %next = add i64 %i, 1",
        f"  %again = icmp slt i64 %next, {steps}",
        "  br i1 %again, label %loop, label %end",
        "end:",
        *after,
        *(f"  store volatile {total} %n{c}, ptr %unused, align 8" for c in range(len(begins))),
        "  br label %take",
    ]


def _product_source(product: Product) -> str:
    total, factor = product.total, product.factor
    # The intrinsics are fma(x, y, sum) and dot(sum, x, y).
    types = [total, factor, factor] if total != factor else [total] * 3
    body = []
    for repeat in range(_REPEATS):
        for c in range(_CHAINS):
            before = f"%s{c}" if repeat == 0 else f"%m{repeat}_{c}"
            after = f"%n{c}" if repeat == _REPEATS - 1 else f"%m{repeat + 1}_{c}"
            values = [before, "%x", "%x"] if total != factor else ["%x", "%x", before]
            given = ", ".join(f"{t} {v}" for t, v in zip(types, values, strict=True))
            body.append(f"  {after} = call {total} @{product.call}({given})")
    load = f"  %x = load {factor}, ptr %factors, align 8"
    # LLVM would compute sums that begin equally once; it cannot know what volatile reads give.
    begins = [f"%b{c}" for c in range(_CHAINS)]
    reads = [f"  {begin} = load volatile {total}, ptr %factors, align 8" for begin in begins]
    declaration = f"declare {total} @{product.call}({', '.join(types)})"
    return _job(declaration, "\n".join([load, *reads, *_loop(total, begins, _STEPS, body, [])]))


def _tile_source(product: Product) -> str:
    """Six tiles add up the product of the last two; a tile is 16 rows of 64 bytes."""
    sizes = struct.pack("<BB14x8H16x8B8x", 1, 0, *[64] * 8, *[16] * 8)
    constant = ", ".join(f"i8 {byte}" for byte in sizes)
    declarations = f"""
@sizes = internal constant [64 x i8] [{constant}]
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @{product.call}(i8, i8, i8)"""
    first = [
        "  call void @llvm.x86.ldtilecfg(ptr @sizes)",
        *(f"  call void @llvm.x86.tilezero(i8 {c})" for c in range(_TILE_CHAINS)),
        "  call void @llvm.x86.tileloadd64(i8 6, ptr %factors, i64 0)",
        "  call void @llvm.x86.tileloadd64(i8 7, ptr %factors, i64 0)",
    ]
    body = [
        f"  call void @{product.call}(i8 {c}, i8 6, i8 7)" for c in range(_TILE_CHAINS)
    ] * _REPEATS
    after = ["  call void @llvm.x86.tilerelease()"]
    return _job(declarations, "\n".join([*first, *_loop("", [], _TILE_STEPS, body, after)]))


def _read_source() -> str:
    """Adds up a chunk in eight vectors of 64 bytes."""
    vector, chains = "<8 x i64>", 8
    step = 64 * chains
    body = [f"  %at = mul i64 %i, {step}", "  %here = getelementptr i8, ptr %chunk, i64 %at"]
    for c in range(chains):
        body += [
            f"  %p{c} = getelementptr i8, ptr %here, i64 {64 * c}",
            f"  %v{c} = load {vector}, ptr %p{c}, align 8",
            f"  %n{c} = add {vector} %s{c}, %v{c}",
        ]
    first = [
        f"  %offset = mul i64 %task, {_CHUNK}",
        "  %chunk = getelementptr i8, ptr %buffer, i64 %offset",
    ]
    return _job(
        "",
        "\n".join([*first, *_loop(vector, ["zeroinitializer"] * chains, _CHUNK // step, body, [])]),
    )
