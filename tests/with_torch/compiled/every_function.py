"""Every public function under torch.compile, each in a process of its own; prints what differs.

Run as `python every_function.py tensors` or `arrays`. A function may raise an error of qkv's or one
of torch's compiler, with `fullgraph`; without, it must give what it gives in eager mode.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import qkv
import qkv.torch

RNG = np.random.default_rng(0)
ARRAYS = [RNG.normal(size=(2, 4, 6, 8)).astype(np.float32) for _ in range(3)]
OF_TORCH = {"scaled_dot_product_attention", "ScaledDotProductAttention", "MultiHeadAttention"}


def cases(query: Any, key: Any, value: Any) -> dict[str, Any]:
    """A call of each function, of the first operand, by the function's name."""
    record = qkv.inspect(query, key, value)
    pullback = qkv.vjp(query, key, value)[1]
    module = qkv.torch.MultiHeadAttention(8, 2, causal=True)

    def part(q: Any, start: int, stop: int) -> Any:
        return qkv.attention(q, key[:, :, start:stop], value[:, :, start:stop], return_lse=True)

    found = {
        "attention": lambda q: qkv.attention(q, key, value, qkv.Causal(), return_lse=True),
        "vjp": lambda q: qkv.vjp(q, key, value)[1](q).key,
        "jvp": lambda q: qkv.jvp(q, key, value, tangents=qkv.Tangents(q, None, None))[1],
        "inspect": lambda q: qkv.inspect(q, key, value).received,
        "explain": lambda q: str(qkv.explain(q, key, value)),
        "plan": lambda q: str(qkv.plan(q, key, value)),
        "merge": lambda q: qkv.merge(part(q, 0, 3), part(q, 3, 6))[0],
        "get_num_threads": lambda q: (qkv.get_num_threads(), q),
        "set_num_threads": lambda q: (qkv.set_num_threads(None), q),
        "scaling_curve": lambda q: (str(qkv.scaling_curve((2, 4), draws=10)), q),
        "Record": lambda q: (record.entropy, record.top(2)[0], record.received),
        "LazyWeights": lambda q: (record.weights[0, 0, 0], q),
        "Pullback": lambda q: pullback(q).key,
        "RoPE": lambda q: qkv.RoPE().rotate(q, np.arange(6)),
        "SinusoidalPositions": lambda q: qkv.SinusoidalPositions(8)(q),
        "ScaledDotProductAttention": lambda q: qkv.ScaledDotProductAttention(8)(*ARRAYS),
    }
    if isinstance(query, torch.Tensor):
        found |= {
            "torch.scaled_dot_product_attention": lambda q: qkv.torch.scaled_dot_product_attention(
                q, key, value, is_causal=True
            ),
            "torch.ScaledDotProductAttention": lambda q: qkv.torch.ScaledDotProductAttention(8)(
                q, key, value
            ),
            "torch.MultiHeadAttention": lambda q: module(q[0]),
        }
    return found


def flat(thing: Any) -> Iterator[Any]:
    if isinstance(thing, tuple | list):
        for entry in thing:
            yield from flat(entry)
    else:
        yield thing.detach().numpy() if isinstance(thing, torch.Tensor) else thing


def difference(function: Any, query: Any, fullgraph: bool) -> str:
    """What is wrong with a compiled function, nothing if nothing is."""
    expected = list(flat(function(query)))
    torch.compiler.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
    try:
        for _ in range(2):
            found = list(flat(compiled(query)))
    except (torch._dynamo.exc.Unsupported, qkv.QkvError) as error:
        is_clear = "qkv" in str(error) or "ndarray" in str(error)
        return "" if fullgraph and is_clear else f"{type(error).__name__}: {error}"
    for one, other in zip(found, expected, strict=True):
        if type(one) is not type(other):
            return f"{type(one).__name__} in place of {type(other).__name__}"
        equal = np.allclose(one, other, atol=1e-5) if hasattr(one, "shape") else one == other
        if not equal:
            return "another result"
    return ""


def main(kind: str) -> None:
    functions = {n for n in qkv.__all__ if inspect.isfunction(getattr(qkv, n))}
    operands = [torch.from_numpy(a) if kind == "tensors" else a for a in ARRAYS]
    every = cases(*operands)
    torch.compile(torch.sin, backend="eager")(torch.ones(2))  # Imports what children share.
    print(*[f"{name} has no case" for name in functions - set(every)], sep="\n", flush=True)
    for name, function in every.items():
        for fullgraph in (True, False):
            child = os.fork()
            if not child:
                try:
                    wrong = difference(function, operands[0], fullgraph)
                except BaseException as error:
                    wrong = f"{type(error).__name__}: {error}"
                print(f"{name}, {fullgraph=}: {wrong}" if wrong else "", end="", flush=True)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status:
                print(f"{name}, {fullgraph=}: ended by signal {status}", flush=True)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
