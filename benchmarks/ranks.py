"""Attention over ranks on this machine: its speed, and the model of its speed.

    python -m benchmarks.ranks speed         # two ranks of one thread beside one process of two
    python -m benchmarks.ranks prediction    # qkv.distributed.plan beside the clock, 1 to 4 ranks
    python -m benchmarks.ranks memory        # what a rank holds beside its shards, 1 to 4 ranks
    python -m benchmarks.ranks balance       # orders beside each other and torch's, 8 and 64 ranks

Ranks are processes of this machine, joined by gloo over its own network. Every time is the least
of several rounds; that of the clock is the slowest rank's, that of processors is of all ranks
together, which waiting for messages does not change. What is compared takes turns. Results are
compared with one process before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import qkv
from qkv.distributed import Machine, Order, attention, plan
from qkv.distributed.messages.links import Links, group_of

HEADS, HEAD_DIM = 4, 64
STRATEGIES = ("ring", "gather", "ulysses")
MESSAGE = 2**24
"""Bytes of the message that measures a link."""
_MINUTES = 30

Tensors = tuple[torch.Tensor, ...]


def inputs(length: int) -> Tensors:
    """Query, key, value and a cotangent of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, HEADS, length, HEAD_DIM
    return tuple(torch.randn(shape, generator=generator) for _ in range(4))


def once(call: Callable[[], torch.Tensor], leaves: Tensors, cotangent: torch.Tensor | None) -> Any:
    """The output, and gradients of the leaves where there is a cotangent."""
    if cotangent is None:
        with torch.no_grad():
            return [call()]
    out = call()
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def _now() -> Any:
    """Seconds by the clock, and of this process's processor, of all its threads."""
    return np.array([time.perf_counter(), time.process_time()])


# --- what ranks do -------------------------------------------------------------------------------


def over_ranks(rank: int, ranks: int, length: int, strategy: str, backward: bool) -> Any:
    """Seconds of one call on this rank, by the clock and of its processor, and its rows of it."""
    order = Order.zigzag(length, ranks)
    *leaves, cotangent = (order.shard(x, rank) for x in inputs(length))
    for leaf in leaves:
        leaf.requires_grad_(backward)
    dist.barrier()
    began = _now()
    found = once(
        lambda: attention(*leaves, qkv.Causal(), order=order, strategy=strategy),
        tuple(leaves),
        cotangent if backward else None,
    )
    return _now() - began, [x.numpy() for x in found]


def memory_of_rank(
    rank: int, ranks: int, length: int, strategy: str, backward: bool
) -> tuple[int, int]:
    """Bytes of this rank's shards, and the most that it holds beside them during a call."""
    order = Order.zigzag(length, ranks)
    *leaves, cotangent = (order.shard(x, rank).clone() for x in inputs(length))
    for leaf in leaves:
        leaf.requires_grad_(backward)
    dist.barrier()
    ctypes.CDLL(None).malloc_trim(0)  # What was freed goes back to the system, so that it counts.
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    before = _resident("VmRSS")
    once(
        lambda: attention(*leaves, qkv.Causal(), order=order, strategy=strategy),
        tuple(leaves),
        cotangent if backward else None,
    )
    held = [*leaves, cotangent] if backward else leaves
    return sum(x.nbytes for x in held), _resident("VmHWM") - before


def _resident(name: str) -> int:
    """Bytes of memory that this process has (VmRSS), or had at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def over_ranks_of_torch(rank: int, ranks: int, length: int, backward: bool) -> Any:
    """The same by `context_parallel` of torch, which shards in a balanced order of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = init_device_mesh("cpu", (ranks,))
    *leaves, cotangent = inputs(length)
    with context_parallel(mesh, buffers=[*leaves, cotangent], buffer_seq_dims=[2] * 4):
        # Other tensors of the same memory, since those that are sharded must not need gradients.
        a, b, c = own = tuple(leaf.view_as(leaf).requires_grad_(backward) for leaf in leaves)
        dist.barrier()
        began = _now()
        found = once(
            lambda: torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True),
            own,
            cotangent if backward else None,
        )
        seconds = _now() - began
        whole = context_parallel_unshard(mesh, [found[0].contiguous()], [2])
    return seconds, [x.numpy() for x in whole]


def link(rank: int, ranks: int) -> tuple[float, float]:
    """Bytes a second that two ranks send to each other at once, and seconds of a small message."""
    links, peer = Links(group_of(None, None)), 1 - rank
    least = []
    for size in (1, MESSAGE):
        sent, found = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        seconds = []
        for _ in range(10):
            dist.barrier()
            began = time.perf_counter()
            links.exchange({peer: sent}, {peer: found}).wait()
            seconds.append(time.perf_counter() - began)
        least.append(min(seconds))
    return MESSAGE / max(least[1] - least[0], 1e-9), least[0]


# --- processes -----------------------------------------------------------------------------------


def _serve(rank: int, ranks: int, threads: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(threads)
    qkv.set_num_threads(threads)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    while (called := pipe.recv()) is not None:
        function, arguments = called
        try:
            pipe.send(function(rank, ranks, *arguments))
        except Exception as error:
            pipe.send(error)


class Ranks:
    """`ranks(function, *arguments)` calls it on every rank, and gives what each returns."""

    def __init__(self, count: int, threads: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        os.environ["OMP_NUM_THREADS"] = str(threads)
        for rank in range(count):
            own, other = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, count, threads, str(folder / f"store-{count}"), other),
                daemon=True,
            )
            process.start()
            self.pipes.append(own)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((function, arguments))
        found = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(60 * _MINUTES):
                raise TimeoutError(f"rank {rank} does not answer within {_MINUTES} minutes")
            found.append(pipe.recv())
        for answer in found:
            if isinstance(answer, Exception):
                raise answer
        return found

    def close(self) -> None:
        """End them."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with suppress(BrokenPipeError):  # This rank has died.
                pipe.send(None)
            process.join(10)
            process.kill()


@contextmanager
def started(count: int, threads: int) -> Iterator[Ranks]:
    """Ranks, until the end of the `with`."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(count, threads, Path(folder))
        try:
            yield ranks
        finally:
            ranks.close()


# --- the commands --------------------------------------------------------------------------------


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
                began = _now()
                alone()
                one.append(_now() - began)
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("command", choices=("speed", "prediction", "memory", "balance"))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    if options.command == "balance":
        from benchmarks.balance import balance  # It reads private modules of torch.

        balance(options.tokens)
    else:
        commands = {"speed": speed, "prediction": prediction, "memory": memory}
        commands[options.command](options.tokens, options.rounds)


if __name__ == "__main__":
    main()
