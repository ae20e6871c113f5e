"""The keys and values in a cache as arguments of `qkv.attention`, with masks and offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np

import qkv
from qkv._api import attention_of
from qkv.arguments.readable_checks import checked_flag
from qkv.cache.arguments import Lengths, longest
from qkv.cache.page_columns import continued
from qkv.cache.query_positions import (
    READ_DIFFERENCES,
    check_dropped,
    check_row_count,
    check_segments,
    check_window,
    q_len_of,
    reads_positions,
    restarts,
    without_end,
)
from qkv.call.binding.options import OptionValues
from qkv.errors import UnsupportedError

__all__ = ["Part", "Rows", "as_offset"]


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Key rows whose positions follow one another, and their values.

    Attributes
    ----------
    key, value : array, Paged or Quantized
        `(..., num_kv_heads, kv_len, dim)`, or rows that stand for it.
    masks : tuple of masks
        Which of the rows may be read: `KeyLengths` where sequences differ in length, the window
        of a rolling cache.
    kv_offset : int or int64 array over the batch dimensions
        Position of key row 0.

    Examples
    --------
    >>> import numpy as np, qkv.cache
    >>> x = np.zeros((1, 1, 3, 4))
    >>> part = qkv.cache.ContiguousCache().append(x, x).parts[0]
    >>> part.key.shape, part.kv_offset
    ((1, 1, 3, 4), 0)
    """

    key: Any
    value: Any
    masks: tuple[Any, ...]
    kv_offset: Any

    def _attention(
        self, query: Any, variants: tuple[Any, ...], options: OptionValues, return_lse: bool
    ) -> Any:
        """`qkv.attention` to these rows."""
        return attention_of(query, self.key, self.value, variants, options, return_lse)


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """The rows of a cache as arguments of `qkv.attention`.

        attention(query, part.key, part.value, *variants, *part.masks,
                  q_offset=q_offset, kv_offset=part.kv_offset)

    for the only part; for several, their `merge`.

    Attributes
    ----------
    parts : tuple of Part
        One, or two where a rolling cache has kept sinks and dropped what followed them.
    q_offset : int or int64 array over the batch dimensions
        Position of the first of the tokens that were just appended.
    new : int, optional
        Rows that were just appended, None for rows that were read.
    window : int, optional
        That of a rolling cache: tokens that a query reads, its own among them.

    Notes
    -----
    Rows are views of the cache: use them before the cache is changed again. The cache is there for
    as long as they are. They unpack into key and value, `key, value = cache.append(...)`, if they
    are in one part without masks: key and value alone do not say which rows may be read.

    Examples
    --------
    >>> import numpy as np, qkv, qkv.cache
    >>> cache = qkv.cache.ContiguousCache()
    >>> x = np.eye(3)[None, None]
    >>> rows = cache.append(x[:, :, :2], x[:, :, :2])
    >>> rows = cache.append(x[:, :, 2:], x[:, :, 2:])
    >>> rows.q_offset, rows.attention(x[:, :, 2:], qkv.Causal()).round(4)
    (2, array([[[[0.2645, 0.2645, 0.4711]]]]))
    """

    parts: tuple[Part, ...]
    q_offset: Any
    new: int | None = None
    window: int | None = None
    _is_new_at_end: bool = field(default=False, repr=False)
    """Whether the last row that was appended is the last token of each sequence."""
    _cache: Any = field(default=None, repr=False)

    @property
    def key(self) -> Any:
        """Keys of the only part."""
        return self._only.key

    @property
    def value(self) -> Any:
        """Values of the only part."""
        return self._only.value

    @property
    def masks(self) -> tuple[Any, ...]:
        """Masks of the only part."""
        return self._only.masks

    @property
    def kv_offset(self) -> Any:
        """Position of key row 0 of the only part."""
        return self._only.kv_offset

    def __iter__(self) -> Iterator[Any]:
        """Key and value of the only part, which has no masks."""
        only = self._only
        if only.masks:
            raise UnsupportedError(
                "key and value alone do not say which of these rows may be read.",
                [("masks", ", ".join(map(repr, only.masks)))],
                "Call rows.attention(query, ...), or pass rows.key, rows.value and *rows.masks.",
            )
        return iter((only.key, only.value))

    @property
    def _only(self) -> Part:
        if len(self.parts) == 1:
            return self.parts[0]
        raise UnsupportedError(
            f"these rows are in {len(self.parts)} parts whose positions do not follow one another.",
            [("sinks", "rows that a rolling cache keeps from the start"), ("window", "the last")],
            "Call rows.attention(query, ...), which merges them, or read rows.parts.",
        )

    def attention(
        self,
        query: Any,
        *variants: Any,
        scale: float | None = None,
        q_offset: Any = None,
        return_lse: bool = False,
        backend: str = "auto",
    ) -> Any:
        """`qkv.attention` of queries that stand where the appended tokens do.

        Parameters
        ----------
        query : array (..., num_heads, q_len, head_dim)
            As many rows as were appended, unless `q_offset` or `Causal("end")` says where they
            stand.
        *variants
            As for `qkv.attention`: `Causal()`, `ALiBi()`, ... Positions are those of the tokens.
        q_offset : int, integer array over the batch dimensions, "start", "end" or None
            Position of query row 0. "end" puts the last query at the last token of its sequence,
            "start" the first at position 0, None at the first of the appended tokens.
        scale, return_lse, backend
            As for `qkv.attention`.

        Returns
        -------
        array or (array, array)
            Output with the query's dtype, (..., num_heads, q_len, v_head_dim), and lse.

        Raises
        ------
        ShapeError
            If nothing says where the queries stand and they are not as many as the rows that were
            appended, or a rolling cache has dropped keys in the window of one of them.
        QkvError
            As `qkv.attention` does.

        Notes
        -----
        Of several parts each is a call; `Sinks` go with the first, and arrays over key rows
        (`Mask`, `Bias`, `Segments`) fit none of them. Over pages they have a column for each token
        of the longest sequence, or for each row of the pages. In `Segments` the queries are the
        last tokens of their sequences or the first ones; others have no position in each segment.
        """
        if return_lse is not False:
            return_lse = checked_flag("return_lse", return_lse)
        variants, q_offset, at_end = self._positions(query, variants, q_offset)
        in_segments = any(map(restarts, variants))
        if in_segments and not at_end and any(map(reads_positions, variants)):
            end = as_offset(self._stop() - query.shape[-2])
            at_end = check_segments(q_offset, end, self.parts[0].kv_offset)
        partials = []
        for i, part in enumerate(self.parts):
            own = [_over_rows(v, part) for v in variants if not (i and isinstance(v, qkv.Sinks))]
            if in_segments and at_end:
                check_dropped(own, part.kv_offset)
                places = "end", 0
            else:
                places = _places(q_offset, part, own, at_end=at_end and len(self.parts) == 1)
            options = OptionValues(scale, "bhld", *places, backend)
            every, lse = (*own, *part.masks), return_lse or len(self.parts) > 1
            partials.append(part._attention(query, every, options, lse))
        if len(partials) == 1:
            return partials[0]
        merged = qkv.merge(*partials)
        return merged if return_lse else merged[0]

    def _positions(
        self, query: Any, variants: tuple[Any, ...], q_offset: Any
    ) -> tuple[tuple[Any, ...], Any, bool]:
        """The variants, the position of query row 0, and whether the last row is the last token."""
        q_len = q_len_of(query)
        if q_len is None:  # `attention` says what is wrong with the query.
            return variants, self.q_offset, False
        at_end = False
        # `attention` counts "end" in key rows; here they need not begin at position 0.
        if q_offset is None or (isinstance(q_offset, str) and q_offset == "end"):
            bare = tuple([without_end(v) for v in variants]) if variants else ()
            if q_offset is None and (not variants or all(map(is_, bare, variants))):
                if self.new is not None:
                    check_row_count(q_len, self.new)
                return variants, self.q_offset, self._is_new_at_end
            variants, q_offset, at_end = bare, as_offset(self._stop() - q_len), True
        if self.window is not None:
            check_window(q_offset, self.window, np.asarray(self.parts[-1].kv_offset))
        return variants, q_offset, at_end

    def _stop(self) -> Lengths:
        """Position behind the last token of each sequence."""
        part = self.parts[-1]
        lens = _key_lengths(part)
        key = part.key.values if isinstance(part.key, qkv.Quantized) else part.key
        rows = key.shape[-2] if lens is None else lens.kv_lens
        return np.asarray(part.kv_offset + rows, np.int64)


def _places(q_offset: Any, part: Part, variants: list[Any], *, at_end: bool) -> tuple[Any, Any]:
    """`q_offset` and `kv_offset`, counted from key row 0 if that changes nothing.

    The positions grow with each token. Counted from the first or to the last row, all steps of a
    cache are alike, and are not checked anew. `at_end` says that the last query stands at the last
    token of each sequence.
    """
    kv_offset = part.kv_offset
    for variant in (*variants, *part.masks):
        reads_differences = type(variant) in READ_DIFFERENCES and (
            getattr(variant, "align", None) is None
        )
        if not (reads_differences or type(variant) is qkv.KeyLengths):
            return q_offset, kv_offset
    # Lengths that the caller gives would be the end.
    if at_end and not any(type(variant) is qkv.KeyLengths for variant in variants):
        return "end", 0
    if type(kv_offset) is int and kv_offset == 0:
        return q_offset, kv_offset
    if not (type(q_offset) is int or (type(q_offset) is np.ndarray and q_offset.dtype == np.int64)):
        return q_offset, kv_offset
    try:
        return as_offset(np.asarray(q_offset - kv_offset)), 0
    except ValueError:  # `attention` says which shape does not fit the batch.
        return q_offset, kv_offset


def _over_rows(variant: Any, part: Part) -> Any:
    """A variant with a column for each token of the longest sequence, over the rows of a part.

    Pages may have more rows, and rows behind the end of a sequence are in none of its segments.
    """
    lens = _key_lengths(part)
    if type(variant) in READ_DIFFERENCES or lens is None:
        return variant
    tokens = longest(np.asarray(lens.kv_lens))
    rows = tokens
    if isinstance(part.key, qkv.Paged):
        rows = part.key.page_table.shape[-1] * _page_size(part.key)
    if tokens == rows and not restarts(variant):
        return variant
    return continued(variant, tokens, rows, lens.kv_lens)


def _key_lengths(part: Part) -> qkv.KeyLengths | None:
    return next((mask for mask in part.masks if isinstance(mask, qkv.KeyLengths)), None)


def _page_size(paged: qkv.Paged) -> int:
    pages = paged.pages.values if isinstance(paged.pages, qkv.Quantized) else paged.pages
    return int(pages.shape[-2])


def as_offset(positions: Lengths) -> Any:
    """One int where all sequences agree, else a copy of the array."""
    if positions.size > 1 and not (positions == positions.flat[0]).all():
        return positions.copy()
    return int(positions.flat[0]) if positions.size else 0
