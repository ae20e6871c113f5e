"""The tokens that the queries of a layer are named by, where they are not those of its keys."""

from __future__ import annotations

from collections.abc import Sequence

from qkv.inspection.models.layer_record import LayerRecord
from qkv.inspection.models.model_record import ModelRecord

__all__ = ["query_texts"]


def query_texts(record: ModelRecord, layer: LayerRecord) -> Sequence[str] | None:
    """The query tokens of batch row 0; empty if not known, None if queries are among the keys.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> record, x = qkv.ModelRecord("translator"), np.eye(3)[None, None]
    >>> record.decoder_texts = ["le", " chat", "."]
    >>> sequences = "decoder_input_ids", "input_ids"
    >>> layer = record.add(x, x, name="cross", one_sequence=False, sequences=sequences)
    >>> query_texts(record, layer)
    ['le', ' chat', '.']
    """
    of_queries, of_keys = layer.sequences
    if of_queries == of_keys:
        return None
    texts, q_len = record.texts_of(of_queries) or (), layer.scores.rows["entropy"].shape[-1]
    return texts if len(texts) == q_len else ()
