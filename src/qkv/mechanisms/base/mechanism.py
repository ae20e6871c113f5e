"""The base class of mechanisms: tokens in and out, weights, an explanation and a cost."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import Size, Whole, checked
from qkv.errors import ArgumentError, ShapeError
from qkv.inspection.traces.explain import selected_indices
from qkv.ledger import Count, Ledger, symbols
from qkv.mechanisms.base.arguments import (
    all_three,
    one_sequence,
    refuse_other_widths,
    token_names,
)
from qkv.mechanisms.base.arrays.namespace import array_namespace, like, values
from qkv.mechanisms.base.arrays.rows import Arrays, Rows, refuse_many_numbers
from qkv.mechanisms.base.example import example_input
from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Explanation, Step
from qkv.mechanisms.base.operations import traffic

__all__ = ["Mechanism"]


class Mechanism(ABC):
    """A layer that mixes tokens: x `(..., n, embed_dim)` to an output `(..., n, width)`.

    A subclass says `name`, `paper` and `formula`, passes the shapes of its weights to `__init__`,
    and defines `__call__`, `token_mixing`, `steps`, `operations`, `widths` and `example`. Arguments
    are declared where they are annotated and checked before a method runs; see
    `qkv.arguments.declarations`. Formulas are written with `array_namespace(x)`, so that
    NumPy arrays, torch tensors and JAX arrays all work and the output is an array of the same
    library, dtype and device.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        Names and shapes of the weights. Projections are named and laid out as in
        `torch.nn.Linear`: `q_proj.weight` is (out, in), `q_proj.bias` is (out,).
    weights : mapping of str to array, optional
        Exactly these names, of any library. torch tensors keep their gradient. Random by default.
    seed : int
        Seed of the random weights.

    Attributes
    ----------
    name : str
        The name on the command line, such as "multi-head".
    paper : str
        Who introduced the mechanism, where.
    formula : str
        The definition in one line.
    weights : dict of str to array

    Raises
    ------
    ArgumentError
        A weight is missing, or a name is not one of the mechanism's.
    ShapeError
        A weight has another shape than its name asks for.

    Examples
    --------
    >>> import qkv.mechanisms
    >>> layer = qkv.mechanisms.MECHANISMS["multi-head"].example()
    >>> isinstance(layer, qkv.mechanisms.Mechanism), layer.name
    (True, 'multi-head')
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    formula: ClassVar[str]
    one_sequence_only: ClassVar[bool] = False
    """Whether keys and values can only be those of x."""
    takes_value: ClassVar[bool] = True
    """Whether values may be made of another sequence than keys."""
    checked_methods: ClassVar[tuple[str, ...]] = (
        "absorbed", "block_mask", "hops", "initial_state", "latents", "step", "tiles",
        "token_mixing", "cost",
    )  # fmt: skip
    """Methods that callers use, whose arguments are checked in every subclass; those that classes
    are made of are called with what has been checked."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in ("__init__", "__call__", *cls.checked_methods):
            if name in vars(cls):
                setattr(cls, name, checked(vars(cls)[name]))

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        weights: Arrays | None = None,
        seed: Whole = 0,
    ) -> None:
        self.weights: dict[str, Any]
        if weights is None:
            total = sum(math.prod(shape) for shape in shapes.values())
            refuse_many_numbers(f"the weights of {self.name}", total)
            rng = np.random.default_rng(seed)
            self.weights = {
                name: self.initial_weight(name, shape, rng) for name, shape in shapes.items()
            }
        else:
            self.weights = _checked(weights, shapes, self.name)

    @abstractmethod
    def __call__(self, x: Rows, /) -> Any:
        """Mix the tokens of `x` (..., n, embed_dim); an array of the same library and dtype."""

    @abstractmethod
    def token_mixing(self, x: Rows, /) -> Any:
        """How much of each token's value reaches each output, `(..., num_heads, n, n)` or `(n, n)`.

        The attention weights, or for mechanisms without any the effective matrix M for which the
        output of a head is `M @ values`. It is for looking: values only, without a gradient.
        """

    def sequences(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """What queries, keys and values are made of: key is x unless given, and value is key.

        Raises
        ------
        ArgumentError
            A key or value is given to a mechanism that reads one sequence, or another value
            to one that makes keys and values of the same rows.
        """
        if self.one_sequence_only and not (key is None and value is None):
            raise ArgumentError(
                f"{self.name} reads one sequence, and a key or value is given.",
                action="Pass x alone, or use Cross.",
            )
        if not (self.takes_value or value is None or value is key):
            raise ArgumentError(
                f"{self.name} makes keys and values of the same rows, and another value is given.",
                action="Pass x and key alone.",
            )
        return all_three(x, key, value)

    @checked
    def explain(
        self,
        x: Rows,
        /,
        tokens: Sequence[str] | None = None,
        index: int = 0,
        *,
        key: Rows | None = None,
        value: Rows | None = None,
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

        Raises
        ------
        ShapeError
            An array has leading dimensions, or does not fit the weights.
        ArgumentError
            There is no such token, or not a name for each.
        """
        x, key, value = (values(array, "x") for array in self.sequences(x, key, value))
        one_sequence(x, key, value)
        names, kv_len = token_names(tokens, len(x)), len(key)
        same = kv_tokens is None and kv_len == len(names)
        kv_names = names if same else token_names(kv_tokens, kv_len, "kv_tokens", "key")
        row = int(selected_indices(index, len(names), "index", "tokens")[0])
        steps = self.detached().steps(ExplainedToken(x, key, value, row, names, kv_names))
        return Explanation(self.name, self.formula, self.paper, names[row], tuple(steps))

    @abstractmethod
    def steps(self, token: ExplainedToken) -> list[Step]:
        """The steps of `explain`, whose last line is the output; weights are NumPy arrays."""

    @checked
    def cost(self, n: Size, batch: Size = 1, dtype: str = "float32") -> Ledger:
        """Operations, parameters and bytes for `batch` sequences of `n` tokens.

        Bytes are those of a fused kernel: input and weights are read once, the output is written
        once, and scores stay in registers.

        Parameters
        ----------
        n, batch : int
        dtype : str
            The type in which arrays are stored, such as "float32" or "bfloat16".

        Raises
        ------
        ArgumentError, DTypeError
            A size is not a positive integer, or the type is not a floating one.
        """
        (tokens,) = symbols(n=n)
        b = 1 if batch == 1 else Count(batch, "b")
        ledger = self.operations(tokens, b)
        ledger += Ledger(parameters=Count(self.parameters - int(ledger.parameters)))
        return ledger + traffic(*self.numbers_moved(tokens, b, ledger.parameters), dtype)

    @abstractmethod
    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of `cost`, step by step, with the parameters of projections.

        Parameters
        ----------
        tokens : Count
            Of one sequence, the symbol n.
        batch : int
            Sequences: 1, or the symbol b.
        """

    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """How many numbers of each token are read, and how many are written."""

    def numbers_moved(self, tokens: Count, batch: int, parameters: int) -> tuple[int, int]:
        """How many numbers are read and written: input and weights once, the output once."""
        read, written = self.widths()
        return batch * tokens * read + parameters, batch * tokens * written

    @classmethod
    @abstractmethod
    def example(cls) -> Self:
        """An instance for the shared five-token example, with fixed weights.

        Its input is `example_input()`, where columns 0 to 3 are Q, 4 to 7 are K and 8 to 11 are V,
        and its output is (5, 4), so that it can be compared with full attention.
        """

    @classmethod
    def example_arguments(cls) -> tuple[Any, ...]:
        """The arguments for `example()`; `example_input()` unless a subclass overrides it."""
        return (example_input(),)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(w.shape)}" for name, w in self.weights.items())
        return f"{type(self).__name__}({shapes})"

    @property
    def parameters(self) -> int:
        """How many numbers the weights hold."""
        return sum(int(np.prod(weight.shape)) for weight in self.weights.values())

    def initial_weight(
        self, name: str, shape: tuple[int, ...], rng: np.random.Generator
    ) -> NDArray[Any]:
        """A random weight, float64: zeros for a bias, else uniform within 1 / sqrt(last length).

        A subclass overrides it for weights that its paper initialises otherwise.
        """
        if name.endswith("bias") or not shape:
            return np.zeros(shape)
        bound = shape[-1] ** -0.5
        return rng.uniform(-bound, bound, shape)

    def detached(self) -> Self:
        """A copy with the same weights as NumPy arrays, without gradients; for looking."""
        copied = copy(self)
        copied.weights = {name: values(weight, name) for name, weight in self.weights.items()}
        return copied

    def weight(self, name: str, x: Any) -> Any:
        """A weight in the library, dtype and device of `x`."""
        return like(self.weights[name], x, name)

    def linear(self, name: str, x: Any) -> Any:
        """`x @ weight.T + bias` with the weights `name.weight` and, if there is one, `name.bias`.

        Parameters
        ----------
        name : str
            Such as "q_proj".
        x : array (..., in)

        Returns
        -------
        array (..., out)

        Raises
        ------
        ShapeError
            The rows of `x` are not as long as those of the weight.
        """
        weight = self.weight(f"{name}.weight", x)
        given = {"k": "key", "v": "value"}.get(name[0], "x")
        refuse_other_widths(self.name, given, x, weight.shape[1])
        namespace = array_namespace(x)
        product = namespace.matmul(x, weight.T)
        if f"{name}.bias" in self.weights:
            product = product + self.weight(f"{name}.bias", x)
        # A product of bfloat16 arrays in NumPy is float32.
        return namespace.astype(product, x.dtype, copy=False)


def _checked(
    weights: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], mechanism: str
) -> dict[str, Any]:
    missing, unknown = shapes.keys() - weights.keys(), weights.keys() - shapes.keys()
    if missing or unknown:
        facts = [("missing", ", ".join(sorted(missing))), ("unknown", ", ".join(sorted(unknown)))]
        raise ArgumentError(
            f"the weights of {mechanism} are {', '.join(shapes)}.",
            [(what, names) for what, names in facts if names],
            "Pass exactly these names.",
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != tuple(shape):
            raise ShapeError(
                f"{name} has shape {tuple(weights[name].shape)}; {mechanism} needs {tuple(shape)}.",
                action="Check embed_dim, num_heads and head_dim.",
            )
    return {name: weights[name] for name in shapes}
