"""A small language model: four layers of four heads that read and continue English sentences.

Trained by `tools/train_language_model.py` on the novels of Jane Austen, and stored in 8 bits. The
page of the lab computes the same numbers. Needs NumPy and no framework.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np

from qkv.arguments.declarations import Positive, TextOrIds, checked
from qkv.errors import ArgumentError
from qkv.samples.decoder import Array, Decoder, norm
from qkv.variants import Causal, RoPE

__all__ = ["LanguageModel", "language_model", "language_model_bytes"]

_ROLES = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj", "up": "up_proj",
    "down": "down_proj",
}  # fmt: skip


@checked
class LanguageModel(Decoder):
    """A causal transformer of pieces of words, in float64.

        x = norm(embedding[ids]),   norm(x) = x / sqrt(mean(x^2) + 1e-6)
        x = x + attention(norm(x) W_q, norm(x) W_k, norm(x) W_v) W_o
        x = x + max(norm(x) W_up, 0)^2 W_down                             in each layer
        logits = norm(x) embedding^T

    Attention is causal with rotary positions.

    Parameters
    ----------
    weights : mapping of str to array
        `embedding.weight` (vocabulary, width), and for each layer `layers.0.q_proj.weight`,
        `k_proj`, `v_proj`, `out_proj`, `up_proj`, `down_proj`, to multiply from the left: int8,
        with the scale of each row in `layers.0.q_proj.weight.scale` and so on.
    about : mapping
        `pieces`, the vocabulary; `num_heads`; `context`; and `measured`.

    Attributes
    ----------
    pieces : list of str
        The text of each id; the first stands for characters that are not known.
    context : int
        Tokens of the rows that the model was trained on; more are computed, and read worse.
    measured : dict
        Losses on text that was held out, in nats for each token, beside a trigram model's.

    Notes
    -----
    float64, so that every implementation has the same digits.
    Sources: Vaswani et al., "Attention Is All You Need" (2017); Su et al., "RoFormer" (2021);
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); So et al., "Primer" (2021),
    whose squared ReLU it has.
    """

    name = "language"

    def __init__(self, weights: Mapping[str, Array], about: Mapping[str, Any]) -> None:
        table = {
            name: array * weights[f"{name}.scale"].astype(np.float64)[:, None]
            for name, array in weights.items()
            if f"{name}.scale" in weights
        }
        if "embedding.weight" not in table or "pieces" not in about:
            raise ArgumentError(
                "the weights have no embedding in 8 bits, or no pieces with it.",
                action="Use qkv.samples.language_model().",
            )
        layers: list[dict[str, Array]] = []
        while f"layers.{len(layers)}.q_proj.weight" in table:
            at = f"layers.{len(layers)}"
            layers.append({role: table[f"{at}.{name}.weight"] for role, name in _ROLES.items()})
        self.pieces: list[str] = list(about["pieces"])
        self.context: int = about["context"]
        self.measured: dict[str, Any] = dict(about["measured"])
        self._ids = {piece: index for index, piece in enumerate(self.pieces)}
        self._longest = max(map(len, self.pieces))
        embedding, variants = table["embedding.weight"], [(Causal(), RoPE())] * len(layers)
        super().__init__(embedding, embedding, layers, variants, about["num_heads"])

    def encode(self, text: str) -> list[int]:
        """The ids of a text: the longest piece that fits, from left to right.

        A character that no piece has is 0.
        """
        ids, at = [], 0
        while at < len(text):
            for length in range(self._longest, 0, -1):
                if (piece := text[at : at + length]) in self._ids:
                    break
            ids.append(self._ids.get(piece, 0))
            at += len(piece)
        return ids

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The text of each id."""
        return [self.pieces[index] for index in self._checked(ids)]

    def next_probabilities(
        self,
        ids: TextOrIds,
        temperature: Positive = 1.0,
        changes: Mapping[tuple[int, int], str | Sequence[int]] | None = None,
    ) -> Array:
        """How probable each token is to come next, `softmax(logits / temperature)`.

        Parameters
        ----------
        ids : str or sequence of int
            A text, or the ids of its tokens; one token or more.
        temperature : float
            Below 1 the probable becomes more probable, above 1 less.
        changes : mapping of (layer, head) to "off", "uniform" or ids, optional
            As `logits` takes them.

        Returns
        -------
        array (vocabulary,)
            float64.

        Warns
        -----
        UserWarning
            As for `inspect`.

        Examples
        --------
        >>> import qkv.samples
        >>> model = qkv.samples.language_model()
        >>> p = model.next_probabilities(model.encode("She could not help"))
        >>> round(float(p.sum()), 12)
        1.0
        """
        if len(ids) == 0:
            raise ArgumentError("the text has no characters.", action="Write a sentence.")
        rows = self._checked(ids)
        self._warn_of_length(len(rows))
        scores = self._logits(rows, changes)[-1]
        p = np.exp((scores - scores.max()) / temperature)
        probabilities: Array = p / p.sum()
        return probabilities

    def _begun(self, rows: Array) -> Array:
        return norm(rows)

    def _transformed(self, layer: Mapping[str, Array], x: Array) -> Array:
        wide = np.maximum(norm(x) @ layer["up"].T, 0.0)
        written: Array = x + (wide * wide) @ layer["down"].T
        return written


def language_model_bytes() -> bytes:
    """The file of the model, safetensors, as Python and the page read it."""
    return resources.files("qkv.samples").joinpath("language.safetensors").read_bytes()


def language_model() -> LanguageModel:
    """The trained model, read from the package.

    Returns
    -------
    LanguageModel

    Notes
    -----
    917,504 weights in 0.95 MB. It writes as Jane Austen's novels do, and knows nothing else:
    grammar and names, but no facts, and no sense over more than a few words.

    Examples
    --------
    >>> import qkv.samples
    >>> model = qkv.samples.language_model()
    >>> ids = model.encode("It is a truth universally acknowledged, that a young man")
    >>> model.tokens([model.logits(ids)[-1].argmax()])
    [' is']
    """
    from safetensors.numpy import load

    data = language_model_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return LanguageModel(load(data), json.loads(header["__metadata__"]["about"]))
