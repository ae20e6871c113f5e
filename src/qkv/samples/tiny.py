"""A transformer small enough to read whole: two layers of four heads, trained to repeat.

Trained by `examples/train_tiny_model.py`; how it went is in `tiny_loss.json` and, drawn, in
`docs/tiny-model.md`. Needs NumPy and no framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from qkv.arguments.declarations import Size, Whole, checked
from qkv.errors import ArgumentError
from qkv.samples.decoder import Array, Decoder
from qkv.variants import Causal, RoPE, SlidingWindow

__all__ = ["ALPHABET", "LAYERS", "NUM_HEADS", "TinyModel", "tiny_model"]

ALPHABET = "\ufffd\n" + "".join(map(chr, range(32, 127)))
"""The character of each id: any that is not here, a new line, and what ASCII can print."""

NUM_HEADS = 4
LAYERS: tuple[tuple[Any, ...], ...] = (
    (Causal(), SlidingWindow(15, 0), RoPE()),
    (Causal(),),
)
"""What each layer says besides query, key and value: the first sees the nearest 16 characters and
where they stand; the second all, and not where. Neither knows a distance that it was not trained
on, so the heads work on texts of any length."""

_IDS = {character: index for index, character in enumerate(ALPHABET)}


@checked
class TinyModel(Decoder):
    """A causal transformer of attention alone, of characters, in float32.

        x = embedding[ids]
        x = x + attention(norm(x) W_q, norm(x) W_k, norm(x) W_v) W_o      in each layer
        logits = norm(x) U,   norm(x) = x / sqrt(mean(x^2) + 1e-6)

    Attention is causal. That of layer 0 is rotary and sees 16 characters; layer 1 sees all, without
    positions.

    Parameters
    ----------
    weights : mapping of str to array
        `embedding.weight` and `unembedding.weight` (vocabulary, width), and for each layer
        `layers.0.q_proj.weight`, `k_proj`, `v_proj`, `out_proj` (width, width), to multiply from
        the left.

    Notes
    -----
    Source: Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), whose models
    of two layers these are; Olsson et al., "In-context Learning and Induction Heads" (2022).
    """

    name = "tiny"

    def __init__(self, weights: Mapping[str, Array]) -> None:
        roles = ("q", "k", "v", "out")
        names = [f"layers.{i}.{role}_proj.weight" for i in range(len(LAYERS)) for role in roles]
        missing = {"embedding.weight", "unembedding.weight", *names} - weights.keys()
        if missing:
            raise ArgumentError(
                f"the weights have no {', '.join(sorted(missing)):.200}.",
                action="Use qkv.samples.tiny_model().",
            )
        layers = [
            {role: weights[f"layers.{layer}.{role}_proj.weight"] for role in roles}
            for layer in range(len(LAYERS))
        ]
        embedding, unembedding = weights["embedding.weight"], weights["unembedding.weight"]
        super().__init__(embedding, unembedding, layers, LAYERS, NUM_HEADS)

    def encode(self, text: str) -> list[int]:
        """The id of each character; 0 for one that the model does not know."""
        return [_IDS.get(character, 0) for character in text]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The character of each id."""
        return [ALPHABET[index] for index in self._checked(ids)]

    def repeated_sequence(self, period: Size = 32, seed: Whole = 0) -> list[int]:
        """Random characters, twice: what shows both kinds of head best.

        Returns
        -------
        list of int (2 * period,)
        """
        if period > 2**24:
            raise ArgumentError(f"period={period} is more than 2**24.", action="Choose fewer.")
        once = np.random.default_rng(seed).integers(0, len(ALPHABET), period)
        return [int(index) for index in np.tile(once, 2)]


def tiny_model() -> TinyModel:
    """The trained model, read from the package.

    Returns
    -------
    TinyModel

    Notes
    -----
    180 kB. In layer 0 a head reads the previous character; in layer 1 heads read what came after
    an earlier occurrence of the present one.

    Examples
    --------
    >>> import qkv, qkv.samples
    >>> model = qkv.samples.tiny_model()
    >>> ids = model.encode("qkv makes #7 ... qkv makes #")
    >>> model.tokens([model.logits(ids)[-1].argmax()])
    ['7']
    """
    from safetensors.numpy import load

    return TinyModel(load(resources.files("qkv.samples").joinpath("tiny.safetensors").read_bytes()))
