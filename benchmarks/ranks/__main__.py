"""The commands of `python -m benchmarks.ranks`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import qkv
from benchmarks import ranks as program
from benchmarks.ranks.calls import (
    HEAD_DIM,
    HEADS,
    STRATEGIES,
    Tensors,
    inputs,
    link,
    memory_of_rank,
    now,
    once,
    over_ranks,
    over_ranks_of_torch,
)
from benchmarks.ranks.processes import Ranks, started
from qkv.distributed import Machine, Order, plan


def speed(length: int, rounds: int) -> None:
    """Two ranks of one thread beside one process of two threads."""
    torch.set_num_threads(2)
    qkv.set_num_threads(2)
    order = Order.zigzag(length, 2)
    print(f"causal, {length:,} tokens, {HEADS} heads of {HEAD_DIM}, float32")
    with started(2, 1) as ranks:
        for backward in (False, True):
            *leaves, cotangent = inputs(length)
            for leaf in leaves:
                leaf.requires_grad_(backward)

            alone = partial(_alone, tuple(leaves), cotangent if backward else None)
            right = alone()
            ways: dict[str, Callable[[], list[Any]]] = {
                f"two ranks, {name}": partial(ranks, over_ranks, length, name, backward)
                for name in STRATEGIES
            }
            for way in ways.values():
                found = way()
                for n, whole in enumerate(right):
                    own = order.unshard([torch.from_numpy(of_rank[n]) for _, of_rank in found])
                    torch.testing.assert_close(own, whole, rtol=1e-4, atol=1e-4)
            refusal = _torch_refusal(ranks, length, backward, right[0])
            if not refusal:
                name = "two ranks, torch's context_parallel"
                ways[name] = partial(ranks, over_ranks_of_torch, length, backward)
            one: list[Any] = []
            others: dict[str, list[Any]] = {name: [] for name in ways}
            for _ in range(rounds):
                began = now()
                alone()
                one.append(now() - began)
                for name, way in ways.items():
                    of_ranks = np.array([times for times, _ in way()])
                    others[name].append([of_ranks[:, 0].max(), of_ranks[:, 1].sum()])
            clock, work = np.min(one, axis=0)
            print(f"\n{'forward and backward' if backward else 'forward'}")
            print(f"  {'one process of two threads':38}{clock:8.3f} s{work:8.3f} s of processors")
            for name, times in others.items():
                its_clock, its_work = np.min(times, axis=0)
                print(
                    f"  {name:38}{its_clock:8.3f} s{its_work:8.3f} s of processors   "
                    f"{clock / its_clock:.2f} of its speed, {its_work / work:.2f} of its work"
                )
            if refusal:
                print(f"  torch's context_parallel: {refusal}")


def _alone(leaves: Tensors, cotangent: torch.Tensor | None) -> Any:
    """What one process computes."""
    return once(lambda: qkv.attention(*leaves, qkv.Causal()), leaves, cotangent)


def _torch_refusal(ranks: Ranks, length: int, backward: bool, right: torch.Tensor) -> str:
    """Why torch's own cannot be timed; empty if it computes the same."""
    try:
        found = ranks(over_ranks_of_torch, length, backward)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
    difference = (torch.from_numpy(found[0][1][0]) - right).abs().max().item()
    return "" if difference < 1e-3 else f"another result, by {difference:.2g}, which is not timed"


def prediction(length: int, rounds: int) -> None:
    """`plan` for the measured rate and link, beside the clock."""
    torch.set_num_threads(1)
    qkv.set_num_threads(1)
    q, k, v, _ = inputs(2048)
    work = 4 * HEADS * HEAD_DIM * 2048**2
    once(lambda: qkv.attention(q, k, v), (), None)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        once(lambda: qkv.attention(q, k, v), (), None)
        seconds.append(time.perf_counter() - began)
    rate = work / min(seconds)
    with started(2, 1) as ranks:
        bandwidth = min(found[0] for found in ranks(link))
        latency = max(found[1] for found in ranks(link))
    machine = Machine(rate, bandwidth, latency)
    print(
        f"one thread: {rate / 1e9:.1f} GFLOP/s of 2,048 tokens without a mask; one link: "
        f"{bandwidth / 1e9:.2f} GB/s, {1e6 * latency:.0f} us; {os.cpu_count()} processors"
    )
    print(f"causal, {length:,} tokens, {HEADS} heads of {HEAD_DIM}, float32, forward")
    print(f"{'ranks':>5}  {'strategy':9}{'predicted':>11}{'measured':>11}{'of predicted':>14}")
    whole = inputs(length)[:3]
    for count in (1, 2, 4):
        order = Order.zigzag(length, count)
        planned = plan(*whole, qkv.Causal(), ranks=count, order=order, machine=machine)
        with started(count, 1) as ranks:
            for name in STRATEGIES if count > 1 else ("ring",):
                ranks(over_ranks, length, name, False)
                least = min(
                    max(times[0] for times, _ in ranks(over_ranks, length, name, False))
                    for _ in range(rounds)
                )
                predicted = planned.strategies[name].seconds
                print(
                    f"{count:5}  {name:9}{predicted:9.3f} s{least:9.3f} s{least / predicted:14.2f}",
                    flush=True,
                )


def memory(length: int, rounds: int) -> None:
    """What a rank holds beside its shards, results included; the most of `rounds` calls."""
    if not Path("/proc/self/clear_refs").exists():
        raise SystemExit("Memory is measured by Linux's /proc/self/clear_refs; run it on Linux.")
    print(
        f"causal, {length:,} tokens, {HEADS} heads of {HEAD_DIM}, float32; MiB of a rank\n"
        f"{'ranks':>5}  {'strategy':9}{'shards':>9}{'beside, forward':>18}{'beside, backward':>18}"
    )
    for count in (1, 2, 4):
        with started(count, 1) as ranks:
            for name in STRATEGIES if count > 1 else ("ring",):
                found = {}
                for backward in (False, True):
                    call = partial(ranks, memory_of_rank, length, name, backward)
                    call()  # The first call compiles.
                    found[backward] = np.max([call() for _ in range(rounds)], axis=(0, 1)) / 2**20
                print(
                    f"{count:5}  {name:9}{found[False][0]:9.0f}{found[False][1]:18.0f}"
                    f"{found[True][1]:18.0f}",
                    flush=True,
                )


def main() -> None:
    about = (program.__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=about)
    parser.add_argument("command", choices=("speed", "prediction", "memory", "balance"))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    if options.command == "balance":
        from benchmarks.ranks.balance import balance  # It reads private modules of torch.

        balance(options.tokens)
    else:
        commands = {"speed": speed, "prediction": prediction, "memory": memory}
        commands[options.command](options.tokens, options.rounds)


if __name__ == "__main__":
    main()
