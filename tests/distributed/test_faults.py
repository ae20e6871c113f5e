"""A rank that dies, lags or was called with something else is named on every other rank."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import qkv
from tests.distributed.cases import LENGTH, operands
from tests.distributed.ranks import LIMIT, Ranks

RANKS = 3


def long_function(last: float) -> Callable[..., Any]:
    """A score mod whose formula has thousands of letters before its last number."""

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for n in range(200):
            s = s + (i - j) * (n / 1000)
        return s + last * j

    return mod


def differing(rank: int, ranks: int, what: str) -> str:
    """The error of a call in which rank 1 is given something else."""
    from qkv.distributed import Order, attention, decode, inspect

    odd = rank == 1
    order = Order.zigzag(LENGTH, ranks)
    q, k, v = (order.shard(t, rank).float() for t in operands()[:3])
    variants: tuple[Any, ...] = (qkv.Causal(),)
    keywords: dict[str, Any] = {"order": order, "strategy": "ring", "timeout": 60.0}
    if odd:
        match what:
            case "dtype":
                q, k, v = (t.double() for t in (q, k, v))
            case "head_dim":
                q, k = q[..., :8], k[..., :8]
            case "rows":
                q = q[..., 1:, :]
            case "variant":
                variants = (qkv.SlidingWindow(5, 0),)
            case "values":
                variants = (qkv.SlidingWindow(6, 0),)
            case "digits":
                variants = (qkv.ScoreMod(lambda s, b, h, i, j: s + 1.0000004 * (i - j)),)
            case "a long function":
                variants = (qkv.ScoreMod(long_function(-1)),)
            case "order":
                keywords["order"] = Order.contiguous(LENGTH, ranks)
            case "strategy":
                keywords["strategy"] = "gather"
            case "error":
                variants = (torch.ones(3, 5, dtype=torch.bool),)
            case "placement":
                v = v[..., :4, :]
            case "gradients":
                q = q.requires_grad_()
            case "lse":
                keywords["return_lse"] = True
            case "scales of heads":
                keywords["scale"] = torch.full((8,), 0.5)
            case "inspect":
                del keywords["strategy"]
                return error_of(inspect, q, k, v, *variants, **keywords)
            case "function":
                return error_of(decode, q, k, v, qkv.Causal(), timeout=60)
    elif what == "scales of heads":
        keywords["scale"] = torch.full((8,), 0.25)
    elif what == "values":
        variants = (qkv.SlidingWindow(5, 0),)
    elif what == "digits":
        variants = (qkv.ScoreMod(lambda s, b, h, i, j: s + 1.0000001 * (i - j)),)
    elif what == "a long function":
        variants = (qkv.ScoreMod(long_function(1)),)
    return error_of(attention, q, k, v, *variants, **keywords)


def error_of(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """The type and the message of what a call raises."""
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("dtype", "dtype differs between ranks"),
        ("head_dim", "shape of query without rows differs between ranks"),
        ("variant", "what variants and options come to differs between ranks"),
        ("values", "what variants and options come to differs between ranks"),
        ("digits", "what variants and options come to differs between ranks"),
        ("a long function", "what variants and options come to differs between ranks"),
        ("order", "order differs between ranks"),
        ("strategy", "strategy differs between ranks"),
        ("rows", "the ranks hold"),
        ("placement", "rank 1 cannot make this call"),
        ("gradients", "whether gradients are wanted differs between ranks"),
        ("function", "function differs between ranks"),
        ("inspect", "function differs between ranks"),
        ("lse", "return_lse differs between ranks"),  # Ulysses once waited for lse.
        ("scales of heads", "scale differs between ranks"),  # Each rank once took its own.
    ],
)
def test_differing_calls_are_refused_on_every_rank(group: Any, what: str, words: str) -> None:
    for said in group(RANKS)(differing, what):
        assert words in said


def test_differing_variants_are_shown(group: Any) -> None:
    for said in group(RANKS)(differing, "variant"):
        assert re.search(r"rank 0 +Causal\(\) ", said), said
        assert re.search(r"rank 1 +SlidingWindow\(5, 0\) ", said), said


def test_an_error_of_one_rank_is_told_to_the_others(group: Any) -> None:
    said = group(RANKS)(differing, "error")
    assert "ShapeError: mask has shape (3, 5)" in said[1]
    for other in (said[0], said[2]):
        assert "rank 1 cannot make this call" in other
        assert "mask has shape (3, 5)" in other


class Unlucky:
    """A variant of the user's own, with a fault."""

    def lower(self, builder: Any) -> None:
        raise KeyError("no such bias")


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "keyword": ("attention", {"scael": 1.0}, "unexpected keyword argument 'scael'"),
    "strategy": ("attention", {"strategy": "rings"}, "strategy='rings' is not known"),
    "flag": ("attention", {"return_lse": "yes"}, "return_lse='yes' is not True or False"),
    "scale": ("attention", {"scale": torch.ones(3)}, "scale has shape (3,)"),
    "array": ("attention", {"query": torch.Tensor.numpy}, "query is a ndarray, not a tensor"),
    "meta": ("attention", {"query": lambda q: q.to("meta")}, "query is on meta"),
    "sparse": ("attention", {"query": torch.Tensor.to_sparse}, "torch.sparse_coo tensor"),
    "variant": ("attention", {"variant": Unlucky()}, "no such bias"),
    "timeout": ("attention", {"timeout": "60"}, "timeout='60' is not a number of seconds"),
    "layout of inspect": ("inspect", {"layout": "blhd"}, "inspection over ranks takes"),
    "keyword of decode": ("decode", {"dims": 1}, "unexpected keyword argument 'dims'"),
    "timeout of decode": ("decode", {"timeout": 0}, "timeout=0 is not a number of seconds"),
    "array of decode": ("decode", {"query": torch.Tensor.numpy}, "query is a ndarray"),
    "variant of decode": ("decode", {"variant": Unlucky()}, "no such bias"),
    "top": ("top", {"k": 0}, "k=0"),
    "tile": ("tile", {"queries": slice(0, 8, 2)}, "is not a run of the 72 rows"),
    "tile beyond": ("tile", {"keys": slice(80, None)}, "is not a run of the 72 rows"),
    "tile of a row": ("tile", {"queries": 3}, "queries=3 is not a slice of whole numbers"),
    "tile of floats": ("tile", {"keys": slice(0, 4.0)}, "is not a slice of whole numbers"),
}


def mistaken(rank: int, ranks: int, what: str) -> tuple[str, float]:
    """The error of a call in which rank 1 makes a mistake, and the seconds that it takes."""
    import qkv.distributed

    of_record = {"top": {"k": 2}, "tile": {"queries": slice(0, 4), "keys": slice(0, 4)}}
    name, mistake, _ = MISTAKES[what]
    operands_ = [t[..., rank * 24 : rank * 24 + 24, :] for t in operands()[:3]]
    variants: list[Any] = [qkv.Softcap(3.0)]
    keywords: dict[str, Any] = {"timeout": 60.0}
    if name in of_record:
        record = qkv.distributed.inspect(*operands_, timeout=60.0)
        call, keywords = getattr(record, name), dict(of_record[name])
        operands_, variants = [], []
    else:
        call = getattr(qkv.distributed, name)
    if rank == 1:
        keywords.update(mistake)
        if "variant" in keywords:
            variants = [keywords.pop("variant")]
        if "query" in keywords:
            operands_[0] = keywords.pop("query")(operands_[0])
    began = time.monotonic()
    return error_of(call, *operands_, *variants, **keywords), time.monotonic() - began


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_of_one_rank_is_told_to_the_others(group: Any, what: str) -> None:
    """The others once waited for the whole timeout, and the group was of no more use."""
    found = group(RANKS)(mistaken, what)
    words = MISTAKES[what][2]
    for rank, (said, seconds) in enumerate(found):
        assert words in said
        assert seconds < 50
        assert rank == 1 or said.startswith("DistributedError: rank 1 cannot make this call")
    assert not found[1][0].startswith("DistributedError")


def decoded(rank: int, ranks: int, what: str) -> str:
    """The error of a step in which rank 1 is given something else, or all have gradients."""
    from qkv.distributed import decode

    q, k, v = (t.float() for t in operands()[:3])
    bias: tuple[torch.Tensor, ...] = ()
    match what:
        case "key heads" if rank == 1:
            k, v = k[:, :1], v[:, :1]
        case "value dim" if rank == 1:
            v = v[..., :5]
        case "query" | "key" | "value":
            {"query": q, "key": k, "value": v}[what].requires_grad_()
        case "bias":
            bias = (torch.zeros(LENGTH, ranks * LENGTH, requires_grad=True),)
        case "one query" if rank == 1:
            q.requires_grad_()
        case "no gradients":
            q.requires_grad_()
            with torch.no_grad():
                return error_of(decode, q, k, v, timeout=60)
        case "DTensor":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Shard, distribute_tensor

            mesh = init_device_mesh("cpu", (ranks,))
            q = distribute_tensor(q, mesh, [Shard(2)])
    return error_of(decode, q, k, v, *bias, timeout=60)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("key heads", "shapes without tokens differs between ranks"),
        ("value dim", "shapes without tokens differs between ranks"),
        ("query", "torch differentiates this call, in 1 of its arrays"),
        ("key", "torch differentiates this call, in 1 of its arrays"),
        ("value", "torch differentiates this call, in 1 of its arrays"),
        ("bias", "torch differentiates this call, in 1 of its arrays"),
        ("one query", "torch differentiates this call, in 1 of its arrays"),
        ("DTensor", "query is a DTensor, not a plain tensor"),
        ("no gradients", "no error"),
    ],
)
def test_decoding_that_cannot_be_is_refused_on_every_rank(
    group: Any, what: str, words: str
) -> None:
    for said in group(RANKS)(decoded, what):
        assert words in said


def waiting(rank: int, ranks: int, folder: str, timeout: float, begins_late: bool) -> str:
    """The error of a call that rank 1 never makes."""
    from qkv.distributed import Order, attention

    order = Order.zigzag(LENGTH, ranks)
    q, k, v = (order.shard(t, rank).float() for t in operands()[:3])
    attention(q, k, v, order=order, strategy="ring")  # Links exist from here on.
    if rank == 1:
        Path(folder, "ready").touch()
        time.sleep(600)
    while begins_late and not Path(folder, "go on").exists():
        time.sleep(0.01)
    try:
        attention(q, k, v, order=order, strategy="ring", timeout=timeout)
    except qkv.DistributedError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "begins_late"),
    [(signal.SIGKILL, True), (signal.SIGKILL, False), (signal.SIGSTOP, False)],
    ids=["died before the call", "dies", "stops"],
)
@pytest.mark.one_in(3)
def test_a_rank_that_dies_or_stops_is_named(
    tmp_path: Path, fault: signal.Signals, begins_late: bool
) -> None:
    """The error once named all ranks that the call would have sent something to."""
    ranks = Ranks(RANKS, tmp_path, ends_by_itself=False)
    try:
        ranks.begin(waiting, str(tmp_path), 10.0, begins_late)
        until = time.monotonic() + LIMIT
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(ranks.processes[1].pid or 0, fault)
        if fault == signal.SIGKILL:
            ranks.processes[1].join(LIMIT)
        (tmp_path / "go on").touch()
        for succeeded, said in ranks.answers([0, 2]):
            assert succeeded, said
            assert said.startswith("rank 1 ")
            assert "start all ranks anew" in said
    finally:
        ranks.close()


def calling_again(rank: int, ranks: int) -> list[str]:
    """The errors of two calls that the other rank of the group never makes."""
    import torch.distributed as dist

    from qkv.distributed import attention

    group, said = dist.new_group([0, 2]), []
    if rank == 0:
        q, k, v = (t.float() for t in operands()[:3])
        said = [error_of(attention, q, k, v, mesh=group, timeout=1.0) for _ in range(2)]
    dist.barrier()
    return said


def test_a_call_after_a_timeout_says_so_and_which_processes_are_meant(group: Any) -> None:
    """The message once was that a rank had not answered within 300 s, after 0.0 s."""
    first, second = group(RANKS)(calling_again)[0]
    assert "rank 1 did not answer rank 0 within 1 s" in first
    assert "rank 1 did not answer rank 0 in time in an earlier call" in second
    for said in (first, second):
        assert "2, which are ranks 0, 2 of all processes" in said


def leaving_out(rank: int, ranks: int, what: str) -> str:
    """The error of a backward pass that rank 1 leaves out for something else."""
    from qkv.distributed import attention

    shards = [
        t.float()[..., rank * 36 : rank * 36 + 36, :].requires_grad_() for t in operands()[:3]
    ]
    attention(*shards, qkv.Causal(), strategy="ring").sum().backward()  # Compiles.
    keywords: dict[str, Any] = {"strategy": "ring", "timeout": 15.0}
    first, second = (attention(*shards, qkv.Causal(), **keywords) for _ in range(2))
    if rank != 1:
        return error_of(second.sum().backward)
    if what == "another backward":
        return error_of(first.sum().backward)
    return error_of(attention, *shards, qkv.Causal(), **keywords)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["next call", "another backward"])
def test_messages_of_different_passes_are_not_confused(tmp_path: Path, what: str) -> None:
    """Keys would be taken for gradients, or descriptions for keys."""
    ranks = Ranks(2, tmp_path, ends_by_itself=False)
    try:
        ranks.begin(leaving_out, what)
        for rank, (succeeded, said) in enumerate(ranks.answers()):
            assert succeeded, said
            assert re.match(rf"DistributedError: rank {1 - rank} (did not|closed)", said), said
    finally:
        ranks.close()


def test_long_words_of_ranks_are_cut_and_still_differ() -> None:
    """Long words were once cut in the middle of what was sent, which no rank could read then."""
    from types import SimpleNamespace

    from qkv.distributed.messages.agreement import compare, tell

    words = {f"name {n}": "\N{GREEK SMALL LETTER ALPHA}\n" * 3000 for n in range(10)}
    said = [{"own error": "", **words}, {"own error": "", **words, "name 9": words["name 9"] + "x"}]
    links: Any = SimpleNamespace(number=0, all_to_all=lambda tensor: [tensor])
    heard = [tell(links, of, torch.device("cpu"))[0] for of in said]
    assert heard[0]["name 0"].startswith(words["name 0"][:20])
    with pytest.raises(qkv.DistributedError, match="name 9 differs between ranks"):
        compare([{**of, "own last number": 0} for of in heard])
