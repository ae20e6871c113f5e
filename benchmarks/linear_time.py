"""Time and memory of the linear-time mechanisms, and their speed beside transformers.

    python -m benchmarks.linear_time scaling        # 8k to 131k tokens, each in its own process
    python -m benchmarks.linear_time transformers   # Mamba and RWKV-4 at 8k tokens

Times are of the processor, on one thread, the best of several runs: on a machine that others use,
they say more than the clock. Memory is the peak of what NumPy holds during a call, its output
included. Results are checked before anything is timed.

`scaling` lets glibc keep the memory of large arrays between two calls (`ALLOCATOR`). By default it
gives back what is larger than 32 MB, such as the output of 131,072 tokens. The system then clears
64 MB of pages in each call, which for the quickest mechanisms takes as long as all arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "QKV_NUM_THREADS"):
    os.environ[variable] = "1"

# The number of threads is read when NumPy is imported.
import numpy as np  # noqa: E402

from qkv.mechanisms import MECHANISMS, Mechanism  # noqa: E402

WIDTH = 64
LENGTHS = [8192 << i for i in range(5)]
REPEATS = 5
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""The environment in which glibc gives no memory back, in bytes."""
LIMIT = 2.2
"""What time and memory may grow by when the number of tokens doubles."""

OPTIONS: dict[str, dict[str, Any]] = {
    "linear": {"num_heads": 1, "causal": True},
    "performer": {"num_heads": 1, "num_features": 64, "causal": True},
    "linformer": {"num_heads": 1, "num_mixtures": 64},
    "rwkv4": {},
    "rwkv6": {"num_heads": 1},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 2, "state_size": 64},
    "gated-delta": {"num_heads": 1},
}


def best(call: Callable[[], Any]) -> float:
    """Seconds of the processor, the least of several runs."""
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def measured(name: str, n: int) -> dict[str, float]:
    """Seconds and MiB of one mechanism in this process."""
    options = OPTIONS[name] | ({"max_len": n} if name == "linformer" else {})
    make: Callable[..., Mechanism] = MECHANISMS[name]
    mechanism = make(WIDTH, **options)
    mechanism.weights = {key: np.float32(array) for key, array in mechanism.weights.items()}
    x = np.random.default_rng(0).normal(size=(n, WIDTH)).astype(np.float32)
    mechanism(x[:1024])
    seconds = best(lambda: mechanism(x))
    tracemalloc.start()
    mechanism(x)
    _, peak = tracemalloc.get_traced_memory()
    return {"seconds": seconds, "mebibytes": peak / 2**20}


def scaling(names: list[str]) -> bool:
    """Print a row for each mechanism; whether all growth is within the limit."""
    print(f"{'':12}" + "".join(f"{n:>18}" for n in LENGTHS) + "   growth of a doubling, at most")
    fits = True
    for name in names:
        rows = []
        for n in LENGTHS:
            command = [sys.executable, __file__, "one", name, str(n)]
            found = subprocess.check_output(command, env={**os.environ, **ALLOCATOR})
            rows.append(json.loads(found))
        growth = [
            max(b[kind] / a[kind] for a, b in pairwise(rows)) for kind in ("seconds", "mebibytes")
        ]
        fits &= max(growth) <= LIMIT
        cells = "".join(f"{r['seconds']:9.3f} s{r['mebibytes']:5.0f} MB" for r in rows)
        print(f"{name:12}{cells}   time {growth[0]:.2f}, memory {growth[1]:.2f}", flush=True)
    return fits


def beside_transformers(widths: list[int], n: int = 8192) -> bool:
    """Print how many times as long transformers' own path takes; whether all are 5 or more."""
    import torch
    from transformers import MambaConfig, RwkvConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer
    from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

    torch.set_num_threads(1)
    enough = True
    for width in widths:
        torch.manual_seed(0)
        rwkv = RwkvSelfAttention(
            RwkvConfig(hidden_size=width, attention_hidden_size=width, num_hidden_layers=1)
        )
        for parameter in rwkv.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        mamba = MambaMixer(MambaConfig(hidden_size=width, num_hidden_layers=1), 0)
        x = torch.randn(1, n, width)
        for name, module in (("rwkv4", rwkv), ("mamba", mamba.eval())):
            mechanism = MECHANISMS[name].from_transformers(module)  # type: ignore[attr-defined]
            with torch.no_grad():
                theirs, ours = module(x), mechanism(x)
                theirs = theirs[0] if isinstance(theirs, tuple) else theirs
                error = float((ours - theirs).abs().max() / theirs.abs().max())
                if error > 1e-4:
                    raise SystemExit(f"{name}, width {width}: relative difference {error:.1e}")
                times = []
                for _ in range(REPEATS):  # in turns, so that both meet the same neighbours
                    start = time.process_time()
                    module(x)
                    middle = time.process_time()
                    mechanism(x)
                    times.append((middle - start, time.process_time() - middle))
            theirs_best, ours_best = (min(column) for column in zip(*times, strict=True))
            ratio = theirs_best / ours_best
            enough &= ratio >= 5
            print(
                f"{name:6} width {width:4}, {n} tokens: transformers {theirs_best:7.3f} s, "
                f"qkv {ours_best:6.3f} s, {ratio:5.1f} times; difference {error:.0e}",
                flush=True,
            )
    return enough


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["scaling", "transformers", "one"])
    parser.add_argument("arguments", nargs="*", help="names of mechanisms, or widths")
    given = parser.parse_args()
    if given.what == "one":
        print(json.dumps(measured(given.arguments[0], int(given.arguments[1]))))
        return 0
    if given.what == "scaling":
        return 0 if scaling(given.arguments or list(OPTIONS)) else 1
    return 0 if beside_transformers([int(w) for w in given.arguments] or [64, 128, 256]) else 1


if __name__ == "__main__":
    sys.exit(main())
