"""Digests of results: problems with fixed seeds on every instruction set.

`digests.json` holds what was found before, on machines with AVX-512 and AVX512-BF16 and, for tiles,
by their emulation. To record it again, after a change that is meant to change bits, run this file
with `src`, `tests` and `tests/hardening` on the path: emulation gives the bits of the set itself.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np

import qkv
from forced import OF_X86, as_it_runs
from qkv.backends.cpu.machine.host import EMULATED
from qkv.problem.building.builder import Shape
from qkv.testing import Case

RECORDED = Path(__file__).with_name("digests.json")


def some_keys(shape: Shape, rng: np.random.Generator) -> tuple[object, ...]:
    """A dense mask and a dense bias, both read per head."""
    allowed = rng.random((shape.num_heads, shape.q_len, shape.kv_len)) < 0.7
    return qkv.Mask(allowed), qkv.Bias(rng.normal(size=allowed.shape))


def problem(name: str, dtype: str, lengths: tuple[int, int], *variants: object) -> Case:
    """Grouped heads, and sizes of rows that fill no vector."""
    shape = Shape((2,), 4, 2, *lengths, 72, 52)
    made = (lambda s, r: variants) if variants != (some_keys,) else some_keys
    return Case(f"{name} {dtype}", shape, made, q_offset="end", dtypes=(dtype,))


CASES = [
    problem("causal with slopes", "float32", (170, 330), qkv.Causal(), qkv.ALiBi()),
    problem("causal", "bfloat16", (170, 330), qkv.Causal()),
    problem("causal", "float16", (170, 330), qkv.Causal()),
    problem("window", "float64", (70, 330), qkv.SlidingWindow(90, 0), qkv.Softcap(9.0)),
    problem("dense", "float32", (70, 130), some_keys),
    problem("rotated", "float32", (40, 90), qkv.RoPE(), qkv.Sinks(np.arange(4.0)), qkv.Causal()),
    problem("dropped", "float32", (70, 130), qkv.Dropout(0.3, 11)),
    problem("decode", "float32", (1, 900), qkv.Causal(), qkv.ALiBi()),
    problem("decode", "bfloat16", (2, 900), qkv.Softcap(5.0)),
]
WITH_GRADIENTS = CASES[:5]
INSPECTED = [CASES[0], CASES[2]]


def results(case: Case) -> dict[str, tuple[np.ndarray, ...]]:
    """The arrays of each kind of result."""
    (dtype,) = case.dtypes
    call = case.build(dtype)
    asked = {**call.keywords, "backend": "cpu"}
    out, lse = qkv.attention(*call.arrays, *call.variants, return_lse=True, **asked)
    found = {"out": (out,), "lse": (lse,)}
    if case in WITH_GRADIENTS:
        given, pullback = qkv.vjp(*call.arrays, *call.variants, **asked)
        rng = np.random.default_rng(0)
        gradients = pullback(rng.normal(size=given.shape).astype(given.dtype))
        found["gradients"] = gradients.query, gradients.key, gradients.value
    if case in INSPECTED:
        record = qkv.inspect(*call.arrays, *call.variants, **asked)
        found["statistics"] = record.entropy, record.max_weight
        found["top"] = record.top(4)
        found["received"] = (record.received,)
    return found


def digests(case: Case) -> dict[str, str]:
    """The first half of the SHA-256 of each kind of result."""
    found = {}
    for kind, arrays in results(case).items():
        content = b"".join(array.tobytes() for array in arrays)
        found[f"{case.name}: {kind}"] = hashlib.sha256(content).hexdigest()[:32]
    return found


def record() -> None:
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    for isa in OF_X86:
        os.environ["QKV_ISA"] = isa + EMULATED if isa == "amx" else as_it_runs(isa)
        recorded[isa] = {}
        for case in CASES:
            recorded[isa].update(digests(case))
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record()
