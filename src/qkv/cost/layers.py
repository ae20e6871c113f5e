"""Operations, parameters and bytes of one layer of a model.

Every matrix product reads its input and its weights once and writes its output. What is done
number by number (norms, rotation, activation, residual sums) is taken to happen on the way, and
attention to keep its scores on the chip, as a fused kernel does.
"""

from __future__ import annotations

from typing import NamedTuple

from qkv.cost.model import Attention, FeedForward, Layer, Model, Norm
from qkv.ledger import (
    Count,
    Ledger,
    as_count,
    attended_pairs,
    attention_ledger,
    matmul,
    softmax,
    step,
)

__all__ = [
    "ACTIVATIONS",
    "PassSizes",
    "embedding_ledger",
    "head_ledger",
    "idle_parameters",
    "layer_ledger",
]

ACTIVATIONS: dict[str, dict[str, int]] = {
    "silu": {"exp": 1, "add": 1, "divide": 1},
    "gelu": {"multiply": 6, "add": 2, "tanh": 1},
    "relu": {"compare": 1},
}
"""Operations for each number; GELU by its usual approximation with tanh."""


class PassSizes(NamedTuple):
    """The sizes of one forward pass.

    Attributes
    ----------
    batch : Count
        Sequences.
    tokens : Count
        New tokens of each sequence: all of them, or one while decoding.
    context : Count
        Tokens of each sequence, the new ones included.
    size : Count
        Bytes of a number.
    source : Count
        Tokens that an encoder read, for each sequence.
    """

    batch: Count
    tokens: Count
    context: Count
    size: Count
    source: Count = Count(0)

    @property
    def rows(self) -> Count:
        """New tokens of all sequences."""
        rows: Count = self.batch * self.tokens
        return rows

    @property
    def decoding(self) -> bool:
        """Whether earlier tokens come from a cache."""
        return self.tokens < self.context


def layer_ledger(model: Model, layer: Layer, run: PassSizes) -> Ledger:
    """The cost of one layer.

    Parameters
    ----------
    model : Model
        The width and the kind of normalisation are read.
    layer : Layer
    run : PassSizes
    """
    width = Count(model.width, "e")
    attention = layer.attention
    counted = (_latent if attention.latent else _attention)(attention, width, run)
    if layer.norms:
        counted = _norm("norm", model.norm, run.rows, width) * layer.norms + counted
    if not attention.projections:
        return counted
    counted += step("residual", add=run.rows * width)
    if layer.cross is not None:
        counted += _cross(layer.cross, width, run) + step("residual", add=run.rows * width)
    if layer.feed_forward is not None:
        counted += _feed_forward(layer.feed_forward, width, run)
        counted += step("residual", add=run.rows * width)
    return counted


def embedding_ledger(model: Model, run: PassSizes) -> Ledger:
    """Looking up tokens, and every learned table outside the layers."""
    width, vocabulary = Count(model.width, "e"), Count(model.vocab_size, "V")
    row = _row_of_table(model)
    read = run.rows * row if model.vocab_size else Count(0)
    tables = Ledger(
        parameters=vocabulary * row + sum(model.tables.values()),
        bytes_read=read * run.size,
        bytes_written=read * run.size,
    )
    if row != width:
        tables += _linear("project_in", run.rows, row, width, model.embed_bias, run.size)
    if not model.final_norm:
        return tables
    return tables + _norm("final_norm", model.norm, run.rows, width)


def head_ledger(model: Model, run: PassSizes) -> Ledger:
    """Scores of the vocabulary for the last token of each sequence."""
    if not model.head:
        return Ledger()
    width, vocabulary, row = (
        Count(model.width, "e"),
        Count(model.vocab_size, "V"),
        _row_of_table(model),
    )
    counted = _linear("head", run.batch, row, vocabulary, False, run.size)
    if row != width:
        counted = _linear("project_out", run.batch, width, row, False, run.size) + counted
    return counted + Ledger(parameters=-(vocabulary * row)) if model.tied else counted


def _row_of_table(model: Model) -> Count:
    row = model.embed_width or model.width
    return Count(row, "e" if row == model.width else "e_t")


def _linear(name: str, rows: int, inner: int, columns: int, bias: bool, size: int) -> Ledger:
    """`(rows, inner) @ (inner, columns)`, the second of them weights."""
    parameters = inner * columns + columns * int(bias)
    moved = Ledger(
        parameters=as_count(parameters),
        bytes_read=as_count((rows * inner + parameters) * size),
        bytes_written=as_count(rows * columns * size),
    )
    product = matmul(name, rows, inner, columns)
    return product + moved + (step(name, add=rows * columns) if bias else Ledger())


def _norm(name: str, norm: Norm, rows: Count, width: Count) -> Ledger:
    """Squares, their mean, a root, a division; LayerNorm subtracts the mean first."""
    mean = rows * (width - 1)
    one, each = rows * 1, rows * width
    counted = step(
        name, multiply=each * (1 + norm.weight), add=mean + one, divide=one + each, sqrt=one
    )
    if norm.centred:
        counted += step(name, add=mean, divide=one, subtract=each)
    if norm.bias:
        counted += step(name, add=each)
    return counted + Ledger(parameters=as_count(norm.parameters(1) * width))


def _rotation(rows: Count, heads: int, rope_dim: int) -> Ledger:
    """Each pair of components takes four multiplications, an addition and a subtraction."""
    pairs = rows * heads * (rope_dim // 2)
    return step("rope", multiply=4 * pairs, add=pairs, subtract=pairs) if rope_dim else Ledger()


def _pairs(attention: Attention, run: PassSizes) -> Count:
    """Pairs of query and key for one head of all sequences."""
    left = None
    if attention.window is not None:
        window = Count(attention.window, "w")
        left = window - 1 if attention.causal else Count(attention.window // 2, "w_side")
    pairs = attended_pairs(run.tokens, run.context, causal=attention.causal, left=left)
    all_pairs: Count = run.batch * pairs
    return all_pairs


def _cache(attention: Attention, run: PassSizes) -> Ledger:
    """Reading what earlier tokens left; what new ones leave is written by their projections."""
    held = attention.cached_tokens(run.context) if run.decoding else int(run.context)
    named = run.context if held == run.context else Count(held, "w")
    return Ledger(bytes_read=run.batch * named * attention.cached_numbers * run.size)


def _attention(attention: Attention, width: Count, run: PassSizes) -> Ledger:
    rows, size = run.rows, run.size
    h, g = Count(attention.num_heads, "h"), Count(attention.num_kv_heads, "g")
    d = Count(attention.head_dim, "d")
    d_v = d if attention.v_head_dim == d else Count(attention.v_head_dim, "d_v")
    core = attention_ledger(_pairs(attention, run), rows, d, d_v, scaled=attention.scaled) * h
    core += _cache(attention, run)
    core += Ledger(bytes_read=rows * h * d * size, bytes_written=rows * h * d_v * size)
    if not attention.projections:
        return core
    bias = attention.qkv_bias
    counted = _linear("q_proj", rows, width, h * d, bias, size)
    counted += _linear("k_proj", rows, width, g * d, bias and attention.key_bias, size)
    counted += _linear("v_proj", rows, width, g * d_v, bias, size)
    of_qk = attention.norm_of_qk
    for name, heads in (("q_norm", h), ("k_norm", g)) if attention.qk_norm else ():
        if attention.qk_norm == "full":
            counted += _norm(name, of_qk, rows, heads * d)
        else:
            counted += _norm(name, of_qk, rows * heads, d)
        if attention.qk_norm == "heads":
            counted += Ledger(parameters=as_count(of_qk.parameters(1) * (heads - 1) * d))
    counted += _rotation(rows, h, attention.rope_dim) + _rotation(rows, g, attention.rope_dim)
    if attention.pair_width:
        pairs, channels = run.tokens * run.context, Count(attention.pair_width, "c")
        counted += _norm("pair_norm", Norm(centred=True, bias=True), pairs, channels)
        counted += _linear("pair_bias", pairs, channels, h, False, size)
        counted += step("pair_bias", add=_pairs(attention, run) * h)
    counted += core
    if attention.relative_bias:
        counted += step("relative_bias", add=_pairs(attention, run) * h)
    if attention.sinks:
        # The sink is one more term of each row's sum and of its maximum.
        extra = rows * h
        sink = step("sink", compare=extra, subtract=extra, exp=extra, add=extra)
        counted += sink + Ledger(parameters=h)
    if attention.gate:
        each = rows * h * d_v
        counted += _linear("gate", rows, width, h * d_v, True, size)
        counted += step("gate", exp=each, add=each, divide=each, multiply=each)
    return counted + _linear("out_proj", rows, h * d_v, width, attention.out_bias, size)


def _cross(attention: Attention, width: Count, run: PassSizes) -> Ledger:
    """Attention to the source, whose keys and values are made once and kept while decoding.

    Where nobody says what is read, only the parameters are counted.
    """
    rows, size, bias = run.rows, run.size, attention.qkv_bias
    h, g = Count(attention.num_heads, "h"), Count(attention.num_kv_heads, "g")
    d, source = Count(attention.head_dim, "d"), run.batch * run.source
    counted = _linear("cross_q_proj", rows, width, h * d, bias, size)
    for name, has_bias in (("k", bias and attention.key_bias), ("v", bias)):
        made = _linear(f"cross_{name}_proj", source, width, g * d, has_bias, size)
        counted += Ledger(parameters=made.parameters) if run.decoding else made
    if not int(run.source):
        made = _linear("cross_out_proj", rows, h * d, width, attention.out_bias, size)
        return Ledger(parameters=counted.parameters + made.parameters)
    counted += attention_ledger(rows * run.source, rows, d, d, scaled=attention.scaled) * h
    counted += Ledger(
        bytes_read=(rows * h * d + source * attention.cached_numbers) * size,
        bytes_written=rows * h * d * size,
    )
    return counted + _linear("cross_out_proj", rows, h * d, width, attention.out_bias, size)


def _latent(attention: Attention, width: Count, run: PassSizes) -> Ledger:
    """Multi-head latent attention; while decoding in its absorbed form.

    Absorbed, a query is taken into the latent space, where all heads attend to the cached rows
    themselves, and the result is taken out of it: keys and values are never made.
    """
    latent = attention.latent
    assert latent is not None
    rows, size, bias = run.rows, run.size, attention.qkv_bias
    h, r, p = (
        Count(attention.num_heads, "h"),
        Count(latent.rank, "r"),
        Count(latent.rope_dim, "p"),
    )
    plain, d_v = (
        Count(attention.head_dim - latent.rope_dim, "d"),
        Count(attention.v_head_dim, "d_v"),
    )
    counted = Ledger()
    if latent.query_rank:
        rank = Count(latent.query_rank, "r_q")
        counted += _linear("q_a_proj", rows, width, rank, bias, size)
        counted += _norm("q_a_norm", Norm(), rows, rank)
        counted += _linear("q_b_proj", rows, rank, h * (plain + p), False, size)
    else:
        counted += _linear("q_proj", rows, width, h * (plain + p), False, size)
    counted += _linear("kv_a_proj", rows, width, r + p, bias, size)
    counted += _norm("kv_a_norm", Norm(), rows, r)
    counted += _rotation(rows, h, latent.rope_dim) + _rotation(rows, 1, latent.rope_dim)
    pairs = _pairs(attention, run)
    if run.decoding:
        counted += matmul("absorb_key", rows, plain, r) * h
        counted += attention_ledger(pairs, rows, r + p, r) * h
        counted += matmul("absorb_value", rows, r, d_v) * h
        counted += Ledger(
            parameters=r * h * (plain + d_v),
            bytes_read=(r * h * (plain + d_v) + rows * h * (plain + p)) * size,
            bytes_written=rows * h * d_v * size,
        )
        counted += _cache(attention, run)
    else:
        counted += _linear("kv_b_proj", rows, r, h * (plain + d_v), False, size)
        counted += attention_ledger(pairs, rows, plain + p, d_v) * h
        counted += Ledger(
            bytes_read=rows * (2 * h * plain + h * p + p + h * d_v) * size,
            bytes_written=rows * h * d_v * size,
        )
    return counted + _linear("out_proj", rows, h * d_v, width, attention.out_bias, size)


def _feed_forward(forward: FeedForward, width: Count, run: PassSizes) -> Ledger:
    hidden = Count(forward.width, "f")
    if not forward.experts:
        return _hidden(forward, "", run.rows, width, hidden, run.size)
    experts, chosen = Count(forward.experts, "E"), Count(forward.experts_per_token, "k")
    one = _hidden(forward, "expert_", run.rows, width, hidden, run.size)
    # Each token goes through k experts. Bytes moved are the weights of every chosen expert,
    # at most k for each token, and each token's rows k times.
    weights = one.parameters * run.size
    rows_read = one.bytes_read - weights
    used = experts if experts <= run.rows * chosen else run.rows * chosen
    counted = Ledger(
        (one * chosen).operations,
        (one * chosen).space,
        one.parameters * experts,
        rows_read * chosen + weights * used,
        one.bytes_written * chosen,
    )
    counted += _linear("router", run.rows, width, experts, forward.router_bias, run.size)
    # The k largest of E scores by k passes, and a softmax over them.
    counted += step("router", compare=run.rows * chosen * (experts - 1))
    counted += softmax("router_softmax", run.rows, chosen)
    sums = max(chosen - 1, 0) + bool(forward.shared_width)
    counted += step("combine", multiply=run.rows * chosen * width, add=run.rows * sums * width)
    if forward.shared_width:
        shared = Count(forward.shared_width, "f_s")
        counted += _hidden(forward, "shared_", run.rows, width, shared, run.size)
        if forward.shared_gate:
            counted += _linear("shared_gate", run.rows, width, Count(1), False, run.size)
    return counted


def _hidden(
    forward: FeedForward, name: str, rows: Count, width: Count, hidden: Count, size: Count
) -> Ledger:
    counted = _linear(f"{name}up_proj", rows, width, hidden, forward.bias, size)
    if forward.gated:
        counted += _linear(f"{name}gate_proj", rows, width, hidden, forward.bias, size)
        counted += step(f"{name}gate_proj", multiply=rows * hidden)
    each = {kind: n * rows * hidden for kind, n in ACTIVATIONS[forward.activation].items()}
    counted += step(f"{name}activation", **each)
    return counted + _linear(f"{name}down_proj", rows, hidden, width, forward.bias, size)


def idle_parameters(model: Model, layer: Layer) -> int:
    """Learned numbers of the experts that a token does not go through."""
    forward = layer.feed_forward
    if forward is None or not forward.experts:
        return 0
    none = Count(0)
    expert = _hidden(forward, "", none, Count(model.width), Count(forward.width), none)
    return int(expert.parameters) * (forward.experts - forward.experts_per_token)
