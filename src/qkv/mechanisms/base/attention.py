"""The base of mechanisms with a softmax over scores, which use `qkv.attention`."""

from __future__ import annotations

from typing import Any

import qkv
from qkv.errors import ShapeError
from qkv.mechanisms.base.arrays.namespace import like, values
from qkv.mechanisms.base.arrays.rows import Rows
from qkv.mechanisms.base.explanations.attention_steps import attention_steps
from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Step
from qkv.mechanisms.base.mechanism import Mechanism

__all__ = ["AttentionMechanism"]


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

    @property
    def compares_positions(self) -> bool:
        """Whether a score or mask depends on positions; False unless a subclass says otherwise."""
        return False

    def sequences(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """What queries, keys and values are made of.

        Raises
        ------
        ShapeError
            Positions are compared, and there are more or fewer keys than queries.
        """
        query, key, value = super().sequences(x, key, value)
        if self.compares_positions and key.shape[-2] != query.shape[-2]:
            raise ShapeError(
                f"{self.name} compares positions, so it reads as many keys as queries.",
                [("x", str(tuple(query.shape))), ("key", str(tuple(key.shape)))],
                "Pass a key of as many rows as x, or call qkv.attention, which takes q_offset.",
            )
        return query, key, value

    def heads(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Query, key and value rows as `qkv.attention` takes them; as they are by default."""
        return query, key, value

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """Masks and score variants for these rows, with arrays in the library of `query`."""
        return ()

    def join(self, out: Any) -> Any:
        """The output of the mechanism from that of `qkv.attention`."""
        return out

    def __call__(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
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
        q, k, v = self.heads(*self.sequences(x, key, value))
        return self.join(qkv.attention(q, k, v, *self.variants(q, k), scale=self.scale))

    def token_mixing(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
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
        q, k, v = look.heads(*(values(a, "x") for a in self.sequences(x, key, value)))
        record = qkv.inspect(q, k, v, *look.variants(q, k), scale=look.scale)
        return like(record.weights[...], x)

    def steps(self, token: ExplainedToken) -> list[Step]:
        """Projections, the steps of attention in each head, and what is made of the heads."""
        q, k, v, variants = self.problem_of(token)
        trace = qkv.explain(q, k, v, *variants, scale=self.scale, q_index=token.index)
        out = qkv.attention(q, k, v, *variants, scale=self.scale)
        return [
            *self.steps_before(token, q, k, v),
            *attention_steps(trace, token.kv_tokens),
            *self.steps_after(out, token.index),
        ]

    def problem_of(self, token: ExplainedToken) -> tuple[Any, Any, Any, tuple[Any, ...]]:
        """Heads and variants from which a row comes; the same for all unless a subclass says."""
        q, k, v = self.heads(token.query, token.key, token.value)
        return q, k, v, self.variants(q, k)

    def steps_before(self, token: ExplainedToken, query: Any, key: Any, value: Any) -> list[Step]:
        """The steps from x to query, key and value heads; none unless a subclass says."""
        return []

    def steps_after(self, out: Any, index: int) -> list[Step]:
        """The steps from the output of the heads to that of the mechanism."""
        return []
