"""Ring attention: blocks of keys and values travel from device to device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, Unpack

import qkv
from qkv.arguments.declarations import Size
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.arrays.head_rows import join_heads
from qkv.mechanisms.base.arrays.namespace import array_namespace
from qkv.mechanisms.base.arrays.rows import Rows
from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Line, Step
from qkv.mechanisms.base.projected import Options, ProjectedAttention
from qkv.variants import Sinks

__all__ = ["Hop", "Ring"]


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """The computation of one device on the keys and values of another.

    Attributes
    ----------
    device, source : int
        Whose queries, and whose keys and values.
    out : array (..., num_heads, queries, head_dim)
        Attention over these keys alone, without sinks, which are counted once for all parts.
    lse : array (..., num_heads, queries)
        The logarithm of the sum of its exponentials.
    """

    device: int
    source: int
    out: Any
    lse: Any


class Ring(ProjectedAttention):
    """The sequence is cut into blocks, one for each device; keys and values go round in a ring.

        out = sum_s exp(lse_s - lse) out_s,   lse = log sum_s exp(lse_s)

    Every device keeps its queries. At hop s it attends to the keys that began s devices before it,
    while the next ones arrive, and joins the parts by their lse. No device ever holds more than a
    block, so that the length grows with the number of devices.

    Parameters
    ----------
    embed_dim, num_heads : int
    num_devices : int
        Blocks; here all are in one process.
    **options
        As for `ProjectedAttention`. A causal ring skips blocks that lie in the future.

    Raises
    ------
    ArgumentError
        If a size is not a positive integer.

    Notes
    -----
    Every device sends `2 n num_kv_heads head_dim / num_devices` numbers a hop. Parts are joined by
    `qkv.merge`. Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023).

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import MultiHead, Ring
    >>> x = np.random.default_rng(0).normal(size=(7, 8))
    >>> bool(np.allclose(Ring(8, 2, num_devices=3)(x), MultiHead(8, 2)(x)))
    True
    """

    name = "ring"
    paper = "Liu et al., Ring Attention with Blockwise Transformers (2023)"
    formula = "out = sum_s exp(lse_s - lse) out_s over the blocks s of keys and values"
    one_sequence_only = True

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        num_devices: Size,
        **options: Unpack[Options],
    ) -> None:
        self.num_devices = num_devices
        super().__init__(embed_dim, num_heads, **options)

    def __call__(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """Mix the tokens of `x` (..., n, embed_dim); an array of the same library and dtype.

        Raises
        ------
        ArgumentError
            A key was given.
        """
        self.sequences(x, key, value)
        if not x.shape[-2]:
            return super().__call__(x)
        parts: dict[int, list[tuple[Any, Any]]] = {}
        for hop in self.hops(x):
            parts.setdefault(hop.device, []).append((hop.out, hop.lse))
        outputs = [qkv.merge(*self._with_sinks(of_device))[0] for of_device in parts.values()]
        return self.join(array_namespace(x).concat(outputs, axis=-2))

    def hops(self, x: Rows) -> Iterator[Hop]:
        """The computations of all devices, for each hop and device.

        Parameters
        ----------
        x : array (..., n, embed_dim)

        Yields
        ------
        Hop
            A causal ring leaves out blocks that lie in the future of the device.
        """
        q, k, v = self.heads(x, x, x)
        variants = [one for one in self.variants(q, k) if not isinstance(one, Sinks)]
        n = x.shape[-2]
        size = -(-n // self.num_devices)
        blocks = [slice(first, min(first + size, n)) for first in range(0, n, max(size, 1))]
        for device, rows in enumerate(blocks):
            for hop in range(len(blocks)):
                source = (device - hop) % len(blocks)
                if self.causal and source > device:
                    continue
                keys = blocks[source]
                out, lse = qkv.attention(
                    q[..., rows, :],
                    k[..., keys, :],
                    v[..., keys, :],
                    *variants,
                    scale=self.scale,
                    q_offset=rows.start,
                    kv_offset=keys.start,
                    return_lse=True,
                )
                yield Hop(device, source, out, lse)

    def _with_sinks(self, parts: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """The parts of one device, and the sinks as one more: no output, and the sink as lse."""
        if not self.sinks:
            return parts
        out, lse = parts[0]
        sink = self.weight("sinks", lse)[:, None] + array_namespace(lse).zeros_like(lse)
        return [*parts, (array_namespace(out).zeros_like(out), sink)]

    def steps(self, token: ExplainedToken) -> list[Step]:
        """The hops of the token's device, and how their parts are joined."""
        x, names = token.query, token.tokens
        size = -(-len(x) // self.num_devices)
        device, place = divmod(token.index, size)
        steps: list[Step] = []
        merged: tuple[Any, Any] | None = None
        for hop in self.hops(x):
            if hop.device != device:
                continue
            part = (hop.out, hop.lse)
            merged = part if merged is None else qkv.merge(merged, part)
            held = ", ".join(names[hop.source * size : (hop.source + 1) * size])
            lines = (
                Line("lse of the block", hop.lse[:, place].tolist()),
                Line("out of the block", join_heads(hop.out)[place].tolist()),
                Line("lse so far", merged[1][:, place].tolist()),
                Line("out so far", join_heads(merged[0])[place].tolist()),
            )
            formula = "lse = log(exp(lse) + exp(lse_s)), out = weighted by exp(lse_s - lse)"
            steps.append(Step(f"Device {device} holds keys of {held}", formula, lines))
        if self.sinks and merged is not None:
            out, lse = qkv.merge(*self._with_sinks([merged]))
            sink = Line("sink", self.weights["sinks"].tolist())
            row = Line("out", join_heads(out)[place].tolist())
            all_keys = (sink, Line("lse", lse[:, place].tolist()), row)
            steps.append(Step("Sinks, once", "lse = log(exp(lse) + exp(sink))", all_keys))
        final = Line("out", self(x)[token.index].tolist())
        steps.append(Step("Join", "the heads side by side, projected back if they are", (final,)))
        return steps

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of attention on all devices, and of merging rows of `head_dim + 1`."""
        d, h = symbols(d=self.head_dim, h=self.num_heads)
        n = int(tokens)
        size = -(-n // self.num_devices)
        blocks = [min(size, n - first) for first in range(0, n, size)]
        joins = sum(i * rows for i, rows in enumerate(blocks))
        formula = "n (devices - 1) / 2"
        if not self.causal:
            joins, formula = (len(blocks) - 1) * n, "n (devices - 1)"
        rows: int = batch * h * Count(joins, formula)
        return super().operations(tokens, batch) + step(
            "merge", subtract=2 * rows, exp=3 * rows, log=rows, add=rows * (d + 1),
            multiply=2 * rows * d,
        )  # fmt: skip

    @classmethod
    def example(cls) -> Self:
        """Three devices, of two tokens each; the last has one."""
        return cls.for_example(num_devices=3)
