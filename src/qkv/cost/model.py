"""The sizes of a transformer that determine its cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qkv.arguments.declarations import Size, Whole, checked
from qkv.errors import ArgumentError

__all__ = ["Attention", "FeedForward", "Latent", "Layer", "Model", "Norm"]


@checked
@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2): what is cached is one short row a token.

    Attributes
    ----------
    query_rank : int
        Length of the latent query row; 0 if queries come straight from the tokens.
    rank : int
        Length of the latent row from which keys and values are made.
    rope_dim : int
        Components of a key that carry its position; shared by all heads and cached too.

    Examples
    --------
    >>> from qkv.cost import Latent
    >>> Latent(query_rank=0, rank=512, rope_dim=64).rank
    512
    """

    query_rank: Whole
    rank: Size
    rope_dim: Whole


@checked
@dataclass(frozen=True, slots=True)
class Norm:
    """Normalisation: RMSNorm, or LayerNorm, which also subtracts the mean.

    Attributes
    ----------
    centred : bool
        True for LayerNorm.
    weight, bias : bool
        Whether it multiplies by learned numbers, and adds some.

    Examples
    --------
    >>> from qkv.cost import Norm
    >>> Norm(centred=True, bias=True).parameters(768)
    1536
    """

    centred: bool = False
    weight: bool = True
    bias: bool = False

    def parameters(self, width: int) -> int:
        """Learned numbers for rows of `width`."""
        return width * (self.weight + self.bias)


@checked
@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention.

    Attributes
    ----------
    num_heads, num_kv_heads, head_dim, v_head_dim : int
        As in `qkv.attention`.
    causal : bool
        Whether a query sees no later key.
    window : int or None
        Keys that a query sees, its own included; None for all. Without `causal` the window reaches
        `window // 2` to either side.
    latent : Latent or None
        Set for multi-head latent attention.
    projections : bool
        Whether query, key, value and output are projected; False for attention by itself.
    qkv_bias, out_bias : bool
        Whether projections add a bias.
    key_bias : bool
        Whether the projection of keys adds one too, if `qkv_bias`.
    relative_bias : bool
        Whether a number from a table of distances is added to each score (T5).
    scaled : bool
        Whether scores are divided by sqrt(head_dim); those of T5 are not.
    qk_norm : str
        What rows of query and key are normalised over: "" for not at all, "head" for each head
        with shared weights, "heads" for each head with its own, "full" for all heads together.
    norm_of_qk : Norm
        That normalisation.
    rope_dim : int
        Rotated components of each query and key; 0 without rotary embedding.
    sinks : bool
        Whether each head has a learned sink.
    gate : bool
        Whether outputs are multiplied by a gate of their own projection.
    pair_width : int
        Channels of a pair representation from which biases of scores are projected (AlphaFold2).

    Raises
    ------
    ArgumentError
        A size is out of range, or num_kv_heads does not divide num_heads.

    Examples
    --------
    >>> from qkv.cost import Attention
    >>> layer = Attention(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, window=4096)
    >>> layer.kind, layer.cached_numbers, layer.cached_tokens(10_000)
    ('32 heads over 8, window 4096', 2048, 4096)
    """

    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    v_head_dim: Size
    causal: bool = True
    window: Size | None = None
    latent: Latent | None = None
    projections: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    key_bias: bool = True
    relative_bias: bool = False
    scaled: bool = True
    qk_norm: Literal["", "head", "heads", "full"] = ""
    norm_of_qk: Norm = Norm()
    rope_dim: Whole = 0
    sinks: bool = False
    gate: bool = False
    pair_width: Whole = 0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ArgumentError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}.",
                action="Let every group of query heads be of one size.",
            )

    @property
    def kind(self) -> str:
        """A few words for a table."""
        if self.latent:
            words = f"latent {self.latent.rank}+{self.latent.rope_dim}"
        elif self.num_kv_heads < self.num_heads:
            words = f"{self.num_heads} heads over {self.num_kv_heads}"
        else:
            words = f"{self.num_heads} heads"
        return words + (f", window {self.window}" if self.window else "")

    @property
    def cached_numbers(self) -> int:
        """Numbers that a cache keeps of each token."""
        if self.latent:
            return self.latent.rank + self.latent.rope_dim
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    def cached_tokens(self, context: int) -> int:
        """Tokens of which a cache keeps something, at most the window."""
        if not self.causal:
            return 0
        return context if self.window is None else min(context, self.window)


@checked
@dataclass(frozen=True, slots=True)
class FeedForward:
    """The other half of a layer.

    Attributes
    ----------
    width : int
        Length of the hidden row, of one expert if there are any.
    activation : str
        "silu", "gelu" or "relu".
    gated : bool
        Whether the hidden row is multiplied by one of a second projection (SwiGLU, GeGLU).
    bias : bool
        Whether projections add a bias.
    experts, experts_per_token : int
        Routed experts, and how many of them each token goes through; 0 without routing.
    shared_width : int
        Length of the hidden row of the experts that every token goes through; 0 for none.
    router_bias : bool
        Whether the router adds a bias.
    shared_gate : bool
        Whether the shared expert's output is multiplied by a learned gate.

    Raises
    ------
    ArgumentError
        A size or the activation is not one of these, or a token goes through more experts than
        there are.

    Examples
    --------
    >>> from qkv.cost import FeedForward
    >>> FeedForward(14336).gated
    True
    """

    width: Size
    activation: Literal["silu", "gelu", "relu"] = "silu"
    gated: bool = True
    bias: bool = False
    experts: Whole = 0
    experts_per_token: Whole = 0
    shared_width: Whole = 0
    router_bias: bool = False
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if self.experts_per_token > self.experts:
            raise ArgumentError(
                f"experts_per_token={self.experts_per_token} is more than experts={self.experts}.",
                action="Pass experts_per_token <= experts.",
            )


@checked
@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, feed-forward and `norms` normalisations; feed_forward is None for attention only.

    Attributes
    ----------
    attention : Attention
    feed_forward : FeedForward or None
    norms : int
    cross : Attention or None
        Attention of a decoder to what its encoder made of the source.

    Examples
    --------
    >>> from qkv.cost import model_card
    >>> model_card("llama-3-8b").layers[0].attention.num_heads
    32
    """

    attention: Attention
    feed_forward: FeedForward | None
    norms: int
    cross: Attention | None = None


@checked
@dataclass(frozen=True, slots=True)
class Model:
    """A whole model.

    Attributes
    ----------
    name : str
    width : int
        Length of a token's row between layers.
    layers : tuple of Layer
        In order; equal ones are counted once and multiplied.
    norm : Norm
        That of every layer.
    vocab_size : int
        Rows of the token table; 0 without one.
    tied : bool
        Whether the output head is the token table.
    head : bool
        Whether there is an output head over the vocabulary.
    tables : dict of str to int
        Other learned numbers outside the layers, by what they are.
    final_norm : bool
        Whether the last layer is followed by a normalisation.
    context : int
        Tokens that the model is made for; the default of its cost.
    source : str
        Where the sizes come from.
    speculative : bool
        Whether the sizes are rumour rather than published.
    notes : tuple of str
        What the count leaves out or assumes.
    embed_width : int or None
        Length of a row of the token table, if it may differ from `width`: rows are then projected
        after the table and before the output head.
    encoder : Model or None
        What reads the source, if this is a decoder that attends to one. Both share a token table.
    embed_bias : bool
        Whether the projection after the token table adds a bias.

    Examples
    --------
    >>> from qkv.cost import model_card
    >>> model = model_card("llama-3-8b")
    >>> model.width, len(model.layers), model.causal
    (4096, 32, True)
    """

    name: str
    width: Size
    layers: tuple[Layer, ...]
    norm: Norm
    vocab_size: Whole
    tied: bool
    head: bool
    tables: dict[str, int]
    final_norm: bool
    context: Size
    source: str = ""
    speculative: bool = False
    notes: tuple[str, ...] = ()
    embed_width: Size | None = None
    encoder: Model | None = None
    embed_bias: bool = False

    def __repr__(self) -> str:
        layers = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        return f"Model({self.name!r}, {layers}, width {self.width:,}, context {self.context:,})"

    @property
    def causal(self) -> bool:
        """Whether it generates, one token after the other."""
        return bool(self.layers) and all(layer.attention.causal for layer in self.layers)
