"""Instructions for bfloat16 and int8, emulated and real, against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from forced import both_ways
from qkv.backends.cpu.compiler.compile import EmitFunction, Kernel, build
from qkv.backends.cpu.emit.emitter import INT64, POINTER, Emitter
from qkv.backends.cpu.machine.host import Host, host
from qkv.backends.cpu.products.bfloat16 import (
    multiply_add_pairs,
    multiply_add_quads,
    round_to_bfloat16,
)
from qkv.backends.cpu.products.layout import TILE_BYTES, TILE_SIZE
from qkv.backends.cpu.products.tile_instructions import configure, release, tiles_of

Array = np.ndarray[Any, Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SIXTEEN = 16

# The definition


UNIT = 300
"""Numbers are counted in units of 2^-300: products of two bfloat16 are whole numbers of them."""
LEAST = 1 << (UNIT - 126)
"""The least normal number."""


def whole(x: float) -> int:
    """A finite float32 or bfloat16 in units of 2^-300; subnormal numbers are taken for 0."""
    numerator, denominator = float(x).as_integer_ratio()
    found = (numerator << UNIT) // denominator
    return found if abs(found) >= LEAST else 0


def rounded(x: int) -> float:
    """Round to 24 digits, ties to even; then subnormal numbers to 0, and large ones to infinity."""
    drop = max(0, abs(x).bit_length() - 24)
    kept, rest = divmod(abs(x), 1 << drop)
    half = 1 << drop >> 1
    kept += drop > 0 and (rest > half or (rest == half and kept % 2 == 1))
    size = kept << drop
    if size < LEAST:
        return 0.0
    found = np.inf if size >= 1 << (UNIT + 128) else float(size >> (UNIT - 149)) * 2.0**-149
    return found if x > 0 else -found


def fma(x: float, y: float, z: float) -> float:
    """x * y + z, rounded once. What is not finite is as in float64, where nothing overflows."""
    if not np.isfinite([x, y, z]).all():
        normal = [0.0 if abs(v) < 2.0**-126 else v for v in map(float, (x, y, z))]
        with np.errstate(invalid="ignore"):
            return float(np.float64(normal[0]) * normal[1] + normal[2])
    return rounded((whole(x) * whole(y) >> UNIT) + whole(z))


def tile_product(a: Array, b: Array, c: Array) -> Array:
    """TDPBF16PS: sums over the first and the second elements of all pairs, then both, then C."""
    out = c.copy()
    for m, n in np.ndindex(c.shape):
        even = odd = 0.0
        for p in range(SIXTEEN):
            even = fma(a[m, 2 * p], b[p, 2 * n], even)
            odd = fma(a[m, 2 * p + 1], b[p, 2 * n + 1], odd)
        out[m, n] = fma(1.0, fma(1.0, even, odd), c[m, n])
    return out


def pair_product(a: Array, b: Array, c: Array) -> Array:
    """VDPBF16PS for each row of lanes: the second elements first."""
    out = c.copy()
    for m, n in np.ndindex(c.shape):
        odd = fma(a[m, 2 * n + 1], b[m, 2 * n + 1], c[m, n])
        out[m, n] = fma(a[m, 2 * n], b[m, 2 * n], odd)
    return out


def to_odd(x: int) -> float:
    """Round to 24 digits: what is not exact becomes the neighbour with an odd last digit."""
    drop = max(0, abs(x).bit_length() - 24)
    kept, rest = divmod(abs(x), 1 << drop)
    return rounded((kept | (rest > 0)) << drop) * (1 if x > 0 else -1)


def add_to_odd(x: float, y: float) -> float:
    return to_odd(whole(x) + whole(y)) if np.isfinite([x, y]).all() else fma(1.0, x, y)


def bfdot(a: Array, b: Array, c: Array) -> Array:
    """BFDOT for each row of lanes: both products, which are exact, then the sum before."""
    out = c.copy()
    for m, n in np.ndindex(c.shape):
        even, odd = (fma(a[m, i], b[m, i], 0.0) for i in (2 * n, 2 * n + 1))
        out[m, n] = add_to_odd(c[m, n], add_to_odd(even, odd))
    return out


def bfmmla(a: Array, b: Array, c: Array) -> Array:
    """BFMMLA for each row of lanes: in every four, 2 x 4 by 4 x 2 elements, two pairs in order."""
    out = c.copy()
    for m, n in np.ndindex(c.shape):
        first, (i, j) = n // 4 * 8, divmod(n % 4, 2)
        for pair in (first, first + 2):
            left, right = (x[m : m + 1, pair + 4 * k :][:, :2] for x, k in ((a, i), (b, j)))
            out[m, n] = bfdot(left, right, out[m : m + 1, n : n + 1])[0, 0]
    return out


# What runs


def emit(instruction: str, emulated: bool, pairs_by: str) -> str:
    """A job on two tiles of bfloat16 and one of float32, which gets the result."""
    e = Emitter("instructions", SIXTEEN, emulated=emulated, pairs_by=pairs_by)
    with e.function("job", [POINTER, INT64], public=True) as (_, (memory, _worker)):
        a, b, c = (e.at(memory, n * TILE_SIZE) for n in range(3))
        if instruction in ("tiles", "byte tiles"):
            row = e.index(TILE_BYTES)
            configure(e)
            tiles = tiles_of(e)
            for tile, place in ((5, a), (7, b), (2, c)):
                tiles.load(tile, place, row)
            if instruction == "tiles":
                tiles.multiply_add(2, 5, 7)
            else:
                tiles.multiply_add_bytes(2, 5, 7)
            tiles.store(2, c, row)
            release(e)
        else:
            for offset in range(0, TILE_SIZE, TILE_BYTES):
                x, y, total = (e.load_vector(e.at(place, offset)) for place in (a, b, c))
                if instruction in ("pairs", "bfdot"):
                    found = multiply_add_pairs(e, x, y, total)
                elif instruction == "bfmmla":
                    found = multiply_add_quads(e, x, y, total)
                else:
                    found = round_to_bfloat16(e, e.as_bits(x), e.as_bits(y))
                e.store(found, e.at(c, offset), TILE_BYTES)
    return str(e.module)


@cache
def kernel_of(instruction: str, here: Host) -> Kernel:
    shape = here.bfloat16_shape
    pairs_by = shape.pairs_by if shape else "vdpbf16ps"
    return Kernel(
        build(
            EmitFunction(__name__, "emit"),
            (instruction, here.emulated_on is not None, pairs_by),
            here,
        )
    )


def run(instruction: str, a: Array, b: Array, c: Array) -> Array:
    memory = np.zeros(3 * TILE_SIZE + TILE_BYTES, np.uint8)
    memory = memory[-memory.ctypes.data % TILE_BYTES :][: 3 * TILE_SIZE]
    memory[:] = np.concatenate([np.ascontiguousarray(x).view(np.uint8).ravel() for x in (a, b, c)])
    kernel_of(instruction, host())._job(memory.ctypes.data, 0)
    return memory[2 * TILE_SIZE :].copy()


@pytest.fixture(params=[*both_ways("amx"), *both_ways("avx512-bf16"), *both_ways("neon-bf16")])
def instruction(request, monkeypatch) -> str:
    """The name of what multiplies; the set, real or emulated, is forced."""
    monkeypatch.setenv("QKV_ISA", request.param)
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    return {"amx": "tiles", "avx512-bf16": "pairs", "neon-bf16": "bfdot"}[host().kernels]


DEFINITIONS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "tiles": tile_product,
    "pairs": pair_product,
    "bfdot": bfdot,
    "bfmmla": bfmmla,
}


def random(seed: int, low: int, high: int) -> tuple[Array, Array, Array]:
    """A, B and C with exponents of base 2 in a range."""
    rng = np.random.default_rng(seed)

    def draw(columns: int) -> Array:
        size = (SIXTEEN, columns)
        return rng.normal(size=size) * 2.0 ** rng.integers(low, high, size)

    return draw(32).astype(BFLOAT16), draw(32).astype(BFLOAT16), draw(16).astype(np.float32)


def require_same(instruction: str, arrays: tuple[Array, Array, Array], *, exact: bool) -> None:
    """The same bits but for the payloads of NaN; else within a rounding of each product.

    The order of additions is documented, but a processor may round inside less often.
    """
    found = run(instruction, *arrays).view(np.float32).reshape(SIXTEEN, SIXTEEN)
    expected = DEFINITIONS[instruction](*arrays)
    if exact:
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        seen = ~np.isnan(expected)
        np.testing.assert_array_equal(np.where(seen, found, 0), np.where(seen, expected, 0))
        return
    a, b, c = (np.abs(x.astype(float)) for x in arrays)
    if instruction == "tiles":
        pairs = a.reshape(16, 16, 2), b.reshape(16, 16, 2)
        size = c + np.einsum("mpi,pni->mn", *pairs)
    else:
        size = c + (a * b).reshape(16, 16, 2).sum(-1)
    assert (np.abs(found.astype(float) - expected) <= 2.0**-24 * 34 * size).all()


@pytest.mark.parametrize(("low", "high"), [(-3, 4), (-40, 41)])
def test_products(instruction, low, high) -> None:
    emulated = host().emulated_on is not None
    require_same(instruction, random(0, low, high), exact=emulated)


def alone(a: float, b: float, c: float, second: bool = False) -> tuple[Array, Array, Array]:
    """One product and a sum, in each place: its order does not matter."""
    left, right = np.zeros((2, 16, 32), BFLOAT16)
    left[:, int(second)] = a
    right[0, int(second) :: 2] = b
    return left, right, np.full((16, 16), c, np.float32)


TINY, NORMAL = 2.0**-130, 2.0**-126
SPECIAL = {
    "subnormal left factor": (TINY, 2.0**100, 0.0, 0.0),
    "subnormal right factor": (2.0**100, -TINY, 1.0, 1.0),
    "subnormal sum before": (0.0, 0.0, 2.0**-140, 0.0),
    "subnormal sum before, of which a normal one would be made": (1.0, NORMAL, 2.0**-128, NORMAL),
    "subnormal product": (2.0**-70, 2.0**-70, 0.0, 0.0),
    "subnormal difference": (1.0, NORMAL, -1.5 * NORMAL, 0.0),
    "normal difference": (1.0, 4 * NORMAL, -2 * NORMAL, 2 * NORMAL),
    "subnormal times infinity": (TINY, np.inf, 0.0, np.nan),
    "zero times infinity": (0.0, np.inf, 0.0, np.nan),
    "infinity": (2.0, -np.inf, 1.0, -np.inf),
    "infinities": (2.0, -np.inf, np.inf, np.nan),
    "NaN": (np.nan, 0.0, 1.0, np.nan),
    "NaN before": (1.0, 1.0, np.nan, np.nan),
    "overflow": (2.0**127, 2.0, 1.0, np.inf),
    "rounded to infinity": (2.0**104, 0.5, np.finfo(np.float32).max, np.inf),
    "rounded down to the largest": (2.0**102, 0.5, np.finfo(np.float32).max, 3.4028235e38),
    "tie to even": (2.0**-24, 1.0, 1.0, 1.0),
    "tie to even, upwards": (2.0**-24, 1.0, 1 + 2.0**-23, 1 + 2.0**-22),
}
TO_ODD = {
    "rounded to infinity": np.finfo(np.float32).max,
    "tie to even": 1 + 2.0**-23,
    "tie to even, upwards": 1 + 2.0**-23,
}
"""Where BFDOT rounds to the neighbour whose last digit is odd."""


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_subnormal_or_not_finite(instruction, name, second) -> None:
    """The answer is known without the definition, which is asked for it too."""
    a, b, c, expected = SPECIAL[name]
    if instruction == "bfdot":
        expected = TO_ODD.get(name, expected)
    arrays = alone(a, b, c, second)
    found = run(instruction, *arrays).view(np.float32).reshape(16, 16)
    places = slice(None) if instruction == "tiles" else (0, 0)
    np.testing.assert_array_equal(found[places], np.float32(expected))
    x, y, total = arrays
    defined = DEFINITIONS[instruction](x, y, total[:1, :1])
    np.testing.assert_array_equal(defined, np.float32(expected))


def test_numbers_near_the_least(instruction) -> None:
    """Sums of products around 2^-126, of which some are subnormal."""
    emulated = host().emulated_on is not None
    a, b, c = random(1, -66, -60)
    arrays = a, b, c * np.float32(2.0**-63)
    expected = DEFINITIONS[instruction](*arrays)
    assert (expected == 0).any() or instruction == "pairs"
    found = run(instruction, *arrays).view(np.float32).reshape(16, 16)
    assert (np.abs(found[found != 0]) >= np.float32(NORMAL)).all()
    if emulated:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("isa", both_ways("neon-bf16"))
def test_two_rows_by_two(isa, monkeypatch) -> None:
    """BFMMLA, for numbers of all sizes: as the definition, on any machine."""
    monkeypatch.setenv("QKV_ISA", isa)
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    for seed, (low, high) in enumerate([(-3, 4), (-40, 41), (-66, -60)]):
        a, b, c = random(seed, low, high)
        c *= np.float32(2.0 ** (low if low < -60 else 0))
        require_same("bfmmla", (a, b, c), exact=True)
    a[0, ::5], b[1, ::3], c[2, ::4] = np.inf, np.nan, -np.inf
    require_same("bfmmla", (a, b, c), exact=True)


@pytest.mark.parametrize("isa", both_ways("amx"))
def test_products_of_bytes(isa, monkeypatch) -> None:
    """TDPBSSD, against a product of whole numbers; sums beyond 32 bits wrap around."""
    monkeypatch.setenv("QKV_ISA", isa)
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    rng = np.random.default_rng(0)
    a, b = rng.integers(-128, 128, (2, 16, 64), np.int8)
    c = rng.integers(-(2**31), 2**31, (16, 16), np.int32)
    a[0], b[:, :4], c[0] = -128, -128, 2**31 - 1
    right = b.reshape(16, 16, 4).swapaxes(1, 2).reshape(64, 16).astype(np.int64)
    found = run("byte tiles", a, b, c).view(np.int32).reshape(16, 16)
    np.testing.assert_array_equal(found, (c + a.astype(np.int64) @ right).astype(np.int32))


@pytest.mark.parametrize("isa", [*both_ways("avx512-bf16"), *both_ways("neon-bf16")])
def test_rounding(isa, monkeypatch) -> None:
    """ml_dtypes rounds in the same way; VCVTNE2PS2BF16 makes zeros of subnormal numbers."""
    monkeypatch.setenv("QKV_ISA", isa)
    monkeypatch.setenv("QKV_CACHE_DIR", "")
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (2, 16, 16), np.uint32)
    bits[:, :2] = bits[:, :2] & 0xFFFF0000 | 0x8000  # ties
    bits[0, 2] = 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7FC00001, *[0x7F800001] * 12
    bits[1, 2] = 0, 0x80000000, 1, 0x807FFFFF, 0x00800000, *[0x007FFFFF] * 11
    first, second = bits.view(np.float32)
    found = run("rounding", first, second, np.zeros((16, 16), np.float32)).view(BFLOAT16)
    given = np.concatenate([first, second], axis=1)
    normal = np.where(np.abs(given) < NORMAL, np.copysign(np.float32(0), given), given)
    if isa.startswith("neon"):
        normal = given
    with np.errstate(invalid="ignore"):
        expected = normal.astype(BFLOAT16).ravel()
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])
