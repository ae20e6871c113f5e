"""What the kernels of the Triton backend become on GPUs, found without one.

    python tools/triton_kernels.py --capability 80 90 --form causal six --head-dim 64 128

compiles every kernel of real calls for the cards of each compute capability, and shows its tile,
registers and bytes that do not fit into them, for each thread, shared memory, and instructions that
multiply matrices. Kernels marked with * are those that run again where numbers are not finite.
`--json` writes the same for other programs. `TRITON_INTERPRET` must not be set.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import qkv
import qkv.backends.torch.triton as backend
from qkv.backends.torch.triton import launches
from qkv.backends.torch.triton.blocks import LARGE

HEADER = (
    "card   form     dtype     dim kernel                tile                         "
    "registers spilled    shared instructions"
)
LENGTH, HEADS, KV_HEADS, BATCH = 1024, 4, 2, 2

Compiled = list[tuple[str, dict[str, Any], Any]]
"""Name, options and result of each kernel."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel. `spilled` are bytes of a thread that registers do not hold."""

    capability: int
    form: str
    dtype: str
    head_dim: int
    kernel: str
    selects: bool
    tile: str
    registers: int
    spilled: int
    shared_bytes: int
    matrix_instructions: dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--form", nargs="+", choices=forms(), default=list(forms()))
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [
        row
        for capability in given.capability
        for dtype in given.dtype
        for head_dim in given.head_dim
        for form in given.form
        for row in compiled(capability, form, dtype, head_dim)
    ]
    print(json.dumps([asdict(row) for row in rows]) if given.json else table(rows))


def forms() -> dict[str, Callable[[], list[Any]]]:
    """Variants of calls, by name."""
    draw = np.random.default_rng(0)
    slopes = np.geomspace(0.5, 0.01, HEADS).astype(np.float32)

    def bias() -> Any:
        return qkv.Bias(draw.normal(size=(HEADS, LENGTH, LENGTH)).astype(np.float32))

    def six() -> list[Any]:
        segments = np.sort(draw.integers(0, 3, (BATCH, LENGTH)), -1)
        return [
            qkv.Causal(), qkv.ALiBi(slopes), qkv.Softcap(20.0), qkv.SlidingWindow(900, 0), bias(),
            qkv.Segments(segments),
        ]  # fmt: skip

    return {
        "plain": list,
        "causal": lambda: [qkv.Causal()],
        "alibi": lambda: [qkv.Causal(), qkv.ALiBi(slopes)],
        "softcap": lambda: [qkv.Causal(), qkv.Softcap(20.0)],
        "mask": lambda: [qkv.Mask(draw.random((LENGTH, LENGTH)) < 0.5)],
        "bias": lambda: [bias()],
        "six": six,
        "dropout": lambda: [qkv.Causal(), qkv.Dropout(0.1, seed=3)],
        "rope": lambda: [qkv.Causal(), qkv.RoPE()],
        "decode": lambda: [qkv.Causal("end")],
    }


def compiled(capability: int, form: str, dtype: str, head_dim: int) -> list[Row]:
    """A row for each kernel of one call; "decode" has one query and no gradients."""
    found: Compiled = []
    compile_for(capability, found)
    options: Any = {"dtype": getattr(torch, dtype), "requires_grad": form != "decode"}
    q_len = 1 if form == "decode" else LENGTH
    query = torch.zeros(BATCH, HEADS, q_len, head_dim, **options)
    key, value = (torch.zeros(BATCH, KV_HEADS, LENGTH, head_dim, **options) for _ in range(2))
    # Without lse, plain and causal calls have torch's own kernels.
    out, _ = qkv.attention(query, key, value, *forms()[form](), backend="triton", return_lse=True)
    if form != "decode":
        out.sum().backward()
    return [
        Row(
            capability, form, dtype, head_dim, name, bool(given.get("selects")), tile_of(given),
            *registers_and_spilled(kernel.asm["cubin"]), kernel.metadata.shared,
            matrix_instructions(kernel.asm["ptx"]),
        )
        for name, given, kernel in found
    ]  # fmt: skip


def compile_for(capability: int, found: Compiled) -> None:
    """Let launches compile for such a card and add to `found`, and not run."""
    run = _RUN

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        found.append((kernel.__name__, given, run(kernel, *args, grid=grid, warmup=True, **given)))

    JITFunction.run = note
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
            get_active_torch_device=lambda: torch.device("cpu"),
        )
    )
    backend._wants_interpreter = lambda: True  # Else it refuses tensors that are on no GPU.
    vars(launches)["is_large"] = lambda device: capability // 10 in LARGE


_RUN = JITFunction.run


def tile_of(given: dict[str, Any]) -> str:
    if "BLOCK_Q" not in given:
        return ""
    return (
        f"{given['BLOCK_Q']} x {given['BLOCK_KV']}, {given['num_warps']} warps, "
        f"{given['stages']} stages"
    )


def registers_and_spilled(cubin: bytes) -> tuple[int, int]:
    """What `cuobjdump`, which comes with Triton, reads from the code of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(re.findall(rf"{name}:(\d+)", text)[0]) for name in ("REG", "STACK")}
    return used["REG"], used["STACK"]


def matrix_instructions(ptx: str) -> dict[str, int]:
    counts = {name: ptx.count(name) for name in ("wgmma.mma_async", "tcgen05.mma", "mma.sync")}
    return {name: count for name, count in counts.items() if count}


def table(rows: list[Row]) -> str:
    lines = [HEADER]
    for row in rows:
        instructions = ", ".join(f"{n} {name}" for name, n in row.matrix_instructions.items())
        lines.append(
            f"sm_{row.capability:<3} {row.form:8} {row.dtype:8} {row.head_dim:4} "
            f"{row.kernel + '*' * row.selects:21} {row.tile:28} {row.registers:9} "
            f"{row.spilled:7} {row.shared_bytes / 1024:5.1f} KiB {instructions}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
