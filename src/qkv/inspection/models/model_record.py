"""Records of every head of a model on one text: statistics for each layer and head.

This module knows no model library: layers are added one by one, as query, key and variants.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import Size, checked
from qkv.call.binding.flatten import copied
from qkv.errors import ArgumentError
from qkv.inspection.heads.head_scores import HeadScores, check_keywords, head_scores
from qkv.inspection.heads.head_table import HeadTable, as_frame, frame_or_table
from qkv.inspection.heads.unknown_tokens import ids_of, sentences_of_unknown, without_unknown
from qkv.inspection.models import model_file
from qkv.inspection.models.comparison import ComparedHeads, HeadComparison
from qkv.inspection.models.keep import Keep, require_keep
from qkv.inspection.models.layer_record import LayerRecord
from qkv.inspection.records.non_finite import sentences_of_nan
from qkv.inspection.rendering.counts import counted
from qkv.inspection.rendering.pages import page_of
from qkv.inspection.rendering.pictures import picture_of_heads
from qkv.inspection.summaries import in_html

__all__ = ["Keep", "LayerRecord", "ModelRecord", "load"]

Array = NDArray[Any]
Sequences = tuple[str | None, str | None]


@checked
class ModelRecord:
    """The heads of a model on one text.

    Parameters
    ----------
    model : str
        Its name.
    top : int
        Keys to keep of each query.
    keep : "weights", layer numbers or None
        Layers whose query and key are kept, so that their weights can be read.
    unknown_id : int or None
        The id of all tokens that the model does not know, if it has one.

    Attributes
    ----------
    layers : list of LayerRecord
        In the order of their calls.
    texts : sequence of str or None
        The tokens of batch row 0, as text.
    decoder_texts : sequence of str or None
        Those of the decoder, in a model of two sequences.
    unknown_id : int or None
        `duplicate` and `induction` leave these tokens out, which are not the same because their
        ids are. It may be set until the model runs.
    notes : list of str
        What else there is to know of the text, in sentences that the summary shows.

    Raises
    ------
    ArgumentError
        If `keep` is another string, or has a number below 0.

    Notes
    -----
    Memory: `4 * (9 + 2 * top)` bytes for each layer, head and query, and kept queries and keys.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> record = ModelRecord("one layer", keep="weights")
    >>> x = 4 * np.eye(4)[None]
    >>> layer = record.add(np.roll(x, -1, axis=2), x, qkv.Causal(), name="layer 0")
    >>> record.heads()[0]["kind"]
    'previous'
    >>> record[0].weights[0, 0, 2].round(3)
    array([0.   , 0.999, 0.   , 0.   ])
    """

    def __init__(
        self, model: str, *, top: Size = 4, keep: Keep = None, unknown_id: int | None = None
    ) -> None:
        require_keep(keep)
        self.model = model
        self.layers: list[LayerRecord] = []
        self._tokens: Array | None = None
        self.texts: Sequence[str] | None = None
        self.decoder_texts: Sequence[str] | None = None
        self.unknown_id = unknown_id
        self.notes: list[str] = []
        self._top = top
        self._keep = keep

    @property
    def tokens(self) -> Array | None:
        """Token ids `(batch, length)`, a copy, or None if they are not known."""
        return None if self._tokens is None else self._tokens.copy()

    @tokens.setter
    def tokens(self, ids: Array | None) -> None:
        self._tokens = None if ids is None else np.array(ids_of(ids))

    def texts_of(self, sequence: str | None) -> Sequence[str] | None:
        """The tokens of batch row 0 of an input of the model, as far as they are known."""
        known = {"input_ids": self.texts, "decoder_input_ids": self.decoder_texts}
        return known.get(sequence or "")

    def add(self, query: Any, key: Any, *variants: Any, name: str, **options: Any) -> LayerRecord:
        """Compute the scores of the next layer, and keep them.

        Parameters
        ----------
        query, key : array (batch, heads, length, head_dim)
            Or without batch. Values are not asked for.
        *variants, scale, q_offset, kv_offset
            As for `qkv.attention`.
        name : str
            Name of the layer.
        tokens : integer array (batch, kv_len), keyword
            Token of each key row. The first that are given become those of the record.
        real, real_queries : boolean array (batch, kv_len) and (batch, q_len), keyword
            False where a row is padding; in one sequence `real` says both.
        one_sequence : bool, keyword
            False if queries and keys are of two sequences, as in cross-attention.
        sequences : tuple (str or None, str or None), keyword
            As in `LayerRecord`; both are "input_ids" by default.

        Raises
        ------
        ShapeError, DTypeError, KeywordError
            Arrays and tokens do not fit; tokens are texts; a keyword is none of these.
        """
        check_keywords(options)
        index = len(self.layers)
        sequences = options.pop("sequences", ("input_ids", "input_ids"))
        tokens = options.get("tokens")
        options["tokens"] = without_unknown(tokens, self.unknown_id)
        keep_weights = (
            self._keep == "weights"
            if isinstance(self._keep, str)
            else index in (() if self._keep is None else self._keep)
        )
        if keep_weights:
            # What a cache or the caller does to these arrays later must not change the weights.
            query, key, variants = copied((query, key, variants))
        scores = self._scores(query, key, *variants, top=self._top, **options)
        if not keep_weights:
            scores = replace(scores, weights=None, inputs=None)
        if self.tokens is None and tokens is not None and sequences[1] == "input_ids":
            self.tokens = np.atleast_2d(np.asarray(tokens))
        layer = LayerRecord(index, name, scores, sequences)
        self.layers.append(layer)
        return layer

    def _scores(self, query: Any, key: Any, *variants: Any, **options: Any) -> HeadScores:
        """The scores of the heads of one layer."""
        return head_scores(query, key, *variants, **options)

    def layer(self, index: int) -> LayerRecord:
        """One layer, from the end if negative.

        Raises
        ------
        ArgumentError
            If there is no such layer.
        """
        if not -len(self.layers) <= index < len(self.layers):
            raise ArgumentError(
                f"layer {index} does not exist.",
                action=f"Choose from 0 to {len(self.layers) - 1}."
                if self.layers
                else "Call the model first: no layer has run.",
            )
        return self.layers[index]

    def require_kept(self) -> None:
        """Refuse numbers in `keep` that no layer has; for those who have added all layers.

        Raises
        ------
        ArgumentError
            If there is no such layer.
        """
        if not isinstance(self._keep, str):
            for index in self._keep or ():
                self.layer(index)

    def __getitem__(self, index: int) -> LayerRecord:
        try:
            return self.layer(index)
        except ArgumentError as error:
            raise IndexError(str(error)) from None

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerRecord]:
        return iter(self.layers)

    def __repr__(self) -> str:
        heads = sum(layer.num_heads for layer in self)
        sizes = f"{counted(len(self), 'layer')}, {counted(heads, 'head')}"
        return f"ModelRecord({self.model!r}, {sizes})"

    def heads(self) -> Any:
        """One row for each layer and head, averaged over batch and queries that are not padding.

        Returns
        -------
        pandas.DataFrame or HeadTable
            Columns layer, head, kind, also (a second kind, or None) and each of `SCORES`; a list of
            dicts where pandas is not installed.
        """
        return frame_or_table(self.rows())

    def rows(self) -> HeadTable:
        """The rows of `heads()`, whether pandas is there or not."""
        return HeadTable(row for layer in self for row in layer.heads())

    def best(self, score: str) -> dict[str, Any] | None:
        """The row of the head with the largest mean of a score; None if it applies to none.

        Raises
        ------
        ArgumentError
            If there is no such score; the message has their names.
        """
        return self.rows().best(score)

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return in_html(self.summary())

    def sentences(self) -> list[str]:
        """What there is to know of the text: `notes`, unknown tokens, and heads that hold NaN."""
        counted = [layer.scores.counted["entropy"] for layer in self]
        unknown = sentences_of_unknown(self.tokens, self.unknown_id, counted)
        real = [layer for layer, of in zip(self, counted, strict=True) if of.any()]
        return [*self.notes, *unknown, *sentences_of_nan([r for of in real for r in of.heads()])]

    def summary(self, written: str = "") -> str:
        """What `qkv inspect --model` prints: a map of heads and their kinds, and `written`."""
        # rich, which draws the map, is imported when the first text is asked for.
        from qkv.inspection.summaries.model import summary_of_model

        text = summary_of_model(
            self.model, self.tokens, self.sentences(), self.layers, self.rows(), written
        )
        return text.rstrip("\n")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all numbers to a safetensors file with names in its metadata.

        Of layers that are kept, query, key, lse and variants are written too, so that weights can
        be read wherever the file is opened.

        Raises
        ------
        FileError
            If the file cannot be written.
        UnsupportedError
            A kept layer has a variant that is code, such as a `ScoreMod`.
        """
        layers = [(layer.name, layer.scores, layer.sequences) for layer in self]
        fields = (self.model, self.tokens, self.texts, self.decoder_texts, layers)
        about = (self.unknown_id, self.notes)
        model_file.save(model_file.RecordFields(*fields, *about), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelRecord:
        """Read a record that `save` wrote.

        Raises
        ------
        FileError
            The file is missing, broken, or of another kind.

        Examples
        --------
        >>> import qkv, qkv.samples, tempfile
        >>> record = qkv.samples.tiny_model().inspect("the cat. the cat.")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record.save(folder + "/record.safetensors")
        ...     qkv.ModelRecord.load(folder + "/record.safetensors")
        ModelRecord('tiny', 2 layers, 8 heads)
        """
        return load(path)

    def to_pandas(self) -> Any:
        """One row for each layer and head, as `heads()`, always as a table of pandas.

        Returns
        -------
        pandas.DataFrame

        Raises
        ------
        UnsupportedError
            pandas is not installed; `rows()` needs none.
        """
        return as_frame(self.rows())

    def compare(self, other: ModelRecord) -> HeadComparison:
        """This record and another side by side, with the difference of every head.

        Parameters
        ----------
        other : ModelRecord
            Of the same model on another text, or of a model with the same layers and heads.

        Returns
        -------
        HeadComparison
            Its differences are those of `other` less those of this record.

        Raises
        ------
        ShapeError
            The records have different layers or heads, or none.

        Examples
        --------
        >>> import qkv.samples
        >>> model = qkv.samples.tiny_model()
        >>> comparison = model.inspect("the cat. the cat.").compare(model.inspect("the dog sat."))
        >>> len(comparison.rows()), len(comparison.largest("induction", 3))
        (8, 3)
        """
        return HeadComparison(
            *(ComparedHeads.of(r.model, r.rows(), r.texts, r.tokens) for r in (self, other))
        )

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        score: str = "entropy",
        *,
        ax: Any = None,
    ) -> Any:
        """Draw one score of every head, layers down and heads across.

        Parameters
        ----------
        path : path, optional
            Where to write the picture; its ending says the format: .svg, .png or .pdf. Without, a
            new figure of pyplot is drawn, which a notebook shows. Needs matplotlib.
        score : str
            One of `qkv.inspection.heads.head_scores.SCORES`.
        ax : matplotlib.axes.Axes, optional
            Where to draw, in place of a path.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ArgumentError
            There is no such score, or no layer.
        """
        if not self.layers:
            raise ArgumentError(
                "there are 0 layers to draw.", action="Call the model first: no layer has run."
            )
        return picture_of_heads(path, ax, self.rows().grid(score), score, self.model)

    def to_html(self) -> str:
        """The record as a page of the lab: one HTML file that works from disk, with no network.

        Returns
        -------
        str
            Everything is inside; see `qkv.lab.to_html`.
        """
        return page_of(self)


def load(path: str | os.PathLike[str]) -> ModelRecord:
    """Read a record that `ModelRecord.save` wrote; errors are those of `ModelRecord.load`."""
    fields = model_file.load(path)
    record = ModelRecord(fields.model)
    record.tokens, record.texts = fields.tokens, fields.texts
    record.decoder_texts = fields.decoder_texts
    record.unknown_id, record.notes = fields.unknown_id, list(fields.notes)
    for index, (name, scores, sequences) in enumerate(fields.layers):
        record.layers.append(LayerRecord(index, name, scores, sequences))
    return record
