"""The base of mechanisms that project x to heads, attend, and project back."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import NotNegative, Positive, Size, Whole, shown
from qkv.errors import ArgumentError
from qkv.ledger import Count, Ledger, attention_ledger, step, symbols
from qkv.mechanisms.base.arguments import (
    refuse_other_values,
    refuse_other_widths,
    refuse_unknown_options,
)
from qkv.mechanisms.base.arrays.head_rows import join_heads, split_heads
from qkv.mechanisms.base.arrays.normalization import weighted_rms_norm
from qkv.mechanisms.base.arrays.rows import Arrays
from qkv.mechanisms.base.attention import AttentionMechanism
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM, EXAMPLE_WIDTH, select_columns
from qkv.mechanisms.base.explanations.attention_steps import head_lines
from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Line, Step
from qkv.mechanisms.base.modules.loading import reads_module, torch_multi_head
from qkv.mechanisms.base.operations import norm_of_rows, projection
from qkv.variants import ALiBi, Causal, RoPE, Sinks, Softcap

__all__ = ["Options", "OptionsWithoutGroups", "ProjectedAttention"]


class OptionsWithoutGroups(TypedDict, total=False):
    """Keywords of `ProjectedAttention` but num_kv_heads."""

    head_dim: Size | None
    kv_dim: Size | None
    causal: bool
    rope: RoPE | None
    alibi: bool
    bias: bool
    out_proj: bool
    scale: float | None
    qk_norm: Literal["head", "all heads"] | None
    qk_norm_eps: NotNegative
    softcap: Positive | None
    sinks: bool
    weights: Arrays | None
    seed: Whole


class Options(OptionsWithoutGroups, total=False):
    """Keywords that every mechanism with projections takes; see `ProjectedAttention`."""

    num_kv_heads: Size | None


class ProjectedAttention(AttentionMechanism):
    """Multi-head attention with named projections, which subclasses give masks and positions.

        head_h = attention(x W_q[h], y W_k[h'], y W_v[h']),  h' = h // group_size
        out    = [head_0, head_1, ...] W_o

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
    qk_norm : "head" or "all heads", optional
        RMSNorm of queries and keys before their positions: of each head's row, with one weight for
        all heads (Qwen 3, Gemma 3), or of the rows of all heads side by side (OLMo 2).
    qk_norm_eps : float
        Its epsilon, 1e-6 unless given.
    softcap : float, optional
        Scores are `softcap * tanh(score / softcap)` (Gemma 2).
    sinks : bool
        Whether `exp(sinks[head])` enters the denominator of the softmax (gpt-oss).
    weights : mapping of str to array, optional
        `q_proj.weight` (num_heads * head_dim, embed_dim), `k_proj.weight` and `v_proj.weight`
        (num_kv_heads * head_dim, kv_dim), `out_proj.weight` (embed_dim, num_heads * head_dim), and
        their biases; `q_norm.weight`, `k_norm.weight` and `sinks` (num_heads,) with these options;
        random by default.
    seed : int
        Seed of the random weights.

    Raises
    ------
    ArgumentError, ShapeError
        The sizes, or the weights, do not fit one another, or an option is unknown.
    """

    default_options: ClassVar[Options] = {}
    """Options of a subclass that a caller may override."""
    fixed_options: ClassVar[Options] = {}
    """Options that define a subclass; a caller may not pass other values."""
    refused_options: ClassVar[tuple[str, ...]] = ()
    """Options that mean nothing in a subclass."""

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        **options: Unpack[Options],
    ) -> None:
        refuse_other_values(self.name, options, self.fixed_options)
        options = {**self.default_options, **options, **self.fixed_options}
        own = Options.__optional_keys__ - {*self.refused_options, *self.fixed_options}
        refuse_unknown_options(type(self), options.keys() - Options.__optional_keys__, own)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        kv_heads, kv_dim = options.get("num_kv_heads"), options.get("kv_dim")
        self.num_kv_heads = num_heads if kv_heads is None else kv_heads
        head_dim = options.get("head_dim")
        if head_dim is None and embed_dim % num_heads:
            raise ArgumentError(
                f"embed_dim={embed_dim} cannot be divided into num_heads={num_heads} heads.",
                action="Choose a multiple of num_heads, or pass head_dim.",
            )
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.kv_dim = embed_dim if kv_dim is None else kv_dim
        if self.one_sequence_only and self.kv_dim != embed_dim:
            raise ArgumentError(
                f"kv_dim={kv_dim}: {self.name} reads one sequence, of embed_dim={embed_dim}.",
                action="Leave kv_dim out, or use Cross.",
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
        self.softcap, self.sinks = options.get("softcap"), options.get("sinks", False)
        self.qk_norm = options.get("qk_norm")
        self.qk_norm_eps = options.get("qk_norm_eps", 1e-6)
        if self.qk_norm not in (None, "head", "all heads"):
            raise ArgumentError(
                f"qk_norm={shown(self.qk_norm)} is not a norm of queries and keys.",
                action='Pass "head" or "all heads".',
            )
        shapes: dict[str, tuple[int, ...]] = {}
        for name, inner, outer in self._projections():
            shapes[f"{name}.weight"] = (int(outer), int(inner))
            if self.bias:
                shapes[f"{name}.bias"] = (int(outer),)
        shapes |= self._shapes_between() | self.more_shapes()
        super().__init__(shapes, options.get("weights"), options.get("seed", 0))

    def more_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of weights besides the projections; none unless a subclass says."""
        return {}

    def _shapes_between(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights of the norms and of the sinks."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.qk_norm:
            for side, heads in (("q", self.num_heads), ("k", self.num_kv_heads)):
                together = heads if self.qk_norm == "all heads" else 1
                shapes[f"{side}_norm.weight"] = (together * self.head_dim,)
        return shapes | ({"sinks": (self.num_heads,)} if self.sinks else {})

    def initial_weight(
        self, name: str, shape: tuple[int, ...], rng: np.random.Generator
    ) -> NDArray[Any]:
        """An initial weight: ones for norms, zeros for sinks, else as in other mechanisms."""
        if name in ("q_norm.weight", "k_norm.weight"):
            return np.ones(shape)
        return np.zeros(shape) if name == "sinks" else super().initial_weight(name, shape, rng)

    def _projections(self) -> list[tuple[str, Count, Count]]:
        """Names of the projections with the lengths of a row before and after."""
        e, c, h, g, d = symbols(
            e=self.embed_dim, c=self.kv_dim, h=self.num_heads, g=self.num_kv_heads, d=self.head_dim
        )
        g = h if self.num_kv_heads == self.num_heads else g
        c = e if self.kv_dim == self.embed_dim else c
        shapes = [("q_proj", e, h * d), ("k_proj", c, g * d), ("v_proj", c, g * d)]
        return shapes + [("out_proj", h * d, e)] * self.out_proj

    @property
    def compares_positions(self) -> bool:
        """Whether an option or the subclass does."""
        return self.causal or self.alibi or self.rope is not None

    def sequences(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """What queries, keys and values are made of.

        Raises
        ------
        ShapeError
            Rows are not as long as the weights read.
        """
        query, key, value = super().sequences(x, key, value)
        refuse_other_widths(self.name, "x", query, self.embed_dim)
        refuse_other_widths(self.name, "key", key, self.kv_dim)
        refuse_other_widths(self.name, "value", value, self.kv_dim)
        return query, key, value

    def heads(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Query, key and value heads `(..., heads, length, head_dim)`."""
        return (
            self.query_or_key("q_proj", query, self.num_heads),
            self.query_or_key("k_proj", key, self.num_kv_heads),
            split_heads(self.linear("v_proj", value), self.num_kv_heads),
        )

    def query_or_key(self, projected: str, x: Any, num_heads: int) -> Any:
        """Rows of each head by a projection such as "q_proj", normalised if there is a norm."""
        rows, side = self.linear(projected, x), projected[0]
        apart = split_heads(rows, num_heads)
        if self.qk_norm is None:
            return apart
        weight = self.weight(f"{side}_norm.weight", x)
        if self.qk_norm == "head":
            return weighted_rms_norm(apart, weight, self.qk_norm_eps)
        return split_heads(weighted_rms_norm(rows, weight, self.qk_norm_eps), num_heads)

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """Positions, soft cap, sinks and the causal mask, if any; subclasses add their own."""
        variants: list[Any] = [] if self.rope is None else [self.rope]
        variants += [ALiBi()] * self.alibi
        variants += [] if self.softcap is None else [Softcap(self.softcap)]
        variants += [Sinks(self.weight("sinks", query))] if self.sinks else []
        return (*variants, *(Causal(),) * self.causal)

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
        ledger = step("alibi", subtract=2 * pairs, multiply=pairs) if self.alibi else Ledger()
        if self.softcap is not None:
            ledger += step("softcap", divide=pairs, tanh=pairs, multiply=pairs)
        return ledger

    def norm_cost(self, rows: int, heads: int) -> Ledger:
        """The cost of the norm of `rows` query or key rows of so many heads, with its weight."""
        if not self.qk_norm:
            return Ledger()
        (d,) = symbols(d=self.head_dim)
        together = self.qk_norm == "all heads"
        number, width = (rows, heads * d) if together else (rows * heads, d)
        return norm_of_rows("qk_norm", number, width)

    def position_cost(self, rows: int) -> Ledger:
        """The cost of positions for `rows` query or key rows of one head."""
        if self.rope is None:
            return Ledger()
        turned = rows * len(self.rope.frequencies(self.head_dim))
        return step("rope", multiply=4 * turned, add=turned, subtract=turned)

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of projections, of positions, and of attention over the allowed pairs."""
        return self.operations_between(tokens, tokens, self.pairs_of_heads(tokens), batch)

    def operations_between(
        self, q_len: int, kv_len: int, pairs_of_heads: tuple[tuple[int, int], ...], batch: int
    ) -> Ledger:
        """The operations of `q_len` queries and `kv_len` keys, which attend in the given pairs."""
        h, g, d = symbols(h=self.num_heads, g=self.num_kv_heads, d=self.head_dim)
        g = h if self.num_kv_heads == self.num_heads else g
        lengths = (q_len, kv_len, kv_len, q_len)
        projections = [
            projection(name, batch * rows, inner, outer, self.bias)
            for (name, inner, outer), rows in zip(self._projections(), lengths, strict=False)
        ]
        ledger = sum(projections[:3], Ledger())
        for rows, heads in ((q_len, h), (kv_len, g)):
            ledger += self.norm_cost(batch * rows, heads)
            ledger += self.position_cost(rows) * (batch * heads)
        if self.sinks:
            # A sink is one more term of each row's maximum and of its sum.
            terms = batch * h * q_len
            ledger += step("sinks", compare=terms, subtract=terms, exp=terms, add=terms)
        for pairs, count in pairs_of_heads:
            each = attention_ledger(pairs, q_len, d, d, scaled=self.scale != 1)
            each += self.score_cost(pairs)
            ledger += each * (batch * count)
        return sum(projections[3:], ledger)

    def widths(self) -> tuple[int, int]:
        """The widths of x and of the output."""
        (_, width, heads), *_ = self._projections()
        return width, width if self.out_proj else heads

    def steps_before(self, token: ExplainedToken, query: Any, key: Any, value: Any) -> list[Step]:
        """Query of one token, and keys and values of all."""
        lines = [Line(f"x of {token.name}", token.query[token.index].tolist())]
        lines += head_lines(token, query, key, value)
        norm = "RMSNorm({})" if self.qk_norm else "{}"
        q, k, v = (f"x W_{side}" + f" + b_{side}" * self.bias for side in "qkv")
        formula = f"q = {norm.format(q)}, k = {norm.format(k)}, v = {v}"
        return [Step("Project", formula, tuple(lines))]

    def steps_after(self, out: Any, index: int) -> list[Step]:
        """The heads side by side, and what the output projection makes of them."""
        steps = []
        if self.num_heads > 1:
            row = join_heads(out)[index].tolist()
            steps.append(Step("Join", "the heads side by side", (Line("o", row),)))
        if self.out_proj:
            row = self.join(out)[index].tolist()
            formula = "o W_o" + " + b_o" * self.bias
            steps.append(Step("Project back", formula, (Line("out", row),)))
        return steps

    @classmethod
    @reads_module
    def from_torch(cls, module: Any, **options: Any) -> Self:
        """The mechanism with the weights of a `torch.nn.MultiheadAttention`.

        Parameters
        ----------
        module : torch.nn.MultiheadAttention
        **options
            Further keywords of the class, such as `causal`, or `left` of a sliding window; weights
            that the module does not have are given as `weights`.

        Raises
        ------
        UnsupportedError
            The module adds keys and values of its own, or its keys and values differ in width.
        ArgumentError
            The module is another, or the mechanism has weights that are neither in it nor given.
        """
        arguments = torch_multi_head(module)
        weights = {**arguments.pop("weights"), **options.pop("weights", {})}
        return cls(**arguments, **{"out_proj": True, **options}, weights=weights)

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
