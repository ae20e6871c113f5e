"""The base class of variants.

A variant is any object with `lower(builder)`. Those of this package also carry `naive`, a dense
float64 oracle written from their definition, and `examples`, from which tests, documents and
benchmarks are made.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from qkv.errors import ArgumentError
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.problem.language.expressions import Load, Node, Op, rebuilt, text
from qkv.problem.language.nodes import from_words, in_words
from qkv.problem.language.symbols import Expr

UNSAID: Any = type("Unsaid", (), {"__repr__": lambda self: "..."})()
"""The default of a field that has to be given, where a plain error would not say what to write."""

Role: TypeAlias = Literal["static", "value", "in_place", "condition", "lengths", "per_step"]
"""How a call reads what a field of a variant holds.

"static" is part of the structure: another value is another call. "value" is an array or number of
which a prepared call holds a copy: calls with other values are prepared for anew. "in_place" is an
array that is read where it lies at each call, whatever its values are then. "condition" is that, or
a function of batch, head and positions, whose arrays are "value". "lengths" is "value" for an
integer array with one number of keys for each batch row, and "per_step" for an array with entries
for keys or blocks of keys: decoding steps read both anew each time.
"""


class Opaque:
    """An object without declared fields, as part of a call's structure; equal only to itself.

    Attributes
    ----------
    thing : object
    known : bool
        Whether two calls with equal objects mean the same. False, as it may change in between.
    number : int or None
        By which compiled code of another library names it.
    """

    __slots__ = ("__weakref__", "known", "number", "thing")

    def __init__(self, thing: Any, known: bool = False) -> None:
        self.thing = thing
        self.known = known
        self.number: int | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def in_words(self) -> list[Any] | None:
        """The expression that it stands for, as JSON values; None if only this process knows it."""
        return None

    @property
    def uses_batch_index(self) -> bool:
        """Whether it may tell batch rows apart."""
        return True


class Expression(Opaque):
    """An expression whose tables t0, t1, ... are the arrays that follow it in a structure."""

    __slots__ = ()

    def __init__(self, root: Node) -> None:
        super().__init__(root, known=True)

    def in_words(self) -> list[Any]:
        """See `Opaque`."""
        return in_words(self.thing)

    @property
    def uses_batch_index(self) -> bool:
        return "batch" in self.thing.variables

    def on_tables(self, builder: Builder, arrays: Sequence[Any]) -> Expr:
        """The expression with these arrays as tables of a problem."""
        made = [builder.table(array, "captured array") for array in arrays]

        def change(node: Node, following: tuple[Node, ...]) -> Node:
            match node:
                case Load(table=name, kind=kind):
                    table = made[int(name[1:])]
                    if table.kind != kind or table.ndim != len(following):
                        raise ArgumentError(
                            f"a captured array is {table.kind} of {table.ndim} dimensions; when "
                            f"its function was read it was {kind} of {len(following)}.",
                            action="Trace or compile the function again.",
                        )
                    return Load(table.name, kind, following)
                case Op(name=name, kind=kind):
                    return Op(name, kind, following)
            return node

        return Expr(rebuilt(self.thing, change))


@dataclass(frozen=True, eq=False)
class FunctionText:
    """A score mod or the function of a mask, as text and arrays that another compiler can hold.

    Attributes
    ----------
    text : str
        JSON of what `qkv.problem.language.nodes.in_words` gives, of tables t0, t1, ...
    arrays : tuple of arrays
    is_mask : bool
    """

    roles: ClassVar[Mapping[str, Role]] = {"text": "static", "is_mask": "static"}
    positions_only: ClassVar[bool] = True

    text: str
    arrays: tuple[Any, ...]
    is_mask: bool

    def __repr__(self) -> str:
        name = "Mask" if self.is_mask else "ScoreMod"
        return f"{name}({text(from_words(json.loads(self.text)))})"

    def lower(self, builder: Builder) -> None:
        """See `Variant`."""
        expression = Expression(from_words(json.loads(self.text))).on_tables(builder, self.arrays)
        (builder.mask if self.is_mask else builder.mod)(expression)


ReadFunction: TypeAlias = Callable[
    [Callable[..., Any], tuple[str, ...]], tuple[str, tuple[Any, ...]] | None
]
"""How another compiler reads a function of these arguments: text and arrays, None if it cannot.
Variants that hold functions have `with_functions(read)`, which gives what stands for them, or None.
"""


class Variant(ABC):
    """A change of scores, masks, positions or weights between q.k and the output.

    Subclass it, or pass any object with a `lower` method; see docs/add-a-variant.md.

    Attributes
    ----------
    roles : mapping of str to Role, or None
        How a call reads the fields of the dataclass, or the attributes of any other object; "value"
        where a name is missing. A class that declares roles, {} at least, says that `lower` reads
        nothing else that could change, so that calls of one structure are checked once. Without a
        declaration (None) every call is checked.
    positions_only : bool
        Whether `lower` says the same for any number of keys, but for where the queries stand and
        what `length_key` gives: a decoding step is then prepared for all lengths at once.
    length_key : callable or None
        `length_key(kv_len)` is what `lower` makes of the number of keys, if it reads that, as a
        hashable; steps are prepared once for each. Arrays among the fields are None in it.
    uses_batch_index : bool
        Whether `lower` may tell batch rows apart by their flat index, as a score mod can. Batching
        transformations of other libraries then make a call of each instead of a wider one.
    read_by_backend : bool
        Whether `lower` reads no value of the floating arrays, so that they may be tensors on a
        device that have none yet. It holds for the class that says so alone.
    constant_fields : Mapping
        Arrays that have no gradient, and what to write instead for one that is learned.
    dense_field : str or None
        The field whose array has an entry for each pair. Where it is boolean, a bias of 0 and -inf
        may stand for the variant, as in programs for ONNX.

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

    roles: ClassVar[Mapping[str, Role] | None] = None
    positions_only: ClassVar[bool] = False
    length_key: ClassVar[Callable[[Any, int], Hashable] | None] = None
    uses_batch_index: ClassVar[bool] = True
    read_by_backend: ClassVar[bool] = False
    constant_fields: ClassVar[Mapping[str, str]] = {}
    dense_field: ClassVar[str | None] = None

    def __repr__(self) -> str:
        """The constructor call, without defaults and with arrays by shape."""
        arguments = []
        entries: tuple[Field[Any], ...] = fields(self) if is_dataclass(self) else ()
        for entry in entries:
            value: Any = getattr(self, entry.name)
            if value is entry.default or _is_equal_constant(value, entry.default):
                continue
            text = short_repr(value)
            is_required = entry.default is MISSING or entry.default is UNSAID
            arguments.append(text if is_required else f"{entry.name}={text}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    @abstractmethod
    def lower(self, builder: Builder) -> None:
        """Add the variant to a problem, as expressions of scores and positions.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            If what the variant holds does not fit the problem.
        """

    def naive_rows(self, dense: Dense) -> None:  # noqa: B027 - most variants leave rows alone
        """Change positions or rows of query and key, before the product."""

    @abstractmethod
    def naive(self, dense: Dense) -> None:
        """Do the same to whole matrices, from the definition, for tests."""

    @classmethod
    @abstractmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Variant]:
        """Instances that fit a problem of this shape."""


HOST_VALUES = (np.ndarray, np.generic, int, float, str, list, tuple, range)
"""Types whose values are checked when a variant is made. Arrays of other libraries may be traced,
and are checked at the call."""


def _is_equal_constant(value: Any, default: Any) -> bool:
    """Whether two constants are equal; arrays are not constants."""
    return (
        type(value) is type(default) and isinstance(value, int | float | str) and value == default
    )


def short_repr(value: Any) -> str:
    """`repr` of a value; arrays are shown by type and shape."""
    try:
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    except RuntimeError:  # A tensor that cannot tell its shape, as a nested one.
        return type(value).__name__
    return repr(value)
