"""qkv beside torch on a GPU: its Triton kernels, SDPA and FlexAttention.

    python -m benchmarks.gpu                  # 4,096 and 16,384 tokens in bfloat16
    python -m benchmarks.gpu --rows causal alibi --tokens 8192 --dtype float16

Every result is compared with qkv in float64 on the processor, for the first and the last queries
of a head, before anything is timed. Times are medians of CUDA events, contenders in turns, forward
and with gradients. A ratio above 1 says that qkv is faster. Where qkv calls torch's own kernel,
"kernels" are those of Triton, which a call with lse gets.

`--device cpu --tokens 128` runs the same in Triton's interpreter, to see that everything fits; set
TRITON_INTERPRET=1. Its times say nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import qkv

HEADS, KV_HEADS = 16, 4
WINDOW, CAP = 1024, 30.0
REPEATS = 15
CHECKED_ROWS = 4
"""Queries at each end of the first head whose output is compared."""


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of attention: variants of some heads, and what FlexAttention calls them."""

    variants: Callable[[int, Tensor], Sequence[Any]]
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None


def slopes(heads: int) -> np.ndarray[Any, Any]:
    return np.asarray(2.0 ** (-8 * np.arange(1, HEADS + 1) / HEADS), np.float32)[:heads]


def is_causal(_b: Any, _h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def is_in_window(_b: Any, _h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv <= WINDOW)


def with_alibi(score: Any, _b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score - torch.exp2(-8 * (h + 1) / HEADS) * (q - kv).abs()


def with_cap(score: Any, *_: Any) -> Any:
    return CAP * torch.tanh(score / CAP)


ROWS = {
    "plain": Row(lambda _heads, _ids: ()),
    "causal": Row(lambda _heads, _ids: (qkv.Causal("end"),), mask_mod=is_causal),
    "alibi": Row(
        lambda heads, _ids: (qkv.Causal("end"), qkv.ALiBi(slopes(heads))), with_alibi, is_causal
    ),
    "softcap": Row(lambda _heads, _ids: (qkv.Causal("end"), qkv.Softcap(CAP)), with_cap, is_causal),
    "window": Row(
        lambda _heads, _ids: (qkv.Causal("end"), qkv.SlidingWindow(WINDOW, 0)),
        mask_mod=is_in_window,
    ),
    "segments": Row(lambda _heads, ids: (qkv.Segments(ids),)),
}


def contenders(row: Row, tensors: Sequence[Tensor], ids: Tensor) -> dict[str, Callable[[], Tensor]]:
    """A call of each library that has one for this row."""
    query, key, value = tensors
    own = partial(qkv.attention, query, key, value, *row.variants(HEADS, ids), backend="triton")
    calls: dict[str, Callable[[], Tensor]] = {"qkv": own}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if row.score_mod is None and row.mask_mod in (None, is_causal) and row is not ROWS["segments"]:
        calls["sdpa"] = partial(
            sdpa, query, key, value, is_causal=row.mask_mod is not None, enable_gqa=True
        )
        calls["kernels"] = lambda: own(return_lse=True)[0]
    if query.device.type == "cuda":
        length = query.shape[-2]
        mask_mod = row.mask_mod
        if row is ROWS["segments"]:

            def mask_mod(_b: Any, _h: Any, q: Any, kv: Any) -> Any:
                return ids[q] == ids[kv]

        mask = mask_mod and create_block_mask(mask_mod, None, None, length, length, query.device)
        compiled = torch.compile(flex_attention)
        calls["flex"] = lambda: compiled(
            query, key, value, score_mod=row.score_mod, block_mask=mask, enable_gqa=True
        )
    return calls


def check(name: str, out: Tensor, row: Row, tensors: Sequence[Tensor], ids: Tensor) -> None:
    """Raise if the first head is further off than the dtype explains."""
    query, key, value = (t.detach()[:1, :1].double().cpu() for t in tensors)
    length = query.shape[-2]
    for first in (0, length - CHECKED_ROWS):
        rows = slice(first, first + CHECKED_ROWS)
        last = first + CHECKED_ROWS
        variants = row.variants(1, ids.cpu())
        seen = slice(0, last if row.mask_mod else length)
        if row is ROWS["segments"]:
            variants = (qkv.Mask((ids[rows, None] == ids).cpu()),)
        wanted = qkv.attention(query[:, :, rows], key[:, :, seen], value[:, :, seen], *variants)
        error = (out.detach()[:1, :1, rows].double().cpu() - wanted).abs().max().item()
        allowed = 4 * torch.finfo(out.dtype).eps * max(1.0, wanted.abs().max().item())
        if error > allowed:
            raise SystemExit(f"{name} is {error:.3g} off, allowed is {allowed:.3g}.")


def milliseconds(call: Callable[[], Any], device: str) -> float:
    """Time of one call, by the device's own clock where it has one."""
    if device != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    call()
    end_event.record()
    torch.cuda.synchronize()
    return float(start_event.elapsed_time(end_event))


def medians(calls: dict[str, Callable[[], Any]], device: str, repeats: int) -> dict[str, float]:
    """The median of each call; they take turns, after two runs that are not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            taken = milliseconds(call, device)
            if turn >= 2:
                times[name].append(taken)
    return {name: float(np.median(taken)) for name, taken in times.items()}


def with_gradients(call: Callable[[], Tensor], cotangent: Tensor, inputs: Sequence[Tensor]) -> Any:
    return torch.autograd.grad(call(), inputs, cotangent)


def run(name: str, tokens: int, head_dim: int, args: argparse.Namespace) -> None:
    """Check and time one row, and print a line for each pass."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    tensors = [
        torch.randn(1, heads, tokens, head_dim, generator=generator)
        .to(args.device, dtype)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    ids = (torch.arange(tokens) * 3 // tokens).to(args.device)
    row = ROWS[name]
    calls = contenders(row, tensors, ids)
    for contender, call in calls.items():
        check(f"{contender}, {name}", call(), row, tensors, ids)
    cotangent = torch.randn(tensors[0].shape, generator=generator).to(args.device, dtype)
    passes: dict[str, dict[str, Callable[[], Any]]] = {
        "forward": {c: torch.no_grad()(call) for c, call in calls.items()},
        "gradients": {
            c: partial(with_gradients, call, cotangent, tensors) for c, call in calls.items()
        },
    }
    for what, timed in passes.items():
        found = medians(timed, args.device, args.repeats)
        ratios = " ".join(
            f"{other} {found[other]:8.3f} ms ({found[other] / found['qkv']:.2f})"
            for other in found
            if other != "qkv"
        )
        print(
            f"{name:9s} {tokens:6d} x {head_dim:3d} {what:9s} qkv {found['qkv']:8.3f} ms  {ratios}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "torch sees no GPU. Run this on a machine with one, or see that it works with "
            "TRITON_INTERPRET=1 and --device cpu --tokens 128 --repeats 1."
        )
    if args.device == "cuda":
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for head_dim in args.head_dims:
        for tokens in args.tokens:
            for name in args.rows:
                run(name, tokens, head_dim, args)


if __name__ == "__main__":
    main()
