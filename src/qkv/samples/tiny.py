"""A transformer small enough to read whole: two layers of four heads, trained to repeat.

Trained by `examples/train_tiny_model.py`; how it went is in `tiny_loss.json` and, drawn, in
`docs/tiny-model.md`. Needs NumPy and no framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv._api import attention
from qkv.backends import Progress
from qkv.declarations import Size, Whole, checked, shown
from qkv.errors import ArgumentError
from qkv.inspection.model_record import Keep, ModelRecord
from qkv.interventions import HeadChange, HeadInputs, changed_heads
from qkv.variants import Causal, RoPE, SlidingWindow

__all__ = ["ALPHABET", "LAYERS", "NUM_HEADS", "TinyModel", "tiny_model"]

Array = NDArray[Any]

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

EPSILON = 1e-6

_IDS = {character: index for index, character in enumerate(ALPHABET)}


@checked
class TinyModel:
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
        self._embedding = weights["embedding.weight"]
        self._unembedding = weights["unembedding.weight"]
        self._layers = [
            {role: weights[f"layers.{layer}.{role}_proj.weight"] for role in roles}
            for layer in range(len(LAYERS))
        ]

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

    def attention_inputs(
        self, ids: Sequence[int]
    ) -> Iterator[tuple[Array, Array, Array, tuple[Any, ...]]]:
        """Query, key, value and variants of each layer, as `qkv.inspect` takes them.

        Yields
        ------
        (query, key, value, variants)
            float32 arrays (num_heads, length, head_dim).
        """
        for layer, variants, x in zip(self._layers, LAYERS, self._states(ids), strict=False):
            yield *self._heads(layer, x), variants

    def inspect(
        self,
        text: str | Sequence[int],
        *,
        keep: Keep = None,
        progress: Progress | None = None,
        see: Callable[[ModelRecord, Array], None] | None = None,
    ) -> ModelRecord:
        """Every head of the model on a text.

        Parameters
        ----------
        text : str or sequence of int
            Characters, or their ids.
        keep : "weights", optional
            Query and key of each layer are kept, so that weights can be read.
        progress : callable (done, all), optional
            Told of each layer that is done.
        see : callable (record, value), optional
            Given the record after each layer, and its value (1, num_heads, length, head_dim).

        Returns
        -------
        ModelRecord

        Raises
        ------
        ArgumentError
            There is no character to read, or an id is not one of the model's.

        Notes
        -----
        O(length^2) operations and O(length) memory for each head.

        Examples
        --------
        >>> import qkv.samples
        >>> record = qkv.samples.tiny_model().inspect("the cat. the cat.")
        >>> len(record), record.texts[:3]
        (2, ['t', 'h', 'e'])
        """
        ids = self.encode(text) if isinstance(text, str) else list(text)
        if not ids:
            raise ArgumentError("the text has no characters.", action="Write a sentence.")
        record = ModelRecord(self.name, keep=keep)
        record.tokens, record.texts = np.array([ids]), self.tokens(ids)
        for layer, (query, key, value, variants) in enumerate(self.attention_inputs(ids)):
            record.add(query, key, *variants, name=f"layers.{layer}", tokens=record.tokens)
            if see is not None:
                see(record, value[None])
            if progress is not None:
                progress(layer + 1, len(LAYERS))
        return record

    def logits(
        self,
        ids: Sequence[int],
        changes: Mapping[tuple[int, int], str | Sequence[int]] | None = None,
    ) -> Array:
        """Scores of every character to follow each position, float32 (length, vocabulary).

        Parameters
        ----------
        ids : sequence of int
        changes : mapping of (layer, head) to "off", "uniform" or ids, optional
            Heads that write nothing, that have equal weights, or that have the weights which they
            have on other ids, as many of them; see `qkv.interventions`.
        """
        *_, last = self._states(ids, self._prepared(changes or {}))
        logits: Array = _norm(last) @ self._unembedding.T
        return logits

    def loss(self, ids: Sequence[int], changes: Any = None) -> Array:
        """`-log softmax(logits)[next id]` for each position but the last, float64 (length - 1,)."""
        logits = self.logits(ids, changes)[:-1].astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        chosen = np.take_along_axis(shifted, self._checked(ids)[1:, None], axis=1)[:, 0]
        return np.asarray(np.log(np.exp(shifted).sum(axis=1)) - chosen)

    def _prepared(
        self, changes: Mapping[tuple[int, int], str | Sequence[int]]
    ) -> dict[int, dict[int, HeadChange]]:
        """Changes by layer and head, with the inputs of other ids computed."""
        found: dict[int, dict[int, HeadChange]] = {}
        others: dict[tuple[int, ...], list[HeadInputs]] = {}
        if not isinstance(changes, Mapping) or not all(
            isinstance(place, tuple) and len(place) == 2 for place in changes
        ):
            raise ArgumentError(
                f"changes={shown(changes)} is not a dict by layer and head.",
                action="Pass {(layer, head): change}.",
            )
        for (layer, head), change in changes.items():
            if not 0 <= layer < len(LAYERS):
                raise ArgumentError(
                    f"layer {layer} does not exist.", action=f"There are {len(LAYERS)}."
                )
            if isinstance(change, str):
                found.setdefault(layer, {})[head] = cast(HeadChange, change)
                continue
            ids = tuple(map(int, change))
            if ids not in others:
                rows = self.attention_inputs(ids)
                others[ids] = [HeadInputs(q, k, variants) for q, k, _, variants in rows]
            found.setdefault(layer, {})[head] = others[ids][layer]
        return found

    def _states(
        self, ids: Sequence[int], changes: Mapping[int, Mapping[int, HeadChange]] | None = None
    ) -> Iterator[Array]:
        """What each layer reads, (length, width), and at last what all of them have written."""
        x = self._embedding[self._checked(ids)]
        yield x
        for index, (layer, variants) in enumerate(zip(self._layers, LAYERS, strict=True)):
            query, key, value = self._heads(layer, x)
            out = attention(query, key, value, *variants)
            here = (changes or {}).get(index, {})
            out = changed_heads(out, HeadInputs(query, key, variants), value, here)
            x = x + out.swapaxes(0, 1).reshape(x.shape) @ layer["out"].T
            yield x

    def _heads(self, layer: dict[str, Array], x: Array) -> tuple[Array, Array, Array]:
        rows, shape = _norm(x), (len(x), NUM_HEADS, x.shape[1] // NUM_HEADS)
        q, k, v = ((rows @ layer[role].T).reshape(shape).swapaxes(0, 1) for role in "qkv")
        return q, k, v

    def _checked(self, ids: ArrayLike) -> Array:
        array = np.asarray(ids)
        if array.size == 0:
            array = array.astype(np.intp)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ArgumentError(
                f"ids are {array.dtype} {array.shape}, not one row of whole numbers.",
                action="Pass tiny_model().encode(text).",
            )
        if array.size and not 0 <= array.min() <= array.max() < len(ALPHABET):
            raise ArgumentError(
                f"ids reach from {array.min()} to {array.max()}; there are 0 to "
                f"{len(ALPHABET) - 1}.",
                action="Pass tiny_model().encode(text).",
            )
        return array


def _norm(x: Array) -> Array:
    """`x / sqrt(mean(x^2) + 1e-6)` of each row."""
    scaled: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPSILON))
    return scaled


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
