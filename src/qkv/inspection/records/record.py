"""The result of `qkv.inspect`: the output, and statistics of its weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import LARGEST, checked, checked_size
from qkv.arrays import library_of
from qkv.arrays.copies import handed_out
from qkv.backends import Inspectable, Progress
from qkv.call.binding.flatten import copied
from qkv.call.checked import CheckedCall
from qkv.call.inspected import Inspected
from qkv.inspection.heads.head_table import Table, as_frame, table_of_means
from qkv.inspection.records import key_mass, record_file
from qkv.inspection.records.non_finite import First, NonFinite, non_finite
from qkv.inspection.records.record_pictures import picture_of_tiles, picture_of_weights
from qkv.inspection.rendering.pages import page_of
from qkv.inspection.summaries import in_html
from qkv.inspection.weights.lazy_weights import LazyWeights
from qkv.inspection.weights.replay import Replay
from qkv.inspection.weights.statistics import (
    BestKeys,
    WeightStatistics,
    by_weight,
    number_of_keys,
    weight_statistics,
)
from qkv.problem.spec import Problem

Array = NDArray[Any]


@checked
class Record:
    """The result of `qkv.inspect`: the output, lse, and statistics of the weights.

    Parameters
    ----------
    found : Inspected
        The call that ran, and what it left.
    progress : callable (done, total), optional
        Told of blocks done while a statistic, or a picture of the weights, is computed.

    Notes
    -----
    Arrays are copies: what a caller writes into them changes nothing here. Statistics are float32
    (float64 for float64 input), before dropout, one row for each query head. The backend "cpu"
    computes entropy and largest weight with the output. Everything else is computed at its first
    use, in O(tile) memory: received weight and `top(8)` by one compiled pass over the scores each,
    which takes a half to four fifths as long as the forward pass; `mass`, `mass_at`, `weights` and
    more than 256 best keys in NumPy. Other backends use NumPy for all: one pass for entropy,
    largest and received weight together, and one for each of the others. For tensors on another
    device, the output is computed there, the statistics from copies in main memory.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(3)
    >>> record = qkv.inspect(x, x, x, qkv.Causal())
    >>> record.mass([0]).round(3)
    array([1.   , 0.36 , 0.264])
    >>> record.received.round(3)
    array([1.624, 0.905, 0.471])
    """

    def __init__(self, found: Inspected, progress: Progress | None = None) -> None:
        self._found = found
        self._progress = progress
        self._rows = found.rows
        self._received: Array | None = None
        self._best = BestKeys()
        self.backend: str = found.backend
        """The backend that ran."""

    @property
    def output(self) -> Any:
        """The output, as `qkv.attention` returns it."""
        return handed_out(self._found.output)

    @property
    def lse(self) -> Any:
        """Logarithm of the row sums, natural, `(..., num_heads, q_len)`."""
        return handed_out(self._found.lse)

    @property
    def _call(self) -> CheckedCall:
        return self._found.call

    @property
    def problem(self) -> Problem:
        """The checked call: its sizes, operands, positions. Nobody can write to its arrays."""
        return self._call.problem.read_only()

    @property
    def variants(self) -> tuple[Any, ...]:
        """The variants as they were given, with copies of their arrays."""
        return tuple(copied([given for given, _ in self._call.variants]))

    @cached_property
    def _replay(self) -> Replay:
        return Replay(self._call.problem, self._found.row_lse)

    @property
    def _inspectable(self) -> Inspectable | None:
        backend = self._call.choice.backend
        return backend if isinstance(backend, Inspectable) else None

    @cached_property
    def weights(self) -> LazyWeights:
        """The weights (..., num_heads, q_len, kv_len), computed where they are sliced."""
        spec = self._call.problem.spec
        shape = (*spec.batch_shape, spec.num_heads, spec.q_len, spec.kv_len)
        shape = shape[-2:] if self._call.ndim == 2 else shape
        return LazyWeights(self._replay, shape, self._inspectable)

    def __repr__(self) -> str:
        return f"Record(weights {self.weights.shape}, {self.weights.dtype}, run by {self.backend})"

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        return in_html(self.summary())

    def summary(self, tokens: Sequence[str] | None = None, *, batch: int = 0) -> str:
        """What `qkv inspect` prints, and `print(record)` of batch row 0: what heads look at.

        Parameters
        ----------
        tokens : sequence of str (kv_len,), optional
            Names of the keys.
        batch : int
            Flat index over the leading dimensions.

        Raises
        ------
        ArgumentError
            If there is no such batch row, or not one token for each key.
        """
        # rich, which draws the tables, is imported when the first text is asked for.
        from qkv.inspection.summaries.record import summary_of_record

        return summary_of_record(self, tokens, batch)

    @property
    def non_finite(self) -> NonFinite:
        """The rows whose weights are NaN, and why; false if there is none."""
        rows, reasons = self._non_finite
        return NonFinite(self._in_caller_shape(rows), reasons)

    @cached_property
    def _non_finite(self) -> tuple[Array, tuple[str, ...]]:
        return self.non_finite_of()

    def non_finite_of(self, first: First | None = None) -> tuple[Array, tuple[str, ...]]:
        """The same, where heads and rows are counted from others than 0."""
        output = self._call.library.on_host(self._found.output, "output", by_value=True)
        output = self._call.plain(output)
        return non_finite(self._call.problem, self._found.row_lse, output, first)

    def rows(self) -> Table:
        """A dict for each batch row and head: both, and the means of `rows_by_query` but NaN."""
        return table_of_means(self.rows_by_query(), self.weights.shape[:-1])

    def rows_by_query(self) -> dict[str, Array]:
        """What `rows` averages, query by query.

        Returns
        -------
        dict of str to NumPy array (..., num_heads, q_len)
            entropy, max_weight, and the weight on the first key and on the keys at the previous,
            own and next position. NaN where the query has no weights, because it may use no key or
            a score is NaN, and where there is no key at such a position.

        Examples
        --------
        >>> import numpy as np, qkv
        >>> x = np.eye(3)
        >>> qkv.inspect(x, x, x, qkv.Causal()).rows_by_query()["previous"].round(2)
        array([ nan, 0.36, 0.26])
        """
        on_host, problem = self._call.library.on_host, self._call.problem
        rows = {"entropy": self.entropy, "max_weight": self.max_weight}
        rows["first"] = self.mass(slice(1))
        rows |= {name: self.mass_at(offset) for name, offset in key_mass.PLACES.items()}
        host = {name: on_host(of, name, by_value=True) for name, of in rows.items()}
        best = on_host(self.top(1)[0], "top", by_value=True)[..., 0]
        return key_mass.counted_rows(host, best, problem)

    def to_pandas(self) -> Any:
        """`rows()` as a pandas.DataFrame.

        Raises
        ------
        UnsupportedError
            pandas is not installed; `rows()` needs none.
        """
        return as_frame(self.rows())

    @property
    def entropy(self) -> Any:
        """`-sum_j w[i, j] log w[i, j]` in nats, `(..., num_heads, q_len)`; 0 for an empty row."""
        return self._statistic("entropy")

    @property
    def max_weight(self) -> Any:
        """The largest weight of each row, `(..., num_heads, q_len)`; 0 for an empty row."""
        return self._statistic("max_weight")

    @property
    def received(self) -> Any:
        """`sum_i w[i, j]`: the weight that each key takes in all, `(..., num_heads, kv_len)`."""
        if self._received is None:
            if self._inspectable is not None:
                compiled = self._inspectable.received
                self._received = compiled(self._call.problem, self._replay.lse, self._progress)
            else:
                self._received = self._weight_statistics.received
        return self._in_caller_shape(self._received)

    def top(self, k: int) -> tuple[Any, Any]:
        """The k keys with the largest weights of each row.

        Returns
        -------
        (indices, weights)
            Each `(..., num_heads, q_len, k)`: the keys of the largest scores, of equal scores
            those of lower index, in order of falling weights; keys of equal weight, as it is
            returned, have rising indices. Rows with fewer allowed keys are padded with -1 and 0.
            A key whose score is NaN is never one.

        Raises
        ------
        ArgumentError
            If k is not a whole number of 1 or more.
        """
        k = number_of_keys(k)
        best = self._best.at_least(k, self._replay, self._inspectable, self._progress)
        # The k best are the first of more, which come in order of their scores.
        indices, weights = by_weight(*(np.array(of[..., :k]) for of in best))
        return self._in_caller_shape(indices, 1), self._in_caller_shape(weights, 1)

    def mass(self, keys: Any) -> Any:
        """The weight that each row puts on a set of keys, `(..., num_heads, q_len)`.

        Parameters
        ----------
        keys : int, integer array, slice or boolean array (kv_len,)
            Rows of the key array; naming one twice counts it once.

        Raises
        ------
        ArgumentError
            If a key is outside of the key array.
        """
        kv_index = key_mass.key_rows(keys, self._call.problem.spec.kv_len)
        return self._in_caller_shape(key_mass.mass_on_rows(self._replay, kv_index))

    def mass_at(self, offset: int) -> Any:
        """The weight of the key at position `q_pos + offset`, `(..., num_heads, q_len)`.

        -1 is the previous token, 0 the query's own; rows without such a key give 0. Where
        positions restart in segments, the key is the one of the query's own segment.

        Raises
        ------
        ArgumentError
            If the offset is not a whole number.
        """
        offset = checked_size("offset", offset, -LARGEST)
        return self._in_caller_shape(key_mass.mass_at_offset(self._replay, offset))

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        head: int = 0,
        batch: int = 0,
        tokens: Sequence[str] | None = None,
        *,
        ax: Any = None,
    ) -> Any:
        """Draw the weights of one head, queries down and keys across.

        Beyond 1024 of either, a pixel is the largest weight of a block, and a terminal shows a bar.

        Parameters
        ----------
        path : path, optional
            Of a picture, .svg, .png or .pdf; without, pyplot draws a new figure. Needs matplotlib.
        head, batch : int
            Query head, and flat index over the leading dimensions.
        tokens : sequence of str (kv_len,), optional
            Names of keys. Of more than 40 some are written, and the axis says how many.
        ax : matplotlib.axes.Axes, optional, in place of a path

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        UnsupportedError, ArgumentError, FileError
            matplotlib is not installed; no such head or ending, or not one token for each key; the
            file cannot be written.
        """
        return picture_of_weights(self._replay, path, ax, head, batch, tokens, self._progress)

    def plot_tiles(self, path: str | os.PathLike[str], head: int = 0, batch: int = 0) -> None:
        """Draw which tiles of one head the backend skips, and in which it evaluates a mask.

        path, head, batch and errors are those of `plot`.
        """
        picture_of_tiles(self._replay, path, head, batch, self._call.choice.backend, self.backend)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a safetensors file: query, key, value, variants and results.

        Raises
        ------
        UnsupportedError
            A variant is code, such as a `ScoreMod`, or of another package; nothing is written.
        FileError
            The file cannot be written.

        Examples
        --------
        >>> import numpy as np, qkv, tempfile
        >>> x = np.eye(3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     qkv.inspect(x, x, x, qkv.Causal()).save(folder + "/record.safetensors")
        ...     qkv.Record.load(folder + "/record.safetensors").received.round(3)
        array([1.624, 0.905, 0.471])
        """
        record_file.save(self._found, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], progress: Progress | None = None) -> Record:
        """Read a record that `save` wrote, which answers as the one that was saved.

        Parameters
        ----------
        path : path
        progress : callable (done, total), optional
            As for `qkv.inspect`.

        Raises
        ------
        FileError
            The file is missing, broken, or of another kind.

        Notes
        -----
        Arrays are of the library that they were of, in main memory, or of NumPy where it is not
        installed; those that variants hold are of NumPy. What is computed at its first use is
        computed here, with the same bits on a machine of the same kind.
        """
        return cls(record_file.load(path), progress)

    def to_html(self, tokens: Sequence[str] | None = None) -> str:
        """The record as a page of the lab: one HTML file that works from disk, with no network.

        Parameters
        ----------
        tokens : sequence of str (kv_len,), optional
            Names of the keys, one for each.
        """
        return page_of(self, tokens)

    def _statistic(self, name: str) -> Any:
        """One statistic, with the output if the backend computes it so, else with all weights."""
        if self._rows is None:
            return self._in_caller_shape(getattr(self._weight_statistics, name))
        array, like = getattr(self._rows, name), self._found.lse
        library = library_of(like, "lse")
        converted = library.restore(np.array(array.reshape(tuple(like.shape))))
        return converted.to(like.device) if hasattr(like, "is_meta") else converted

    @cached_property
    def _weight_statistics(self) -> WeightStatistics:
        return weight_statistics(self._replay, self._progress)

    def _in_caller_shape(self, array: Array, trailing: int = 0) -> Any:
        """`(batch, num_heads, rows, ...)`, batch flat or not, in memory of its own."""
        shape = array.shape[array.ndim - 2 - trailing :]
        shaped = array.reshape(*self._call.problem.spec.batch_shape, *shape)
        return self._call.rows(np.array(shaped), trailing)
