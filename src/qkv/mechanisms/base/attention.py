"""The base of mechanisms with a softmax over scores, which use `qkv.attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import qkv
from qkv.errors import ShapeError
from qkv.inspection.explain import selected_indices
from qkv.mechanisms.base.attention_steps import attention_steps
from qkv.mechanisms.base.explanation import Explanation, Step
from qkv.mechanisms.base.mechanism import Mechanism, token_names
from qkv.mechanisms.base.namespace import like, values

__all__ = ["AttentionMechanism", "all_three", "one_sequence"]


class AttentionMechanism(Mechanism):
    """A mechanism whose heads are `qkv.attention` with some variants.

    A subclass may define `heads`, which makes query, key and value rows, `variants` and `join`.
    Called as `qkv.torch.MultiHeadAttention` is: `key` is the query unless given, and `value` is the
    key unless given.

    Attributes
    ----------
    scale : float or None
        What scores are multiplied by; None is `head_dim ** -0.5`.
    """

    scale: float | None = None

    def heads(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Query, key and value rows as `qkv.attention` takes them; as they are by default."""
        return query, key, value

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """Masks and score variants for these rows, with arrays in the library of `query`."""
        return ()

    def join(self, out: Any) -> Any:
        """The output of the mechanism from that of `qkv.attention`."""
        return out

    def __call__(self, x: Any, key: Any = None, value: Any = None, /) -> Any:
        """Attend from `x` to `key` and `value`, or to itself.

        Parameters
        ----------
        x : array (..., q_len, embed_dim)
        key, value : array (..., kv_len, kv_dim), optional
            `x` unless given; `value` is `key` unless given.

        Returns
        -------
        array (..., q_len, width)
            In the library, dtype and device of `x`.

        Raises
        ------
        ShapeError, DTypeError
            The arrays do not fit the weights or one another.
        """
        q, k, v = self.heads(*all_three(x, key, value))
        return self.join(qkv.attention(q, k, v, *self.variants(q, k), scale=self.scale))

    def token_mixing(self, x: Any, key: Any = None, value: Any = None, /) -> Any:
        """The attention weights `(..., num_heads, q_len, kv_len)`; values only, without a gradient.

        Parameters
        ----------
        x, key, value : array
            As for a call.

        Raises
        ------
        UnsupportedError
            The weights would take more memory than the limit of `qkv.inspect`.
        """
        look = self.detached()
        q, k, v = look.heads(*(values(a, "x") for a in all_three(x, key, value)))
        record = qkv.inspect(q, k, v, *look.variants(q, k), scale=look.scale)
        return like(record.weights[...], x)

    def explain(
        self,
        x: Any,
        /,
        tokens: Sequence[str] | None = None,
        index: int = 0,
        *,
        key: Any = None,
        value: Any = None,
        kv_tokens: Sequence[str] | None = None,
    ) -> Explanation:
        """The calculation of one token of `x` (n, embed_dim), step by step.

        Parameters
        ----------
        x, key, value : array
            As for a call, of one sequence.
        tokens : sequence of str (n,), optional
            Names of the rows of x; their numbers by default.
        index : int
            The token whose output is calculated, the first by default.
        kv_tokens : sequence of str (kv_len,), optional
            Names of the rows of key; those of x if they are as many, else numbers.
        """
        look = self.detached()
        given = [values(a, "x") for a in all_three(x, key, value)]
        one_sequence(*given)
        names = token_names(tokens, given[0].shape[0])
        same = kv_tokens is None and len(given[1]) == len(names)
        kv_names = names if same else token_names(kv_tokens, len(given[1]))
        row = int(selected_indices(index, len(names), "index", "tokens")[0])
        q, k, v, variants = look.problem_of(row, *given)
        trace = qkv.explain(q, k, v, *variants, scale=look.scale, q_index=row)
        out = qkv.attention(q, k, v, *variants, scale=look.scale)
        steps = [
            *look.steps_before(given, (q, k, v), row, names, kv_names),
            *attention_steps(trace, kv_names),
            *look.steps_after(out, row),
        ]
        return self.explanation(steps, names[row])

    def problem_of(
        self, index: int, query: Any, key: Any, value: Any
    ) -> tuple[Any, Any, Any, tuple[Any, ...]]:
        """Heads and variants from which row `index` comes; the same for all unless a subclass says.

        For `explain`.
        """
        q, k, v = self.heads(query, key, value)
        return q, k, v, self.variants(q, k)

    def steps_before(
        self,
        given: Sequence[Any],
        rows: Sequence[Any],
        index: int,
        tokens: Sequence[str],
        kv_tokens: Sequence[str],
    ) -> list[Step]:
        """The steps from x to query, key and value rows; none unless a subclass says."""
        return []

    def steps_after(self, out: Any, index: int) -> list[Step]:
        """The steps from the output of the heads to that of the mechanism."""
        return []


def one_sequence(*arrays: Any) -> None:
    """Refuse arrays with leading dimensions: an explanation is of one sequence.

    Raises
    ------
    ShapeError
        An array is not (n, width).
    """
    for array in arrays:
        if array.ndim != 2:
            raise ShapeError(
                f"explain shows one sequence (n, embed_dim); x has shape {tuple(array.shape)}.",
                action="Pass one of them, as in explain(x[0]).",
            )


def all_three(x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Query, key and value: the key is the query unless given, and the value is the key."""
    key = x if key is None else key
    return x, key, key if value is None else value
