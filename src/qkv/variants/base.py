"""What a variant is.

A variant is any object with `lower(builder)`. Those of this package also carry `naive`, a dense
float64 oracle written from their definition, and `examples`, from which tests, documents and
benchmarks are made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import numpy as np

from qkv.problem.builder import Builder, Shape
from qkv.problem.dense import Dense


class Variant(ABC):
    """What is said between q.k and the softmax.

    Subclass it, or pass any object with a `lower` method; see docs/add-a-variant.md.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> class Own:
    ...     def lower(self, builder):
    ...         builder.mask(builder.q_pos == builder.kv_pos)
    >>> x = np.eye(2)
    >>> qkv.attention(x, x, x, Own())
    array([[1., 0.],
           [0., 1.]])
    """

    def __repr__(self) -> str:
        """The call that makes it, defaults left out and arrays by shape."""
        said = []
        entries: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()
        for entry in entries:
            value: Any = getattr(self, entry.name)
            if value is entry.default:
                continue
            text = briefly(value)
            said.append(text if entry.default is MISSING else f"{entry.name}={text}")
        return f"{type(self).__name__}({', '.join(said)})"

    @abstractmethod
    def lower(self, builder: Builder) -> None:
        """Say the variant in expressions."""

    def naive_rows(self, dense: Dense) -> None:  # noqa: B027 - most variants leave rows alone
        """Change positions or rows of query and key, before the product."""

    @abstractmethod
    def naive(self, dense: Dense) -> None:
        """Do the same to whole matrices, straight from the definition."""

    @classmethod
    @abstractmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Variant]:
        """Instances that fit a problem of this shape."""


OWN_ARRAYS = (np.ndarray, np.generic, int, float, str, list, tuple, range)
"""What can be looked into when a variant is made. Arrays of other libraries may have no values
before the call: they are checked then."""


def briefly(value: Any) -> str:
    """What `repr` says, arrays by type and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
