"""What the lab can be opened with: a file of arrays, a saved record, or a record in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

import qkv
from qkv.arguments.declarations import checked, shown
from qkv.backends import Progress
from qkv.files import Arrays, read_arrays
from qkv.inspection.models.model_file import is_model_record
from qkv.inspection.models.model_record import ModelRecord, load
from qkv.inspection.records.record import Record
from qkv.inspection.records.record_file import is_record
from qkv.inspection.traces.trace import Trace
from qkv.lab.parameters import Parameters, TooLongError
from qkv.lab.small_examples.examples import Example, small_example, traced_example
from qkv.lab.sources.heads import Heads, heads_of_model, heads_of_record
from qkv.variants.base import short_repr

__all__ = ["Source", "open_arrays", "open_file", "require_pairs", "source_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a session shows beside the examples.

    Attributes
    ----------
    title : str
    example : Example or None
        Rows that are few enough to be shown number by number.
    heads : Heads or None
        Layers and heads for the model panel.
    intervene : callable (Parameters) -> dict, or None
        Runs the model again with some heads changed; answers the method `intervene`.
    read : callable (text) -> Source, or None
        The same model on another text.
    text : str or None
        What the reader gave the model to read.
    """

    title: str
    example: Example | None = None
    heads: Heads | None = None
    intervene: Callable[[Parameters], dict[str, Any]] | None = None
    read: Callable[[str], Source] | None = None
    text: str | None = None


@checked
def open_file(path: str | os.PathLike[str], *variants: Any, **options: Any) -> Source:
    """Open a saved record, of a model or of one call, or a safetensors or npz file with q, k and v.

    Parameters
    ----------
    path : path
    *variants, **options
        For arrays: as `qkv.attention` takes them.

    Raises
    ------
    FileError
        The file cannot be read safely.
    ArgumentError
        Variants or options are given for a record, which has its own.

    Examples
    --------
    >>> import numpy as np, qkv.files, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     x = np.eye(3, dtype="float32")
    ...     qkv.files.write_arrays(folder + "/a.safetensors", x, x, x)
    ...     open_file(folder + "/a.safetensors").heads.layers[0].q_len
    3
    """
    title = os.path.basename(os.fspath(path))
    is_of_a_model = is_model_record(path)
    if (is_of_a_model or is_record(path)) and (variants or options):
        given = ", ".join([*map(short_repr, variants), *options])
        raise qkv.ArgumentError(
            f"{shown(title, 80)} is a saved record, which has its variants and options, and "
            f"{given:.80} is given.",
            action="Leave it out.",
        )
    if is_of_a_model:
        record = load(path)
        return Source(record.model, heads=heads_of_model(record))
    if is_record(path):
        return Source(title, heads=heads_of_record(Record.load(path), title, None))
    return open_arrays(read_arrays(path), title, *variants, **options)


def open_arrays(
    arrays: Arrays,
    title: str,
    *variants: Any,
    about: str = "",
    progress: Progress | None = None,
    **options: Any,
) -> Source:
    """Inspect arrays out of a file; `about` says what they are, in a sentence.

    Raises
    ------
    ArgumentError
        There is no row to show.
    """
    if not all(np.size(array) for array in (arrays.query, arrays.key, arrays.value)):
        seen = [(n, str(np.shape(getattr(arrays, n)))) for n in ("query", "key", "value")]
        raise qkv.ArgumentError(
            f"{title} has no numbers to show.", seen, "Pass arrays with a row or more."
        )
    rows = arrays.query, arrays.key, arrays.value
    record = qkv.inspect(*rows, *variants, progress=progress, **options)
    tokens = arrays.tokens
    if tokens is not None and len(tokens) != record.weights.shape[-1]:
        tokens = None
    example = None
    if not variants and not options:
        example = small_example("file", title, [np.asarray(row) for row in rows], tokens)
    *_, q_len, kv_len = record.weights.shape
    is_placed = q_len == kv_len or _is_placed(rows, variants, options)
    if not is_placed:
        about = (
            f"{about} Where {q_len} queries stand among {kv_len} keys is not said, so weights on "
            "the previous, own and next key are left out; qkv inspect FILE with --q-offset start "
            "or end has them, and --html PAGE writes its page."
        ).strip()
    return Source(title, example, heads_of_record(record, title, tokens, about, is_placed))


def _is_placed(rows: Sequence[Any], variants: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether it is said where queries stand, which a mask that reads positions has to know."""
    try:
        qkv.plan(*rows, qkv.Causal(), *variants, **options)
    except qkv.AmbiguityError:
        return False
    return True


def require_pairs(arrays: Arrays, most: int) -> None:
    """Refuse arrays with more than `most` pairs of a query and a key, over all heads.

    Raises
    ------
    TooLongError
        With how many there are, before any is computed.
    """
    query, key = (np.shape(array) for array in (arrays.query, arrays.key))
    pairs = prod(query[:-1]) * (key[-2] if len(key) > 1 else 1)
    if pairs > most:
        raise TooLongError(
            f"the file has {pairs:.3g} pairs of a query and a key; at most {most:.3g} are computed "
            "in the page.",
            [("query", str(tuple(query))), ("key", str(tuple(key)))],
            "Bring fewer rows or heads, or start qkv lab with the name of the file.",
        )


def source_of(given: Any, tokens: Sequence[str] | None = None) -> Source:
    """What to show of a record, model record or trace, or of a source itself."""
    if isinstance(given, Source):
        return given
    if isinstance(given, ModelRecord):
        return Source(given.model, heads=heads_of_model(given))
    if isinstance(given, Record):
        return Source("A record", heads=heads_of_record(given, "A record", tokens))
    if isinstance(given, Trace):
        return Source("A trace", traced_example(given))
    raise qkv.ArgumentError(
        f"the lab cannot show {type(given).__name__}.",
        action="Pass a record of qkv.inspect, a model record, a trace, or qkv.lab.open_file(path).",
    )
