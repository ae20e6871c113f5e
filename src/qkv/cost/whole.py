"""The cost of a whole model, for each layer and in total."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from qkv.arguments.declarations import Size, checked
from qkv.cost.cards import model_card
from qkv.cost.layers import PassSizes, embedding_ledger, head_ledger, idle_parameters, layer_ledger
from qkv.cost.machines import Machine, Roofline, bytes_of
from qkv.cost.model import Layer, Model
from qkv.errors import ArgumentError
from qkv.ledger import Count, Ledger

__all__ = ["CONTEXTS", "LayerCost", "ModelCost", "model_cost"]

CONTEXTS = (1_000, 8_000, 32_000, 128_000, 1_000_000, 10_000_000)
"""Tokens of the contexts at which a cost is shown if none is chosen."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer, and how many layers are like it.

    Attributes
    ----------
    kind : str
        Its attention in a few words.
    count : int
        Layers of the model that are equal to it.
    ledger : Ledger
        Operations, parameters and bytes of one.
    score_entries : Count
        Numbers of all its score matrices, which a fused kernel does not store.
    score_bytes : Count
        Bytes that storing them would take.
    kv_cache_bytes : Count
        Bytes that it keeps of all tokens of all sequences.
    idle_parameters : int
        Learned numbers of the experts that a token does not go through.

    Examples
    --------
    >>> from qkv.cost import model_cost
    >>> layer = model_cost("llama-3-8b", 8192).layers[0]
    >>> layer.count, int(layer.kv_cache_bytes) // 2**20
    (32, 32)
    """

    kind: str
    count: int
    ledger: Ledger = field(repr=False)
    score_entries: Count
    score_bytes: Count
    kv_cache_bytes: Count
    idle_parameters: int


@checked
@dataclass(frozen=True, slots=True)
class ModelCost:
    """The cost of one forward pass of a model.

    Attributes
    ----------
    model : Model
    context, batch : int
        Tokens of each sequence, and sequences.
    dtype : str
        The type of weights, activations and cache.
    decode : bool
        Whether only the last token of each sequence is computed, from a cache of the others.
    layers : tuple of LayerCost
        One for each kind of layer.
    outside : Ledger
        Embedding, last norm and output head.
    ledger : Ledger
        All layers and what is outside of them.

    Examples
    --------
    >>> from qkv.cost import model_cost
    >>> cost = model_cost("llama-3-8b", 8192, decode=True)
    >>> cost.operations < model_cost("llama-3-8b", 8192).operations
    True
    """

    model: Model
    context: int
    batch: int
    dtype: str
    decode: bool
    layers: tuple[LayerCost, ...]
    outside: Ledger
    ledger: Ledger

    def __repr__(self) -> str:
        read = "one more token, context" if self.decode else "all tokens, context"
        return (
            f"ModelCost({self.model.name!r}, {read} {self.context:,}, batch {self.batch}, "
            f"{self.dtype}: {self.operations:,} operations, {self.parameters:,} parameters, "
            f"{self.kv_cache_bytes:,} bytes of KV cache)"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the count leaves out or assumes, also of a context of this length."""
        model = self.model
        if "positions" not in model.tables or self.context <= model.context:
            return model.notes
        learned = f"it has {model.context:,} learned positions"
        return (*model.notes, f"{learned}: more tokens are counted, but it cannot read them")

    @property
    def operations(self) -> int:
        """Scalar operations of all kinds."""
        return int(self.ledger.total)

    @property
    def parameters(self) -> int:
        """Learned numbers."""
        return int(self.ledger.parameters)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses.

        All but the experts that it is not routed to and, in a model of experts, the table of input
        tokens, of which it reads one row, unless the output head has the same table. The card of
        gpt-oss counts so; the reports of Qwen 3 and DeepSeek-V3 count the table too.
        """
        idle = sum(la.idle_parameters * la.count for la in self.layers)
        apart = idle and self.model.head and not self.model.tied
        return (
            self.parameters
            - idle
            - (self.model.vocab_size * (self.model.embed_width or self.model.width) if apart else 0)
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes between memory and processor, at least."""
        return int(self.ledger.bytes_moved)

    @property
    def score_entries(self) -> int:
        """Numbers of all score matrices: `layers * heads * batch * tokens * context`."""
        return sum(int(layer.score_entries) * layer.count for layer in self.layers)

    @property
    def score_bytes(self) -> int:
        """Bytes that storing the score matrices would take."""
        return sum(int(layer.score_bytes) * layer.count for layer in self.layers)

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes that the cache holds for the whole context of all sequences."""
        return sum(int(layer.kv_cache_bytes) * layer.count for layer in self.layers)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: operations for each byte moved."""
        return self.operations / self.bytes_moved

    def roofline(self, machine: Machine) -> Roofline | None:
        """The least time on a machine; None if it has no peak for the dtype.

        Parameters
        ----------
        machine : Machine
        """
        return machine.roofline(self.operations, self.bytes_moved, self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers and text, for JSON."""
        return {
            "model": self.model.name,
            "source": self.model.source,
            "speculative": self.model.speculative,
            "notes": list(self.notes),
            "context": self.context,
            "batch": self.batch,
            "dtype": self.dtype,
            "decode": self.decode,
            "layers": [_layer_dict(layer) for layer in self.layers],
            "outside_layers": _ledger_dict(self.outside),
            "whole": {
                "operations": self.operations,
                "parameters": self.parameters,
                "active_parameters": self.active_parameters,
                "bytes_moved": self.bytes_moved,
                "score_entries": self.score_entries,
                "score_bytes_avoided": self.score_bytes,
                "kv_cache_bytes": self.kv_cache_bytes,
                "arithmetic_intensity": self.intensity,
            },
        }


def _layer_dict(layer: LayerCost) -> dict[str, Any]:
    return {
        "kind": layer.kind,
        "count": layer.count,
        "score_bytes_avoided": int(layer.score_bytes),
        "kv_cache_bytes": int(layer.kv_cache_bytes),
        **_ledger_dict(layer.ledger),
    }


def _ledger_dict(ledger: Ledger) -> dict[str, Any]:
    moved = int(ledger.bytes_moved)
    return {
        "operations": int(ledger.total),
        "parameters": int(ledger.parameters),
        "bytes_moved": moved,
        "arithmetic_intensity": int(ledger.total) / moved if moved else None,
        "steps": {
            name: {"operations": int(count), "formula": count.formula}
            for name, count in ledger.steps.items()
        },
        "by_kind": {kind: int(count) for kind, count in ledger.kinds.items()},
    }


@checked
def model_cost(
    model: Model | str,
    context: Size | None = None,
    *,
    batch: Size = 1,
    dtype: str = "bfloat16",
    decode: bool = False,
    source: Size | None = None,
) -> ModelCost:
    """The cost of one forward pass of a model, counted from its sizes.

    Parameters
    ----------
    model : Model or str
        As `model_card` or `read_config` gives it, or the name of a card.
    context : int, optional
        Tokens of each sequence; by default those that the model is made for.
    batch : int
        Sequences.
    dtype : str
        The type of weights, activations and cache: one of `DTYPE_BYTES`.
    decode : bool
        Compute only the last token of each sequence, from a cache; else all tokens. The encoder of
        a model that has one has run before.
    source : int, optional
        Tokens that the encoder reads; by default those that it is made for.

    Returns
    -------
    ModelCost

    Raises
    ------
    ArgumentError
        If a number is not positive, the dtype is unknown, or a model without a cache shall decode.

    Notes
    -----
    Scores of the vocabulary are computed for the last token of each sequence. A mixture of experts
    reads the weights of as many experts as its tokens can choose. Bytes are the least that must
    move: weights once, the input and output of every matrix product, the cache once, no scores.

    Examples
    --------
    >>> from qkv.cost import model_cost
    >>> cost = model_cost("llama-3-8b", 8192)
    >>> cost.parameters, cost.kv_cache_bytes // 2**20
    (8030261248, 1024)
    """
    if isinstance(model, str):
        model = model_card(model)
    context = model.context if context is None else context
    if source is not None and model.encoder is None:
        raise ArgumentError(f"{model.name} has no encoder.", action="Leave source out.")
    if model.encoder is None:
        source = 0
    else:
        source = model.encoder.context if source is None else source
    if decode and not model.causal:
        raise ArgumentError(
            f"{model.name} reads all its tokens at once; it has no cache to decode from.",
            action="Leave decode out.",
        )
    length = Count(context, "n")
    reads = Count(source, "m")
    run = PassSizes(
        Count(batch, "b"),
        Count(1) if decode else length,
        length,
        Count(bytes_of(dtype), "s"),
        reads,
    )
    layers = _layer_costs(model, run)
    outside = embedding_ledger(model, run) + head_ledger(model, run)
    if model.encoder is not None:
        # While decoding the encoder is not run; only its parameters are counted.
        first = run._replace(tokens=reads, context=reads)
        read, tables = _layer_costs(model.encoder, first), embedding_ledger(model.encoder, first)
        read = tuple(replace(layer, kind=f"encoder, {layer.kind}") for layer in read)
        if decode:
            read = tuple(_idle(layer) for layer in read)
            tables = Ledger(parameters=tables.parameters)
        layers, outside = read + layers, outside + tables
    whole = sum((layer.ledger * layer.count for layer in layers), outside)
    return ModelCost(model, context, batch, dtype, decode, layers, outside, whole)


def _layer_costs(model: Model, run: PassSizes) -> tuple[LayerCost, ...]:
    """The cost of each kind of layer; equal layers are counted once."""
    kinds = Counter(model.layers)
    return tuple(_layer_cost(model, layer, count, run) for layer, count in kinds.items())


def _idle(layer: LayerCost) -> LayerCost:
    """A layer that is not run: only its parameters count."""
    nothing = Count(0)
    held = Ledger(parameters=layer.ledger.parameters)
    return replace(layer, ledger=held, score_entries=nothing, score_bytes=nothing)


def _layer_cost(model: Model, layer: Layer, count: int, run: PassSizes) -> LayerCost:
    attention = layer.attention
    forward = layer.feed_forward
    kind = attention.kind
    if forward is not None and forward.experts:
        kind += f"; {forward.experts_per_token} of {forward.experts} experts"
    h = Count(attention.num_heads, "h")
    scores = run.rows * run.context * h
    cached_numbers = run.batch * attention.cached_tokens(run.context) * attention.cached_numbers
    if layer.cross is not None:
        kind += ", and to the source"
        scores += run.rows * run.source * h
        cached_numbers += run.batch * run.source * layer.cross.cached_numbers
    return LayerCost(
        kind,
        count,
        layer_ledger(model, layer, run),
        scores,
        scores * run.size,
        cached_numbers * run.size,
        idle_parameters(model, layer),
    )
