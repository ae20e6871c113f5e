"""The base of mechanisms that project x to heads, attend, and project back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypedDict, Unpack

from qkv.errors import ArgumentError
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.attention import AttentionMechanism
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM, EXAMPLE_WIDTH, select_columns
from qkv.mechanisms.base.explanation import Line, Step
from qkv.mechanisms.base.mechanism import positive_integers
from qkv.mechanisms.base.namespace import array_namespace
from qkv.mechanisms.base.operations import attention_over_pairs, projection, traffic
from qkv.variants import ALiBi, Causal, RoPE

__all__ = [
    "Options",
    "OptionsWithoutGroups",
    "ProjectedAttention",
    "join_heads",
    "refuse_options",
    "split_heads",
]


class OptionsWithoutGroups(TypedDict, total=False):
    """Keywords of `ProjectedAttention` but num_kv_heads."""

    head_dim: int | None
    kv_dim: int | None
    causal: bool
    rope: RoPE | None
    alibi: bool
    bias: bool
    out_proj: bool
    scale: float | None
    weights: Mapping[str, Any] | None
    seed: int


class Options(OptionsWithoutGroups, total=False):
    """Keywords that every mechanism with projections takes; see `ProjectedAttention`."""

    num_kv_heads: int | None


class ProjectedAttention(AttentionMechanism):
    """Multi-head attention with named projections, which subclasses give masks and positions.

        head_h = attention(x W_q[h], y W_k[h'], y W_v[h']),  h' = h // group_size
        out    = [head_0, ..., head_n] W_o

    Parameters
    ----------
    embed_dim, num_heads : int
        Width of x, and number of query heads.
    num_kv_heads : int, optional
        Key and value heads, a divisor of `num_heads`, which is the default.
    head_dim : int, optional
        `embed_dim // num_heads` unless given.
    kv_dim : int, optional
        Width of key and value input, `embed_dim` unless given.
    causal : bool
        Each token sees itself and what came before.
    rope : qkv.RoPE, optional
        Rotary positions.
    alibi : bool
        Linear biases, with the slopes of the paper.
    bias : bool
        Whether projections have one.
    out_proj : bool
        Whether the heads are projected back to embed_dim; if not, the output is the heads side by
        side.
    scale : float, optional
        What scores are multiplied by, `head_dim ** -0.5` unless given.
    weights : mapping of str to array, optional
        `q_proj.weight` (num_heads * head_dim, embed_dim), `k_proj.weight` and `v_proj.weight`
        (num_kv_heads * head_dim, kv_dim), `out_proj.weight` (embed_dim, num_heads * head_dim), and
        their biases; random by default.
    seed : int
        Seed of the random weights.

    Raises
    ------
    ArgumentError, ShapeError
        The sizes, or the weights, do not fit one another, or an option is unknown.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        **options: Unpack[Options],
    ) -> None:
        unknown = options.keys() - Options.__optional_keys__
        if unknown:
            raise ArgumentError(
                f"{self.name} has no option {', '.join(sorted(unknown))}.",
                action=f"Options are {', '.join(sorted(Options.__optional_keys__))}.",
            )
        positive_integers(embed_dim=embed_dim, num_heads=num_heads)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = options.get("num_kv_heads") or num_heads
        head_dim = options.get("head_dim")
        if head_dim is None and embed_dim % num_heads:
            raise ArgumentError(
                f"embed_dim={embed_dim} cannot be divided into num_heads={num_heads} heads.",
                action="Choose a multiple of num_heads, or pass head_dim.",
            )
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kv_dim = options.get("kv_dim") or embed_dim
        positive_integers(
            num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, kv_dim=self.kv_dim
        )
        if num_heads % self.num_kv_heads:
            raise ArgumentError(
                f"num_heads={num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}.",
                action="Let every group of query heads be of one size.",
            )
        self.causal = options.get("causal", False)
        self.rope, self.alibi = options.get("rope"), options.get("alibi", False)
        self.scale = options.get("scale")
        self.bias, self.out_proj = options.get("bias", True), options.get("out_proj", True)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, inner, outer in self._projections():
            shapes[f"{name}.weight"] = (int(outer), int(inner))
            if self.bias:
                shapes[f"{name}.bias"] = (int(outer),)
        shapes |= self.more_shapes()
        super().__init__(shapes, options.get("weights"), options.get("seed", 0))

    def more_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of weights besides the projections; none unless a subclass says."""
        return {}

    def _projections(self) -> list[tuple[str, Count, Count]]:
        """Names of the projections with the lengths of a row before and after."""
        e, c, h, g, d = symbols(
            e=self.embed_dim, c=self.kv_dim, h=self.num_heads, g=self.num_kv_heads, d=self.head_dim
        )
        g = h if self.num_kv_heads == self.num_heads else g
        c = e if self.kv_dim == self.embed_dim else c
        shapes = [("q_proj", e, h * d), ("k_proj", c, g * d), ("v_proj", c, g * d)]
        return shapes + [("out_proj", h * d, e)] * self.out_proj

    def heads(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Query, key and value heads `(..., heads, length, head_dim)`."""
        return (
            split_heads(self.linear("q_proj", query), self.num_heads),
            split_heads(self.linear("k_proj", key), self.num_kv_heads),
            split_heads(self.linear("v_proj", value), self.num_kv_heads),
        )

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """Rotary positions, linear biases and the causal mask, if any; subclasses add their own."""
        positions = (() if self.rope is None else (self.rope,)) + (ALiBi(),) * self.alibi
        return positions + (Causal(),) * self.causal

    def join(self, out: Any) -> Any:
        """The heads side by side, projected back."""
        rows = join_heads(out)
        return self.linear("out_proj", rows) if self.out_proj else rows

    def pairs(self, n: int) -> int:
        """How many pairs of a query and a key the masks allow among `n` tokens."""
        return n * (n + 1) // 2 if self.causal else n * n

    def pairs_of_heads(self, n: int) -> tuple[tuple[int, int], ...]:
        """Entries `(pairs, heads)`: pairs that the masks allow in each of so many heads."""
        (h,) = symbols(h=self.num_heads)
        return ((self.pairs(n), h),)

    def score_cost(self, pairs: int) -> Ledger:
        """The cost of the score variants for `pairs` pairs of one head."""
        if not self.alibi:
            return Ledger()
        return step("alibi", subtract=2 * pairs, multiply=pairs)

    def row_cost(self, rows: int) -> Ledger:
        """The cost of positions for `rows` query or key rows of one head."""
        if self.rope is None:
            return Ledger()
        turned = rows * len(self.rope.frequencies(self.head_dim))
        return step("rope", multiply=4 * turned, add=turned, subtract=turned)

    def cost(self, n: int, batch: int = 1, dtype: str = "float32") -> Ledger:
        """Operations, parameters and bytes for `batch` sequences of `n` tokens.

        Bytes are those of a fused kernel: x and the weights are read once, the output is written
        once, and scores stay in registers.

        Parameters
        ----------
        n, batch : int
        dtype : str
            The type in which arrays are stored.
        """
        positive_integers(n=n, batch=batch)
        (tokens,) = symbols(n=n)
        b = 1 if batch == 1 else Count(batch, "b")
        (q_proj, *_) = projections = self._projections()
        (h, g, d) = symbols(h=self.num_heads, g=self.num_kv_heads, d=self.head_dim)
        g = h if self.num_kv_heads == self.num_heads else g
        found = Ledger()
        for name, inner, outer in projections[:3]:
            found += projection(name, b * tokens, inner, outer, self.bias)
        q_heads: int = b * h
        kv_heads: int = b * g
        found += self.row_cost(tokens) * q_heads + self.row_cost(tokens) * kv_heads
        for pairs, heads in self.pairs_of_heads(tokens):
            found += (attention_over_pairs(pairs, tokens, d, d) + self.score_cost(pairs)) * (
                b * heads
            )
        for name, inner, outer in projections[3:]:
            found += projection(name, b * tokens, inner, outer, self.bias)
        more = self.parameters - found.parameters
        width = projections[-1][2] if self.out_proj else q_proj[2]
        read = b * tokens * q_proj[1] + found.parameters + more
        found += Ledger(parameters=more)
        return found + traffic(read, b * tokens * width, dtype)

    def steps_before(
        self,
        given: Sequence[Any],
        rows: Sequence[Any],
        index: int,
        tokens: Sequence[str],
        kv_tokens: Sequence[str],
    ) -> list[Step]:
        """Query of one token, and keys and values of all."""
        q, k, v = map(join_heads, rows)
        lines = [Line(f"x of {tokens[index]}", given[0][index].tolist())]
        lines.append(Line(f"q of {tokens[index]}", q[index].tolist()))
        for name, array in (("k", k), ("v", v)):
            lines += [
                Line(f"{name} of {token}", row.tolist())
                for token, row in zip(kv_tokens, array, strict=True)
            ]
        return [Step("Project", "q = W_q x, k = W_k x, v = W_v x", tuple(lines))]

    def steps_after(self, out: Any, index: int) -> list[Step]:
        """The heads side by side, and what the output projection makes of them."""
        steps = []
        if self.num_heads > 1:
            row = join_heads(out)[index].tolist()
            steps.append(Step("Join", "the heads side by side", (Line("o", row),)))
        if self.out_proj:
            row = self.join(out)[index].tolist()
            steps.append(Step("Project back", "W_o o", (Line("out", row),)))
        return steps

    @classmethod
    def for_example(
        cls, num_heads: int = 1, num_kv_heads: int | None = None, **options: Any
    ) -> Self:
        """An instance whose projections select Q, K and V of `example_input()`, without others.

        Parameters
        ----------
        num_heads, num_kv_heads : int
            Heads of 4 / num_heads columns each.
        **options
            Further keywords of the class.
        """
        head_dim = EXAMPLE_HEAD_DIM // num_heads
        kv_columns = head_dim * (num_kv_heads or num_heads)
        weights = {
            "q_proj.weight": select_columns(range(EXAMPLE_HEAD_DIM)),
            "k_proj.weight": select_columns(range(4, 4 + kv_columns)),
            "v_proj.weight": select_columns(range(8, 8 + kv_columns)),
            **options.pop("weights", {}),
        }
        return cls(
            EXAMPLE_WIDTH,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=False,
            out_proj=False,
            weights=weights,
            **options,
        )

    @classmethod
    def example(cls) -> Self:
        """One head of four numbers on the shared five tokens."""
        return cls.for_example()


def split_heads(rows: Any, num_heads: int) -> Any:
    """`(..., n, num_heads * head_dim)` as `(..., num_heads, n, head_dim)`.

    Examples
    --------
    >>> import numpy as np
    >>> split_heads(np.zeros((5, 12)), 3).shape
    (3, 5, 4)
    """
    namespace = array_namespace(rows)
    width = rows.shape[-1] // num_heads
    apart = namespace.reshape(rows, (*rows.shape[:-1], num_heads, width))
    return namespace.moveaxis(apart, -2, -3)


def join_heads(heads: Any) -> Any:
    """`(..., num_heads, n, head_dim)` as `(..., n, num_heads * head_dim)`.

    Examples
    --------
    >>> import numpy as np
    >>> join_heads(np.zeros((3, 5, 4))).shape
    (5, 12)
    """
    namespace = array_namespace(heads)
    turned = namespace.moveaxis(heads, -3, -2)
    return namespace.reshape(turned, (*turned.shape[:-2], turned.shape[-2] * turned.shape[-1]))


def refuse_options(mechanism: str, options: Mapping[str, Any], *names: str) -> None:
    """Refuse options of `ProjectedAttention` that mean nothing in this mechanism.

    Raises
    ------
    ArgumentError
        Naming the first that is given.
    """
    for name in names:
        if options.get(name):
            raise ArgumentError(
                f"{mechanism} does not take {name}: it has no n x n scores to change.",
                action=f"Leave {name} out.",
            )
