"""Multi-head latent attention of DeepSeek V2 and V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

import qkv
from qkv.arguments.declarations import NotNegative, Size, Whole
from qkv.ledger import Count, Ledger, attention_ledger, step, symbols
from qkv.mechanisms.base.arguments import refuse_one_by_one
from qkv.mechanisms.base.arrays.head_rows import join_heads, split_heads
from qkv.mechanisms.base.arrays.namespace import array_namespace
from qkv.mechanisms.base.arrays.normalization import weighted_rms_norm
from qkv.mechanisms.base.arrays.rows import Arrays, Rows
from qkv.mechanisms.base.attention import AttentionMechanism
from qkv.mechanisms.base.example import EXAMPLE_WIDTH, select_columns
from qkv.mechanisms.base.explanations.attention_steps import head_lines, token_lines
from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Line, Step
from qkv.mechanisms.base.llama import refuse_window
from qkv.mechanisms.base.modules.comparing import closest, decoder_run
from qkv.mechanisms.base.modules.loading import (
    layer_type_of,
    measured_norm,
    module_rope,
    named_weights,
    reads_module,
    refuse_other_parameters,
    require_attributes,
)
from qkv.mechanisms.base.operations import norm_of_rows, projection
from qkv.mechanisms.heads.latent_rows import check_latents, rotation_of_latents
from qkv.variants import Causal, RoPE

__all__ = ["MultiHeadLatent"]

_LAYOUTS: tuple[Literal["interleaved", "half_split"], ...] = ("interleaved", "half_split")


class MultiHeadLatent(AttentionMechanism):
    """Keys and values of all heads are made from one short latent row a token, which is cached.

        [c | k_rope] = x W_kv_a,        c = RMSNorm(c)
        [k_h | v_h]  = c W_kv_b[h],     q_h = [q_nope | q_rope] = RMSNorm(x W_q_a) W_q_b[h]
        s[i, j]      = (q_nope_h[i] . k_h[j] + R(q_rope_h[i]) . R(k_rope[j])) / sqrt(d)

    with `d = qk_nope_head_dim + qk_rope_head_dim`. Positions have numbers of their own, `k_rope`,
    which all heads share, because a rotation could not be absorbed.

    Absorbed, for decoding: `q_nope_h . k_h = (q_nope_h W_k[h]) . c`, so that all heads read the
    latent rows as they are, like multi-query attention with rows of `kv_lora_rank +
    qk_rope_head_dim` numbers, and no key or value is ever made.

    Parameters
    ----------
    embed_dim, num_heads : int
    kv_lora_rank : int
        Numbers of the latent row c.
    qk_nope_head_dim, qk_rope_head_dim, v_head_dim : int
        Numbers of a query or key row without and with positions, and of a value row.
    q_lora_rank : int, optional
        Numbers of the latent row of queries; without one, queries are projected from x.
    rope : qkv.RoPE, optional
        Rotary positions of the `qk_rope_head_dim` numbers; interleaved by default, as published.
    causal : bool
    latent_norm : bool
        Whether latent rows pass an RMSNorm with weights.
    eps : float
        Of the RMSNorm.
    bias : bool
        Whether the projections to latent rows and the output projection have one.
    out_proj : bool
    scale : float, optional
        What scores are multiplied by, `d ** -0.5` unless given.
    weights : mapping of str to array, optional
        Under the names that DeepSeek uses, and `out_proj.weight`; random by default.
    seed : int

    Raises
    ------
    ArgumentError
        If a size is not a positive integer.

    Notes
    -----
    Cache: `kv_lora_rank + qk_rope_head_dim` numbers a token and layer, 576 in DeepSeek-V3, and not
    `2 num_heads head_dim`. Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1, appendix C.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import MultiHeadLatent
    >>> layer = MultiHeadLatent(32, 4, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4,
    ...                         v_head_dim=6)
    >>> x = np.random.default_rng(0).normal(size=(5, 32))
    >>> bool(np.allclose(layer(x), layer.absorbed(x)))
    True
    """

    name = "multi-head-latent"
    paper = "DeepSeek-AI, DeepSeek-V2 (2024), section 2.1"
    formula = "softmax((q_nope . k + R(q_rope) . R(k_rope)) / sqrt(d)) V, [k | v] = c W_kv_b"
    compares_positions = True
    takes_value = False

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size,
        *,
        kv_lora_rank: Size,
        qk_nope_head_dim: Size,
        qk_rope_head_dim: Size,
        v_head_dim: Size,
        q_lora_rank: Size | None = None,
        rope: RoPE | None = None,
        causal: bool = True,
        latent_norm: bool = True,
        eps: NotNegative = 1e-6,
        bias: bool = False,
        out_proj: bool = True,
        scale: float | None = None,
        weights: Arrays | None = None,
        seed: Whole = 0,
    ) -> None:
        self.embed_dim, self.num_heads, self.kv_lora_rank = embed_dim, num_heads, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim, self.q_lora_rank = v_head_dim, q_lora_rank
        # Rotated entries come first in a row, because qkv.RoPE rotates the leading ones.
        self.rope = rotation_of_latents(rope, qk_rope_head_dim)
        self.causal, self.latent_norm, self.eps = causal, latent_norm, eps
        self.bias, self.out_proj = bias, out_proj
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 if scale is None else scale
        shapes: dict[str, tuple[int, ...]] = {}
        for name, inner, outer, has_bias in self._projections():
            shapes[f"{name}.weight"] = (int(outer), int(inner))
            if has_bias:
                shapes[f"{name}.bias"] = (int(outer),)
        if latent_norm:
            shapes["kv_a_layernorm.weight"] = (kv_lora_rank,)
            if q_lora_rank is not None:
                shapes["q_a_layernorm.weight"] = (q_lora_rank,)
        super().__init__(shapes, weights, seed)

    def _projections(self) -> list[tuple[str, Any, Any, bool]]:
        """Names of the projections, the lengths of a row before and after, whether with a bias."""
        e, h, c = symbols(e=self.embed_dim, h=self.num_heads, c=self.kv_lora_rank)
        r, p, v = symbols(r=self.qk_rope_head_dim, p=self.qk_nope_head_dim, v=self.v_head_dim)
        projections = [
            ("kv_a_proj_with_mqa", e, c + r, self.bias),
            ("kv_b_proj", c, h * (p + v), False),
        ]
        if self.q_lora_rank is None:
            projections.append(("q_proj", e, h * (p + r), False))
        else:
            (a,) = symbols(a=self.q_lora_rank)
            projections += [("q_a_proj", e, a, self.bias), ("q_b_proj", a, h * (p + r), False)]
        return projections + [("out_proj", h * v, e, self.bias)] * self.out_proj

    def initial_weight(
        self, name: str, shape: tuple[int, ...], rng: np.random.Generator
    ) -> NDArray[Any]:
        """An initial weight: ones for norms, else as in other mechanisms."""
        if "layernorm" in name:
            return np.ones(shape)
        return super().initial_weight(name, shape, rng)

    def queries(self, x: Any) -> tuple[Any, Any]:
        """Query rows with and without positions, `(..., num_heads, n, dim)` each."""
        if self.q_lora_rank is None:
            rows = self.linear("q_proj", x)
        else:
            rows = self.linear("q_b_proj", self._norm("q_a_layernorm", self.linear("q_a_proj", x)))
        apart = split_heads(rows, self.num_heads)
        return apart[..., self.qk_nope_head_dim :], apart[..., : self.qk_nope_head_dim]

    def latents(self, x: Rows) -> Any:
        """The cached rows of x: `[k_rope | c]`, `(..., n, qk_rope_head_dim + kv_lora_rank)`.

        `k_rope` is not yet turned.
        """
        rows = self.linear("kv_a_proj_with_mqa", x)
        c = self._norm("kv_a_layernorm", rows[..., : self.kv_lora_rank])
        return array_namespace(x).concat([rows[..., self.kv_lora_rank :], c], axis=-1)

    def heads(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Query, key and value rows of every head, the rotated numbers first."""
        namespace = array_namespace(query)
        q_rope, q_nope = self.queries(query)
        latents = self.latents(key)
        k_rope = latents[..., None, :, : self.qk_rope_head_dim]
        rows = self.linear("kv_b_proj", latents[..., self.qk_rope_head_dim :])
        apart = split_heads(rows, self.num_heads)
        k_nope, v = apart[..., : self.qk_nope_head_dim], apart[..., self.qk_nope_head_dim :]
        k_rope = namespace.broadcast_to(k_rope, (*k_nope.shape[:-1], self.qk_rope_head_dim))
        q = namespace.concat([q_rope, q_nope], axis=-1)
        return q, namespace.concat([k_rope, k_nope], axis=-1), v

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """Rotary positions of the leading numbers, and the causal mask if there is one."""
        return (self.rope, *(Causal(),) * self.causal)

    def join(self, out: Any) -> Any:
        """The heads side by side, projected back."""
        rows = join_heads(out)
        return self.linear("out_proj", rows) if self.out_proj else rows

    def absorbed(self, x: Rows, latents: Rows | None = None) -> Any:
        """The same output from latent rows, without making keys and values.

        Parameters
        ----------
        x : array (..., n, embed_dim)
        latents : array (..., m, qk_rope_head_dim + kv_lora_rank), optional
            Those of all tokens, of which x are the last n; those of x by default.

        Returns
        -------
        array (..., n, embed_dim)

        Raises
        ------
        DTypeError, ShapeError
            As `step`.
        """
        namespace = array_namespace(x)
        if latents is None:
            latents = self.latents(x)
        check_latents(latents, x, self.qk_rope_head_dim + self.kv_lora_rank, x.shape[-2])
        q_rope, q_nope = self.queries(x)
        key_part, value_part = self._absorbed_weights(x)
        q = namespace.concat([q_rope, namespace.matmul(q_nope, key_part)], axis=-1)
        rows = latents[..., None, :, :]
        out = qkv.attention(
            q,
            rows,
            rows[..., self.qk_rope_head_dim :],
            *self.variants(q, rows),
            scale=self.scale,
            q_offset=latents.shape[-2] - x.shape[-2],
        )
        return self.join(namespace.matmul(out, namespace.matrix_transpose(value_part)))

    def step(self, x: Rows, latents: Rows | None = None) -> tuple[Any, Any]:
        """Decode the next tokens in the absorbed form.

        Parameters
        ----------
        x : array (..., n, embed_dim)
            The next tokens, usually one.
        latents : array (..., m, qk_rope_head_dim + kv_lora_rank), optional
            What the last step returned; None at the beginning.

        Returns
        -------
        (array, array)
            Output of the tokens, and the latent rows of all tokens so far.

        Raises
        ------
        UnsupportedError
            The mechanism is not causal.
        DTypeError, ShapeError
            The latent rows are not those of a step before.
        """
        refuse_one_by_one(self.name, causal=self.causal)
        new = self.latents(x)
        if latents is not None:
            check_latents(latents, x, new.shape[-1])
        whole = new if latents is None else array_namespace(x).concat([latents, new], axis=-2)
        return self.absorbed(x, whole), whole

    def _absorbed_weights(self, x: Any) -> tuple[Any, Any]:
        """The parts of kv_b_proj, `(num_heads, dim, kv_lora_rank)` of keys and of values."""
        weight = self.weight("kv_b_proj.weight", x)
        width = self.qk_nope_head_dim + self.v_head_dim
        shape = (self.num_heads, width, self.kv_lora_rank)
        parts = array_namespace(x).reshape(weight, shape)
        return parts[:, : self.qk_nope_head_dim, :], parts[:, self.qk_nope_head_dim :, :]

    def _norm(self, name: str, rows: Any) -> Any:
        if not self.latent_norm:
            return rows
        return weighted_rms_norm(rows, self.weight(f"{name}.weight", rows), self.eps)

    def steps_before(self, token: ExplainedToken, query: Any, key: Any, value: Any) -> list[Step]:
        """The latent rows, and what queries, keys and values are made of."""
        cached = token_lines(token.kv_tokens, self.latents(token.key))
        made = tuple(head_lines(token, query, key, value))
        return [
            Step("Latent rows", "[k_rope | c], all that a cache keeps", cached),
            Step("Heads", "q = [q_rope | q_nope], k = [k_rope | c W_k], v = c W_v", made),
        ]

    def steps_after(self, out: Any, index: int) -> list[Step]:
        """The heads side by side, projected back."""
        line = Line("out", self.join(out)[index].tolist())
        return [Step("Join", "the heads side by side, projected back if they are", (line,))]

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of the form that is not absorbed."""
        h, v = symbols(h=self.num_heads, v=self.v_head_dim)
        r, p = symbols(r=self.qk_rope_head_dim, p=self.qk_nope_head_dim)
        rows: int = batch * tokens
        heads: int = batch * h
        ledger = Ledger()
        for name, inner, outer, has_bias in self._projections():
            ledger += projection(name, rows, inner, outer, has_bias)
        if self.latent_norm:
            for rank in (self.kv_lora_rank, *([self.q_lora_rank] if self.q_lora_rank else [])):
                ledger += norm_of_rows("norm", rows, rank)
        rotated = rows * (h + 1) * r // 2
        ledger += step("rope", multiply=4 * rotated, add=rotated, subtract=rotated)
        pairs = tokens * (tokens + 1) // 2 if self.causal else tokens * tokens
        return ledger + attention_ledger(pairs, tokens, p + r, v) * heads

    def widths(self) -> tuple[int, int]:
        """The widths of x and of the output."""
        e, h, v = symbols(e=self.embed_dim, h=self.num_heads, v=self.v_head_dim)
        return e, e if self.out_proj else h * v

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any, rope: RoPE | None = None) -> Self:
        """The mechanism with the weights of a DeepseekV2Attention or DeepseekV3Attention.

        Parameters
        ----------
        module : transformers attention module with `kv_a_proj_with_mqa`
        rope : qkv.RoPE, optional
            Its positions, instead of those that its configuration describes; `inv_freq` and
            `attention_factor` are the model's.

        Raises
        ------
        UnsupportedError
            The module has a weight or a step that the mechanism has not, as a comparison on random
            input shows; or the frequencies of its positions change with the length of the text and
            `rope` is not given.
        """
        require_attributes(module, ("config", "scaling", "kv_a_layernorm"))
        refuse_window(module, cls.name)
        names = ["kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"]
        latent = getattr(module, "q_a_proj", None) is not None
        names += ["q_a_proj", "q_a_layernorm", "q_b_proj"] if latent else ["q_proj"]
        weights = named_weights(module, names) | named_weights(module, {"out_proj": "o_proj"})
        refuse_other_parameters(module, [*names, "o_proj"], cls.name)
        layer_type, num_heads = layer_type_of(module), module.config.num_attention_heads
        given = module_rope(module.config, layer_type, rope) or RoPE(layout="interleaved")
        both, kv_lora_rank = weights["kv_b_proj.weight"].shape
        latent_rows, embed_dim = weights["kv_a_proj_with_mqa.weight"].shape
        v_head_dim = weights["out_proj.weight"].shape[1] // num_heads
        candidates = [
            (
                f"rotation with layout {layout!r}",
                cls(
                    embed_dim,
                    num_heads,
                    kv_lora_rank=kv_lora_rank,
                    qk_nope_head_dim=both // num_heads - v_head_dim,
                    qk_rope_head_dim=latent_rows - kv_lora_rank,
                    v_head_dim=v_head_dim,
                    q_lora_rank=weights["q_a_proj.weight"].shape[0] if latent else None,
                    rope=replace(given, layout=layout),
                    eps=measured_norm(module, "kv_a_layernorm")[1],
                    bias="kv_a_proj_with_mqa.bias" in weights,
                    scale=module.scaling,
                    weights=weights,
                ),
            )
            for layout in ((given.layout,) if rope else _LAYOUTS)
        ]
        return closest(module, candidates, decoder_run(given, layer_type), embed_dim)

    @classmethod
    def example(cls) -> Self:
        """Two heads; the last two columns of K are k_rope, and c is the rest of K and all of V."""
        weights = {
            # The query of head h is column h of Q and the last two columns, which are rotated.
            "q_proj.weight": select_columns([0, 2, 3, 1, 2, 3]),
            "kv_a_proj_with_mqa.weight": select_columns([4, 5, 8, 9, 10, 11, 6, 7]),
            # Head h has k = K[h] and v = V[2 h], V[2 h + 1].
            "kv_b_proj.weight": select_columns([0, 2, 3, 1, 4, 5], width=6),
        }
        return cls(
            EXAMPLE_WIDTH,
            2,
            kv_lora_rank=6,
            qk_nope_head_dim=1,
            qk_rope_head_dim=2,
            v_head_dim=2,
            causal=False,
            latent_norm=False,
            out_proj=False,
            weights=weights,
        )
