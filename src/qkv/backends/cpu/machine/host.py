"""The machine that code is compiled for.

`QKV_ISA` forces a lesser instruction set: "amx" (bfloat16 tiles), "avx512-bf16" (pairs of
bfloat16), "avx512", "avx2", "sse", "neon-bf16" (pairs of bfloat16, and float16), "neon-fhm"
(float16) or "neon". For tests, "amx-emulated" and the like run the kernels of any set on any
machine: vectors are made of shorter ones, and instructions for bfloat16 are written out
(`products.tile_instructions`), which is slow.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from qkv.backends.cpu.machine import threadpool_limits
from qkv.backends.cpu.machine.arm_features import arm_features
from qkv.backends.cpu.machine.processor import processor
from qkv.backends.cpu.machine.tile_permission import may_use_tiles, tile_refusal
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.errors import ArgumentError
from qkv.process.forks import alone_in_llvm

_AVX512 = TileShape(lanes=16, vectors=4, keys=4, halves=True)
_NEON = TileShape(lanes=4, vectors=4, keys=4, halves=True, row_products=16)
_SHAPES = {
    "amx": replace(_AVX512, byte_tiles=True),
    "avx512-bf16": replace(_AVX512, narrow_rows=("bfloat16",)),
    "avx512": _AVX512,
    "avx2": TileShape(lanes=8, vectors=3, keys=4, halves=True, value_keys=16),
    "sse": TileShape(lanes=4, vectors=3, keys=3, fused=False, value_keys=16),
    "neon-bf16": replace(_NEON, narrow_rows=("bfloat16", "float16"), pairs_by="bfdot"),
    "neon-fhm": replace(_NEON, narrow_rows=("float16",)),
    "neon": _NEON,
}
"""The tile shape for float32, for each instruction set."""
_BFLOAT16_SHAPES = {
    "amx": TileShape(
        lanes=16, vectors=2, keys=2, halves=True, product="tiles", q_blocks_per_task=32
    ),
    "avx512-bf16": TileShape(
        lanes=16, vectors=4, keys=6, halves=True, product="pairs", q_blocks_per_task=4
    ),
    # 16 lanes are four registers of 128 bits.
    "neon-bf16": TileShape(
        lanes=16,
        vectors=1,
        keys=4,
        halves=True,
        product="pairs",
        pairs_by="bfdot",
        quads=True,
        q_blocks_per_task=16,
    ),
}
"""The tile shape for bfloat16. Machines that are not named convert bfloat16 to float32."""
_NEEDS_AVX512 = frozenset({"avx512f", "avx512vl", "avx512bw", "avx512dq", "fma", "f16c"})
EMULATED = "-emulated"
"""What follows the name of an instruction set whose kernels run on any machine, for tests."""
_REQUIRED = {
    "amx": _NEEDS_AVX512 | {"avx512bf16", "amx-tile", "amx-bf16", "amx-int8"},
    "avx512-bf16": _NEEDS_AVX512 | {"avx512bf16"},
    "avx512": _NEEDS_AVX512,
    "avx2": frozenset({"avx2", "fma", "f16c"}),
}
"""Features of the processor that each instruction set needs, the fastest set first."""
_REQUIRED_ON_ARM = {
    "neon-bf16": frozenset({"bf16", "fp16fml"}),
    "neon-fhm": frozenset({"fp16fml"}),
    "neon": frozenset[str](),
}
_FAR_PREFETCH: dict[str, Any] = {"nearest": False, "reach": 16 * 1024}
_PREFETCH = dict.fromkeys(("znver1", "znver2", "znver3", "znver4"), _FAR_PREFETCH) | {
    "znver5": {"narrow_reach": 12 * 1024}
}
"""How some processors prefetch best, where that differs from the defaults of `TileShape`."""
_SWITCHED_OFF: dict[str, tuple[str, ...]] = {
    "avx512-bf16": ("amx",),
    "avx512": ("amx", "avx512bf16"),
    "avx2": ("amx", "avx512", "avx10"),
    "sse": ("amx", "avx", "fma", "f16c", "xop", "v"),
}
"""Prefixes of the features that are switched off, by the instruction set that is forced."""


@dataclass(frozen=True, slots=True)
class Host:
    """A processor as the compiler knows it, with the tile shapes that fit its registers."""

    cpu: str
    features: str
    isa: str
    emulated_on: str | None = None
    """The instruction set that kernels of `isa` are compiled for, if they are emulated."""

    @property
    def kernels(self) -> str:
        """The instruction set that the kernels were written for."""
        return self.isa.removesuffix(EMULATED)

    @property
    def shape(self) -> TileShape:
        return replace(self.adapted(_SHAPES[self.kernels]), **_PREFETCH.get(self.cpu, {}))

    @property
    def bfloat16_shape(self) -> TileShape | None:
        """The tile shape for bfloat16, if the machine multiplies bfloat16."""
        shape = _BFLOAT16_SHAPES.get(self.kernels)
        return None if shape is None else self.adapted(shape)

    def adapted(self, shape: TileShape) -> TileShape:
        """A shape of the kernels' instruction set, for this machine if they are emulated on it.

        Results have the same bits as on a machine that has the set.
        """
        if self.emulated_on is None:
            return shape
        halves = shape.halves and _SHAPES[self.emulated_on].halves
        return replace(shape, halves=halves, emulated=True)

    def shape_of(self, dtype: np.dtype[Any]) -> TileShape:
        """The tile shape for a type of computation; float64 has half as many lanes."""
        shape = self.shape
        return shape if dtype.itemsize == 4 else replace(shape, lanes=shape.lanes // 2)


def host() -> Host:
    """This machine, or the one that `QKV_ISA` names.

    Raises
    ------
    ArgumentError
        If `QKV_ISA` names an instruction set that this machine lacks and does not emulate.
    """
    return _host(os.environ.get("QKV_ISA", ""))


def withheld_tiles() -> str:
    """Why a processor's matrix tiles are not used; empty if they are, or there are none.

    It says nothing of a narrower instruction set that `QKV_ISA` names.
    """
    here = host()
    if os.environ.get("QKV_ISA") or here.isa == "amx":
        return ""
    has = {name[1:] for name in here.features.split(",") if name.startswith("+")}
    return tile_refusal() if has >= _REQUIRED["amx"] else ""


@lru_cache(maxsize=8)
@alone_in_llvm()  # It imports modules, whose locks a forked child would inherit.
def _host(forced: str) -> Host:
    threadpool_limits.register()
    described = processor()
    features = dict(described.features)
    has = {name for name, present in features.items() if present}
    withheld: list[tuple[str, str]] = []
    if platform.machine().lower() in ("arm64", "aarch64"):
        known = arm_features()
        usable = [isa for isa, needs in _REQUIRED_ON_ARM.items() if needs <= known]
    else:
        usable = [isa for isa, needs in _REQUIRED.items() if needs <= has] + ["sse"]
        if usable[0] == "amx" and not may_use_tiles():
            withheld = [("amx", tile_refusal())]
            # On processors with tiles, pairs of bfloat16 are slower than float32.
            usable[:3] = ["avx512", "avx512-bf16"]
    isa = forced or usable[0]
    emulated = [name + EMULATED for name in _SHAPES]
    if isa not in (*usable, *emulated):
        raise ArgumentError(
            f"QKV_ISA={forced!r} is not an instruction set of this machine.",
            [("has", ", ".join(usable)), ("emulates, slowly", ", ".join(emulated)), *withheld],
            "Unset QKV_ISA, or name one of these.",
        )
    emulated_on = usable[0] if isa in emulated else None
    narrowed = isa != usable[0] and emulated_on is None
    dropped = _SWITCHED_OFF.get(isa, ()) if narrowed else ()
    for name in features:
        if name.startswith(dropped):
            features[name] = False
    features |= dict.fromkeys(_REQUIRED_ON_ARM.get(isa, ()), True)
    flat = ",".join(("+" if on else "-") + name for name, on in sorted(features.items()))
    return Host(described.cpu, flat, isa, emulated_on)
