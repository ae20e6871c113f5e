"""The inner loops of the matrix products on machines that are not here, read from their assembly.

A product loop holds one step along d or along keys: as many multiply-adds as the tile has vectors,
everything in registers. What LLVM spills would be loaded from or stored to the stack.
"""

import re
from dataclasses import replace
from functools import lru_cache

import llvmlite.binding as llvm
import ml_dtypes
import numpy as np
import pytest

from qkv.backends.cpu.backward import layout as backward_layout
from qkv.backends.cpu.backward.kernel import emit_backward
from qkv.backends.cpu.backward.layout import BackwardKey
from qkv.backends.cpu.bf16_pairs.kernel import emit_bf16_pairs
from qkv.backends.cpu.bf16_tiles.kernel import emit_bf16_tiles
from qkv.backends.cpu.compiler.compile import Module, parsed_for
from qkv.backends.cpu.decode import layout as decode_layout
from qkv.backends.cpu.decode.kernel import emit_decode
from qkv.backends.cpu.decode.layout import DecodeKey
from qkv.backends.cpu.forward import layout as forward_layout
from qkv.backends.cpu.forward.kernel import emit_forward
from qkv.backends.cpu.forward.layout import ForwardKey
from qkv.backends.cpu.machine.host import Host
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.passes.backward import backward_shape
from qkv.backends.cpu.plan.kernel_spec import kernel_spec
from qkv.backends.cpu.split_bf16.choice import split_shape
from qkv.backends.cpu.split_bf16.forward import emit_split_forward
from qkv.problem.building.check import check
from qkv.problem.spec import Spec

LINUX = "x86_64-unknown-linux-gnu"
ARM = "aarch64-unknown-linux-gnu"
APPLE = "arm64-apple-macosx"

MACHINES = {
    "znver5": (LINUX, "avx512"),
    "znver4": (LINUX, "avx512"),
    "sapphirerapids": (LINUX, "avx512"),
    "skylake-avx512": (LINUX, "avx512"),
    "haswell": (LINUX, "avx2"),
    "znver3": (LINUX, "avx2"),
    "x86-64": (LINUX, "sse"),
    "neoverse-v1": (ARM, "neon"),
    "apple-m1": (APPLE, "neon"),
}
FLOAT32 = {
    "avx512": r"vfmadd\w+ps\s.*%zmm",
    "avx2": r"vfmadd\w+ps\s.*%ymm",
    "sse": r"mulps\s",
    "neon": r"fmla(\.4s|\s+v\d+\.4s)",
}
"""A multiply-add of whole vectors; sse multiplies first."""

_LABEL = re.compile(r"^(\.?L\w+):")
_JUMP = re.compile(r"^\s+(j\w+|b|b\.\w+|cbn?z|tbn?z)\s.*?(\.?LB\w+)")
_STACK = re.compile(r"\(%[er]sp|\[sp\b|\bpush|\bcall|^bl\s")


@lru_cache(maxsize=32)
def assembly(triple: str, cpu: str, shape: TileShape, dtype: str) -> str:
    """The forward kernel without variants, for a processor by name."""
    key = ForwardKey(plain_spec(dtype), shape, 32, False, False, dtype, False)
    if shape.chunks:
        emit = emit_bf16_tiles if shape.terms == 1 else emit_split_forward
        return compiled(emit(key), triple, cpu)
    if shape.product != "elements":
        return compiled(emit_bf16_pairs(key), triple, cpu)
    return linked(emit_forward(key), forward_layout.shared_modules(key), triple, cpu)


def decoding(triple: str, cpu: str, isa: str, dtype: str) -> str:
    """The kernel for few queries without variants, all operands of one type."""
    shape = Host(cpu, "", isa).shape_of(plain_spec(dtype).compute_dtype)
    key = DecodeKey(plain_spec(dtype), shape, 32, (dtype,) * 3, (False, False), dtype, False)
    return linked(emit_decode(key), decode_layout.shared_modules(key), triple, cpu)


def linked(source: str, shared: tuple[Module, ...], triple: str, cpu: str) -> str:
    """A kernel, and the modules that it is linked with."""
    sources = [source, *(module.emit(*module.arguments) for module in shared)]
    return "\n".join(compiled(source, triple, cpu) for source in sources)


def plain_spec(dtype: str) -> Spec:
    array = np.zeros((1, 4, 4), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return kernel_spec(check(array, array, array, ()).spec)


def compiled(source: str, triple: str, cpu: str) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(triple)
    machine = target.create_target_machine(cpu=cpu, features="", opt=2, jit=True)
    return str(machine.emit_assembly(parsed_for(source, machine, triple)))


def innermost_loops(text: str) -> list[list[str]]:
    """Instructions from each label to a jump back to it, where no other label is between."""
    loops, label, body = [], "", []
    for line in text.splitlines():
        if found := _LABEL.match(line):
            label, body = found[1], []
        elif line.startswith("\t") and not line.startswith("\t."):
            body.append(line.strip())
            jump = _JUMP.match(line)
            if jump and jump[2] == label:
                loops.append(list(body))
    return loops


def straight_lines(text: str) -> list[list[str]]:
    """Instructions from each label to the next one."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if _LABEL.match(line):
            found.append([])
        elif line.startswith("\t") and not line.startswith("\t."):
            found[-1].append(line.strip())
    return found


def number_of(lines: list[str], instruction: str) -> int:
    return sum(line.startswith(instruction) for line in lines)


def product_loops(text: str, multiply_add: str, count: int) -> list[list[str]]:
    """Loops of `count` multiply-adds, which are a fifth of their instructions or more.

    A loop that subtracts is one of the softmax.
    """
    instruction = re.compile(multiply_add)
    return [
        loop
        for loop in innermost_loops(text)
        if sum(bool(instruction.match(line)) for line in loop) == count
        and len(loop) <= 5 * count
        and not number_of(loop, "subps")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cpu", MACHINES)
def test_float32_products_stay_in_registers(cpu) -> None:
    triple, isa = MACHINES[cpu]
    shape = Host(cpu, "", isa).shape
    loops = product_loops(
        assembly(triple, cpu, shape, "float32"), FLOAT32[isa], shape.vectors * shape.keys
    )
    assert len(loops) >= 2, "one for the scores, one for the output"
    for loop in loops:
        assert not [line for line in loop if _STACK.search(line)]


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["znver5", "znver4", "cooperlake", "sapphirerapids"])
def test_pairs_of_bfloat16_stay_in_registers(cpu) -> None:
    shape = Host(cpu, "", "avx512-bf16").bfloat16_shape
    text = assembly(LINUX, cpu, shape, "bfloat16")
    loops = product_loops(text, r"vdpbf16ps\s.*%zmm", shape.vectors * shape.keys)
    assert len(loops) == 2
    for loop in loops:
        assert not [line for line in loop if _STACK.search(line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("triple", "cpu", "instruction", "most"),
    [
        (ARM, "neoverse-v1", "bfmmla", 31),
        (ARM, "neoverse-v2", "bfmmla", 31),
        (ARM, "neoverse-n2", "bfmmla", 31),
        (APPLE, "apple-m2", "bfmmla", 31),
        (ARM, "cortex-x2", "bfdot", 38),
    ],
)
def test_products_of_bfloat16_stay_in_registers_on_arm(triple, cpu, instruction, most) -> None:
    """16 queries and 4 keys: 16 products of two rows by two, of 4 elements each. By pairs, which
    is for gradients alone, 24 products of 2 elements, 16 queries and 6 keys."""
    shape = Host(cpu, "", "neon-bf16").bfloat16_shape
    count = 4 * shape.keys
    if instruction == "bfdot":
        shape, count = replace(shape, quads=False, keys=6), 24
    text = assembly(triple, cpu, shape, "bfloat16")
    loops = product_loops(text, rf"{instruction}(\.|\s)", count)
    assert len(loops) == 2
    for loop in loops:
        assert len(loop) <= most
        assert not [line for line in loop if _STACK.search(line)]
    assert "bfcvtn" in text


def gradients(triple: str, cpu: str, isa: str, dtype: str) -> str:
    """The backward kernel without variants."""
    array = np.zeros((1, 64, 64), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    problem = check(array, array, array, ())
    shape = replace(backward_shape(problem, Host(cpu, "", isa)), q_blocks_per_task=1)
    key = BackwardKey(kernel_spec(problem.spec), shape, 32, False, "float32", dtype)
    shared = backward_layout.shared_modules(key, sums_rows=False)
    return linked(emit_backward(key), shared, triple, cpu)


@pytest.mark.slow
@pytest.mark.parametrize(("triple", "cpu"), [(ARM, "neoverse-v1"), (APPLE, "apple-m2")])
def test_gradients_of_bfloat16_on_arm(triple, cpu) -> None:
    """All five products are by BFMMLA: S, dP in two halves, dQ, and dK and dV by one function."""
    loops = product_loops(gradients(triple, cpu, "neon-bf16", "bfloat16"), r"bfmmla(\.|\s)", 16)
    # The last keys of dQ have a loop of their own, which checks that each of them exists.
    *loops, last = sorted(loops, key=len)
    assert len(loops) == 5
    for loop in (*loops, last):
        assert loop is last or len(loop) <= 33
        assert not [line for line in loop if _STACK.search(line)]


@pytest.mark.slow
@pytest.mark.parametrize(("triple", "cpu"), [(ARM, "neoverse-v1"), (APPLE, "apple-m1")])
def test_gradients_of_float32_on_arm(triple, cpu) -> None:
    """16 FMLA by a lane of a vector; no element is copied to all lanes (LD1R, DUP) before."""
    loops = product_loops(gradients(triple, cpu, "neon", "float32"), FLOAT32["neon"], 16)
    in_registers = [loop for loop in loops if len(loop) <= 26]
    assert len(in_registers) == 6, "S, dP in two halves, dQ in whole tiles and the last, dK and dV"
    for loop in in_registers:
        assert not [line for line in loop if _STACK.search(line)]
        assert number_of(loop, "ld1r") + number_of(loop, "dup") == 0


@pytest.mark.parametrize(("chunks", "value_tiles"), [(2, 4), (4, 8)])
def test_weights_of_bfloat16_are_computed_between_products(chunks, value_tiles) -> None:
    """A step has 32 keys of 16 queries, whose weights take five multiply-adds each."""
    shape = Host("sapphirerapids", "", "amx").bfloat16_shape
    shape = replace(shape, chunks=chunks, value_tiles=value_tiles, q_blocks_per_task=1)
    text = assembly(LINUX, "sapphirerapids", shape, "bfloat16")
    lines = [line for line in straight_lines(text) if number_of(line, "vfmadd") >= 32 * 5]
    assert len(lines) == 2, "one where all keys exist, and one for the last keys"
    for step in lines:
        assert number_of(step, "tdpbf16ps") == 2 * chunks + 4
        assert number_of(step, "vfmadd") == 32 * 5
        between = "".join("p" if "tdpbf16ps" in line else "m" for line in step if MIXED.match(line))
        longest = max(map(len, between.split("p")))
        assert longest <= 5 * 2 * -(-16 // (2 * chunks + 4)), "as many after each product"
    assert sum(bool(SPILLED.search(line)) for line in lines[0]) <= 4
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1


MIXED = re.compile(r"tdpbf16ps|vfmadd")
SPILLED = re.compile(r"%zmm.*\(%rsp|\(%rsp.*%zmm")
"""A vector, on the way to the stack or back; addresses may well be kept there."""


PARTS = [("float32", 6, 6, (3, 3)), ("float16", 4, 3, (2, 2))]
"""Products of parts for scores and for output, and parts of each factor."""


def parts_of_64(dtype: str) -> str:
    shape = split_shape(Host("sapphirerapids", "", "amx"), dtype)
    shape = replace(shape, chunks=2, value_tiles=4, q_blocks_per_task=1)
    return assembly(LINUX, "sapphirerapids", shape, dtype)


@pytest.mark.parametrize(("dtype", "scores", "values", "parts"), PARTS)
def test_products_of_parts_share_loaded_tiles(dtype, scores, values, parts) -> None:
    """A tile of K or V is loaded once for its products with 32 queries, those of Q or P once for
    neighbouring products; each step does all of one group's scores and of another's output."""
    text = parts_of_64(dtype)
    lines = [line for line in straight_lines(text) if number_of(line, "tdpbf16ps")]
    of_keys, of_values = 2 * 2 * 2 * scores, 2 * 4 * values
    assert {number_of(line, "tdpbf16ps") for line in lines} == {
        of_keys, of_values, of_keys + of_values,
    }  # fmt: skip
    for line in lines:
        tiles = number_of(line, "tdpbf16ps")
        has_keys, has_values = tiles != of_values, tiles != of_keys
        if of_keys == of_values:
            has_keys, has_values = (
                number_of(line, "tilezero") > 0,
                number_of(line, "tilestored") > 4,
            )
        blocks, sums = 4 * (has_keys + has_values), 8 * has_values
        assert number_of(line, "tileloaddt1") == parts[0] * blocks
        assert number_of(line, "tileloadd") == (parts[0] + 2 * parts[1]) * blocks + sums
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1


@pytest.mark.parametrize(("dtype", "scores", "values", "parts"), PARTS)
def test_weights_are_computed_between_products_of_parts(dtype, scores, values, parts) -> None:
    """A step has 32 keys of 32 queries, whose weights take six multiply-adds each."""
    weights = 32 * 2 * 6
    lines = straight_lines(parts_of_64(dtype))
    steps = [line for line in lines if number_of(line, "vfmadd") >= weights]
    of_keys, of_values = 2 * 2 * 2 * scores, 2 * 4 * values
    assert sorted(number_of(step, "tdpbf16ps") for step in steps) == sorted(
        [of_keys, of_keys + of_values, of_keys + of_values, of_values]
    ), "the first, one where all keys exist, one where the mask decides, and the last"
    for step in steps:
        products = number_of(step, "tdpbf16ps")
        between = "".join("p" if "tdpbf16ps" in line else "m" for line in step if MIXED.match(line))
        longest = max(map(len, between.split("p")))
        assert longest <= 6 * 2 * -(-32 // products), "as many after each product"
    stored = [re.sub("[^ps]", "", "".join(map(kind_of, step))) for step in steps]
    assert not any("sss" in order for order in stored), "sums of two tiles are stored at once"


def kind_of(line: str) -> str:
    return {"tdpbf16p": "p", "tilestor": "s"}.get(line[:8], "")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_of_parts_stay_in_registers(dtype) -> None:
    """Two keys at once, where weights are computed alone: each takes six multiply-adds."""
    loops = innermost_loops(parts_of_64(dtype))
    alone = [loop for loop in loops if number_of(loop, "vfmadd") == 2 * 6]
    assert alone
    for loop in alone:
        assert not [line for line in loop if SPILLED.search(line)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "cache"), [("znver4", "t1"), ("znver5", "t0"), ("sapphirerapids", "t0")]
)
def test_decoding_prefetches_rows_where_a_processor_needs_it(cpu, cache) -> None:
    triple, isa = MACHINES[cpu]
    text = decoding(triple, cpu, isa, "float32")
    assert set(re.findall(r"prefetch(\w+)", text)) == {cache}


def test_decoding_multiplies_pairs_of_bfloat16_as_they_are() -> None:
    """16 sums in a loop stay in registers, and no key is widened."""
    text = decoding(LINUX, "znver4", "avx512-bf16", "bfloat16")
    loops = product_loops(text, r"vdpbf16ps\s.*%zmm", 16)
    assert loops
    for loop in loops:
        assert number_of(loop, "vpmovzxwd") == 0
        assert not any("%zmm" in line and _STACK.search(line) for line in loop)


ON_ARM = [
    (ARM, "cortex-a57", "neon", "float32", "fmla", 0),
    (ARM, "neoverse-v1", "neon", "float32", "fmla", 0),
    (ARM, "neoverse-n2", "neon", "float64", "fmla", 0),
    (APPLE, "apple-m1", "neon", "bfloat16", "fmla", 1),
    (APPLE, "apple-m1", "neon-fhm", "float16", "fmlal2?", 0),
    (ARM, "neoverse-v1", "neon-bf16", "float16", "fmlal2?", 0),
    (ARM, "neoverse-v2", "neon-bf16", "bfloat16", "bfdot", 0),
    (APPLE, "apple-m2", "neon-bf16", "bfloat16", "bfdot", 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("triple", "cpu", "isa", "dtype", "multiply_add", "conversions"), ON_ARM)
def test_decoding_on_arm(triple, cpu, isa, dtype, multiply_add, conversions) -> None:
    """16 products of 4, 2 or 1 rows of Q with 4, 8 or 16 keys, whose vectors are loaded, and
    converted if need be, once; besides that, a loop has at most 6 instructions. FMLAL and FMLAL2
    multiply half a vector of float16 each."""
    count = 16 if multiply_add != "fmlal2?" else 32
    loops = product_loops(decoding(triple, cpu, isa, dtype), rf"{multiply_add}(\.|\s)", count)
    # The last elements of a row are loaded under a mask (ld1), or in a function (bl).
    loops = [loop for loop in loops if not number_of(loop, "ld1") + number_of(loop, "bl\t")]
    of_rows = {rows + 16 // rows: 16 // rows for rows in (4, 2, 1)}
    assert sorted(number_of(loop, "ld") for loop in loops) == sorted(of_rows)
    for loop in loops:
        loads = number_of(loop, "ld")
        assert number_of(loop, "shll") == conversions * of_rows[loads]
        assert number_of(loop, "fcvtl") == 0
        assert len(loop) <= count + loads + conversions * of_rows[loads] + 6
        assert not [line for line in loop if _STACK.search(line)]


def test_a_tile_too_large_is_seen() -> None:
    """40 sums do not fit 32 registers: what this file looks for is there to be found."""
    shape = replace(Host("znver5", "", "avx512").shape, vectors=5, keys=8)
    loops = product_loops(assembly(LINUX, "znver5", shape, "float32"), FLOAT32["avx512"], 40)
    assert loops
    assert any(_STACK.search(line) for loop in loops for line in loop)
