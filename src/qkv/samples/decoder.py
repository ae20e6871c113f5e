"""What the small models have in common: causal layers of heads, computed in NumPy through qkv."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv._api import attention
from qkv.arguments.declarations import TextOrIds, checked, shown
from qkv.backends import Progress
from qkv.errors import ArgumentError
from qkv.inspection.models.model_record import Keep, ModelRecord
from qkv.interventions import HeadChange, HeadInputs, changed_heads

__all__ = ["EPSILON", "Array", "Decoder", "norm"]

Array = NDArray[Any]

EPSILON = 1e-6


def norm(x: Array) -> Array:
    """`x / sqrt(mean(x^2) + 1e-6)` of each row."""
    scaled: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(EPSILON))
    return scaled


@checked
class Decoder(ABC):
    """A causal transformer whose heads can be inspected and changed.

        x = x + attention(norm(x) W_q, norm(x) W_k, norm(x) W_v) W_o      in each layer
        logits = norm(x) U

    A subclass says where x begins, what else a layer adds, and how a text becomes ids.

    Parameters
    ----------
    embedding, unembedding : array (vocabulary, width)
    layers : sequence of mapping of str to array
        q, k, v and out of each layer, (width, width), to multiply from the left.
    variants : sequence of tuple
        What each layer says besides query, key and value.
    num_heads : int
    """

    name: ClassVar[str]
    unknown_id: ClassVar[int] = 0
    """The id of every character that the model does not know."""
    context: int | None = None
    """Tokens of the rows that it was trained on, where it reads longer ones worse."""

    def __init__(
        self,
        embedding: Any,
        unembedding: Any,
        layers: Sequence[Mapping[str, Any]],
        variants: Sequence[tuple[Any, ...]],
        num_heads: int,
    ) -> None:
        self._embedding, self._unembedding = embedding, unembedding
        self._layers, self._variants, self._num_heads = layers, variants, num_heads

    def __repr__(self) -> str:
        sizes = f"{len(self._layers)} layers of {self._num_heads} heads"
        return f"{type(self).__name__}({sizes}, {len(self._embedding):,} tokens)"

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    @abstractmethod
    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The text of each id."""

    def attention_inputs(
        self, ids: TextOrIds
    ) -> Iterator[tuple[Array, Array, Array, tuple[Any, ...]]]:
        """Query, key, value and variants of each layer, as `qkv.inspect` takes them.

        Yields
        ------
        (query, key, value, variants)
            Arrays (num_heads, length, head_dim), of the type that the model computes in.
        """
        layers = zip(self._layers, self._variants, self._states(ids), strict=False)
        for layer, variants, x in layers:
            yield *self._heads(layer, x), variants

    def inspect(
        self,
        text: TextOrIds,
        *,
        keep: Keep = None,
        progress: Progress | None = None,
        see: Callable[[ModelRecord, Array], None] | None = None,
        unknown_id: int | None = None,
    ) -> ModelRecord:
        """Every head of the model on a text.

        Parameters
        ----------
        text : str or sequence of int
            A text, or the ids of its tokens.
        keep : "weights" or layer numbers, optional
            Layers whose query and key are kept, so that weights can be read.
        progress : callable (done, all), optional
            Told of each layer that is done.
        see : callable (record, value), optional
            Given the record after each layer, and its value (1, num_heads, length, head_dim).
        unknown_id : int, optional
            Among ids that are given, the one of unknown tokens; in a text it is the model's.

        Returns
        -------
        ModelRecord

        Warns
        -----
        UserWarning
            There are more tokens than in the rows that the model was trained on.

        Raises
        ------
        ArgumentError
            There is no character to read, or an id is not one of the model's, or there is no such
            layer.

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
        self._warn_of_length(len(ids))
        if isinstance(text, str):
            unknown_id = self.unknown_id
        record = ModelRecord(self.name, keep=keep, unknown_id=unknown_id)
        record.tokens, record.texts = np.array([ids]), self.tokens(ids)
        for layer, (query, key, value, variants) in enumerate(self.attention_inputs(ids)):
            record.add(query, key, *variants, name=f"layers.{layer}", tokens=record.tokens)
            if see is not None:
                see(record, value[None])
            if progress is not None:
                progress(layer + 1, len(self._layers))
        record.require_kept()
        return record

    def logits(
        self,
        ids: TextOrIds,
        changes: Mapping[tuple[int, int], str | Sequence[int]] | None = None,
    ) -> Array:
        """Scores of every token to follow each position, (length, vocabulary).

        Parameters
        ----------
        ids : str or sequence of int
            A text, or the ids of its tokens.
        changes : mapping of (layer, head) to "off", "uniform" or ids, optional
            Heads that write nothing, that have equal weights, or that have the weights which they
            have on other ids, as many of them; see `qkv.interventions`.

        Warns
        -----
        UserWarning
            As for `inspect`.
        """
        rows = self._checked(ids)
        self._warn_of_length(len(rows))
        return self._logits(rows, changes)

    def loss(self, ids: TextOrIds, changes: Any = None) -> Array:
        """`-log softmax(logits)[next id]` for each position but the last, float64 (length - 1,).

        `ids` and `changes` are as for `logits`, and so is the warning.

        Examples
        --------
        >>> import qkv.samples
        >>> model = qkv.samples.tiny_model()
        >>> text = "qkv makes #7 ... qkv makes #7"
        >>> bool(model.loss(text)[-1] < model.loss(text)[10])
        True
        """
        rows = self._checked(ids)
        self._warn_of_length(len(rows))
        logits = self._logits(rows, changes)[:-1].astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        chosen = np.take_along_axis(shifted, rows[1:, None], axis=1)[:, 0]
        return np.asarray(np.log(np.exp(shifted).sum(axis=1)) - chosen)

    def _warn_of_length(self, length: int) -> None:
        """Warn, at the line that called a method of the model, of more tokens than it can read."""
        if self.context is not None and length > self.context:
            warnings.warn(
                f"the text has {length} tokens; the model was trained on rows of {self.context}. "
                "What it computes beyond them means little. Shorten the text, or pass the ids "
                f"model.encode(text)[-{self.context}:].",
                UserWarning,
                stacklevel=4,
            )

    def _logits(self, ids: Array, changes: Any) -> Array:
        *_, last = self._states(ids, self._prepared({} if changes is None else changes))
        logits: Array = norm(last) @ self._unembedding.T
        return logits

    def _prepared(
        self, changes: Mapping[tuple[int, int], str | Sequence[int]]
    ) -> dict[int, dict[int, HeadChange]]:
        """Changes by layer and head, with the inputs of other ids computed."""
        by_layer: dict[int, dict[int, HeadChange]] = {}
        others: dict[tuple[int, ...], list[HeadInputs]] = {}
        if not isinstance(changes, Mapping) or not all(
            isinstance(place, tuple) and len(place) == 2 for place in changes
        ):
            raise ArgumentError(
                f"changes={shown(changes)} is not a dict by layer and head.",
                action="Pass {(layer, head): change}.",
            )
        for (layer, head), change in changes.items():
            if not 0 <= layer < len(self._layers):
                raise ArgumentError(
                    f"layer {layer} does not exist.",
                    action=f"Choose from 0 to {len(self._layers) - 1}.",
                )
            if isinstance(change, str):
                by_layer.setdefault(layer, {})[head] = cast(HeadChange, change)
                continue
            ids = tuple(self._checked(change).tolist())
            if ids not in others:
                rows = self.attention_inputs(ids)
                others[ids] = [HeadInputs(q, k, variants) for q, k, _, variants in rows]
            by_layer.setdefault(layer, {})[head] = others[ids][layer]
        return by_layer

    def _states(
        self, ids: ArrayLike, changes: Mapping[int, Mapping[int, HeadChange]] | None = None
    ) -> Iterator[Array]:
        """What each layer reads, (length, width), and at last what all of them have written."""
        x = self._begun(self._embedding[self._checked(ids)])
        yield x
        for index, (layer, variants) in enumerate(zip(self._layers, self._variants, strict=True)):
            query, key, value = self._heads(layer, x)
            out = attention(query, key, value, *variants)
            here = (changes or {}).get(index, {})
            out = changed_heads(out, HeadInputs(query, key, variants), value, here)
            x = x + out.swapaxes(0, 1).reshape(x.shape) @ layer["out"].T
            x = self._transformed(layer, x)
            yield x

    def _begun(self, rows: Array) -> Array:
        """Where the first layer begins, given the rows of the embedding."""
        return rows

    def _transformed(self, layer: Mapping[str, Array], x: Array) -> Array:
        """What a layer makes of x after its heads have written to it."""
        return x

    def _heads(self, layer: Mapping[str, Array], x: Array) -> tuple[Array, Array, Array]:
        shape = (len(x), self._num_heads, x.shape[1] // self._num_heads)
        rows = norm(x)
        q, k, v = ((rows @ layer[role].T).reshape(shape).swapaxes(0, 1) for role in "qkv")
        return q, k, v

    def _checked(self, ids: ArrayLike) -> Array:
        """The ids of a text, or ids, as an array."""
        array = np.asarray(self.encode(ids) if isinstance(ids, str) else ids)
        if array.size == 0:
            array = array.astype(np.intp)
        action = "Pass encode(text) of this model."
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ArgumentError(
                f"ids are {array.dtype} {array.shape}, not one row of whole numbers.",
                action=action,
            )
        count = len(self._embedding)
        if array.size and not 0 <= array.min() <= array.max() < count:
            raise ArgumentError(
                f"ids reach from {array.min()} to {array.max()}; there are 0 to {count - 1}.",
                action=action,
            )
        return array
