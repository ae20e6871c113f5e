"""A bound call: a structure without arrays, and the arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from qkv.arrays import has_shape
from qkv.arrays.copies import own_copy
from qkv.call.binding.flatten import (
    ARRAY_TYPES,
    Leaves,
    ReadByValue,
    ReadInPlace,
    Tree,
    flatten,
    is_known,
    roles_of,
    unflatten,
    uses_batch_index,
)
from qkv.call.binding.options import DEFAULTS, OptionValues
from qkv.call.binding.structure_text import dumps, is_portable, loads

__all__ = ["ARRAY_TYPES", "BoundCall", "Structure", "bind"]


class Structure(NamedTuple):
    """Everything of a call except its arrays; hashable.

    Attributes
    ----------
    operands : tuple of Tree
        Of query, key and value.
    variants : tuple of Tree
    options : OptionValues of Tree
    by_value : tuple of int
        Which leaves are compared by value.
    lengths : tuple of int
        Which of these are numbers of keys, which decoding steps read anew each time.
    per_step : tuple of int
        Which others decoding steps read anew each time.
    """

    operands: tuple[Tree, ...]
    variants: tuple[Tree, ...]
    options: OptionValues
    by_value: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    per_step: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether query, key and value are arrays, none of them in storage of its own."""
        return self.operands is _PLAIN or self.operands == _PLAIN

    @property
    def operand_leaves(self) -> int:
        """How many of the leaves are of query, key and value; those of variants follow."""
        return len(_PLAIN) if self.is_plain else _count_places(self.operands)

    @property
    def is_known(self) -> bool:
        """Whether two calls of this structure mean the same."""
        return all(map(is_known, self.variants)) and all(map(is_known, self.options))

    @property
    def is_portable(self) -> bool:
        """Whether `text` means the same in another process."""
        return all(map(is_portable, self.variants))

    @property
    def uses_batch_index(self) -> bool:
        """Whether a variant may tell batch rows apart by their flat index."""
        return any(map(uses_batch_index, self.variants))

    @property
    def layout(self) -> Any:
        """ "bhld" or "blhd"."""
        return self.options.layout

    @property
    def text(self) -> str:
        """The structure for compilers that take constants as text; see `dumps`."""
        # Tuples of trees are written as sequences.
        return dumps((tuple, *[(tuple, *group) for group in self]))

    @classmethod
    def from_text(cls, text: str) -> Structure:
        """The structure of which `text` was made."""
        _, *groups = loads(text)
        operands, variants, options, *rest = [tuple(group[1:]) for group in groups]
        return cls(operands, variants, OptionValues(*options), *rest)


class BoundCall(NamedTuple):
    """A call of `attention` or another entry point, bound once.

    Attributes
    ----------
    structure : Structure
    leaves : sequence of arrays
        Of any library, in the order of the structure: query, key, value, then what variants and
        options hold.
    """

    structure: Structure
    leaves: Sequence[Any]

    @property
    def read_in_place(self) -> Sequence[Any]:
        """The leaves that are read where they lie: the operands, and arrays of variants."""
        by_value = self.structure.by_value
        if not by_value:
            return self.leaves
        return [leaf for n, leaf in enumerate(self.leaves) if n not in by_value]

    @property
    def roles(self) -> list[str]:
        """What messages call each leaf: an operand, an option, a bare mask, an array of a class."""
        if len(self.leaves) == len(_OPERANDS) and self.structure.is_plain:
            return list(_OPERANDS)
        operands, variants, options, *_ = self.structure
        leaves = iter(self.leaves)
        roles: list[str] = []
        for name, tree in zip(_OPERANDS, operands, strict=True):
            roles += roles_of(tree, leaves, name)
        for tree in variants:
            roles += roles_of(tree, leaves)
        for name, tree in zip(OptionValues._fields, options, strict=True):
            roles += roles_of(tree, leaves, name)
        return roles

    def unflatten(self) -> UnboundCall:
        """Operands, variants and options again, made of these leaves."""
        taken: list[Any] = []
        following = iter(self.leaves)

        def next_array() -> Any:
            taken.append(next(following))
            return taken[-1]

        query, key, value = (unflatten(tree, next_array) for tree in self.structure.operands)
        owners: list[Any] = [None] * len(taken)
        variants = []
        for tree in self.structure.variants:
            variants.append(unflatten(tree, next_array))
            owners += [variants[-1]] * (len(taken) - len(owners))
        options = OptionValues(*[unflatten(tree, next_array) for tree in self.structure.options])
        owners += [None] * (len(taken) - len(owners))
        return UnboundCall(query, key, value, tuple(variants), options, tuple(owners))

    def of_copies(self) -> BoundCall:
        """The same call of copies of its arrays, for what is computed later."""
        return self._replace(leaves=[own_copy(leaf) for leaf in self.leaves])


class UnboundCall(NamedTuple):
    """A call as its caller wrote it.

    `owners` has the variant that holds each leaf, None for an operand or an option.
    """

    query: Any
    key: Any
    value: Any
    variants: tuple[Any, ...]
    options: OptionValues
    owners: tuple[Any, ...]


_OPERANDS = ("query", "key", "value")
_PLAIN: tuple[Tree, ...] = (ReadInPlace, ReadInPlace, ReadInPlace)
_DEFAULT_OPTIONS = OptionValues(*[flatten(option, Leaves.none()) for option in DEFAULTS])


def bind(
    query: Any,
    key: Any,
    value: Any,
    variants: Sequence[Any],
    options: OptionValues = DEFAULTS,
    whole: Callable[[Any], int] | None = None,
) -> BoundCall:
    """Take a call apart.

    Parameters
    ----------
    query, key, value, variants, options
        As the entry point was given them.
    whole : callable, optional
        As for `flatten`.
    """
    is_plain = _are_plain(query, key, value)
    if is_plain and not variants:
        if options is DEFAULTS:
            return BoundCall(_PLAIN_CALL, [query, key, value])
        # Not while another library compiles, which would have to read `lru_cache`.
        if whole is None and type(options.q_offset) is not int and _are_simple(*options):
            return BoundCall(_plain_structure(*options), [query, key, value])
    leaves = Leaves([query, key, value] if is_plain else [query], [], [], [])
    operands = _PLAIN
    if not is_plain:
        operands = (ReadInPlace, _operand(key, leaves), _operand(value, leaves))
    trees = tuple([flatten(variant, leaves, "in_place", whole) for variant in variants])
    option_trees = _DEFAULT_OPTIONS
    if options is not DEFAULTS:
        if whole is not None or not _are_simple(*options):
            option_trees = OptionValues(*[flatten(o, leaves, "value", whole) for o in options])
        elif type(options.q_offset) is int:
            option_trees = _with_position(*options)
        else:
            option_trees = _simple_options(*options)
    read = map(tuple, leaves[1:]) if leaves.by_value else ()
    return BoundCall(Structure(operands, trees, option_trees, *read), leaves.arrays)


def _are_simple(
    scale: object, layout: object, q_offset: object, kv_offset: object, backend: object
) -> bool:
    """Whether options hold no arrays; 0.0 is left out, because it equals -0.0."""
    return (
        (scale is None or (type(scale) is float and scale != 0))
        and (q_offset is None or type(q_offset) is str or type(q_offset) is int)
        and type(kv_offset) is int
        and type(layout) is type(backend) is str
    )


def _with_position(
    scale: object, layout: object, q_offset: int, kv_offset: object, backend: object
) -> OptionValues:
    """The trees of options with a number as `q_offset`, which is not kept in `_simple_options`:
    each decoding step has another one."""
    of_scale = _simple_options(scale, layout, None, kv_offset, backend).scale
    return OptionValues(of_scale, layout, q_offset, kv_offset, backend)


@lru_cache(maxsize=256)
def _plain_structure(*options: object) -> Structure:
    """The structure of a call of plain arrays without variants."""
    return Structure(_PLAIN, (), _simple_options(*options))


@lru_cache(maxsize=256)
def _simple_options(*options: object) -> OptionValues:
    """The trees of options that hold no arrays."""
    return OptionValues(*[flatten(option, Leaves.none()) for option in options])


_PLAIN_CALL = Structure(_PLAIN, (), _DEFAULT_OPTIONS)


@lru_cache(maxsize=256)
def _count_places(tree: Tree) -> int:
    """Arrays in a tree."""
    if type(tree) is tuple:
        return sum(map(_count_places, tree))
    return int(tree is ReadInPlace or tree is ReadByValue)


def _are_plain(query: Any, key: Any, value: Any) -> bool:
    """Whether the operands are arrays, none of them in storage of its own."""
    kind = type(query)
    if kind is type(key) is type(value) and kind in ARRAY_TYPES:
        return True
    return has_shape(query) and has_shape(key) and has_shape(value)


def _operand(operand: Any, leaves: Leaves) -> Tree:
    """The tree of an operand. Objects that are not arrays are refused later, when they are read."""
    if has_shape(operand) or not hasattr(operand, "ndim"):
        leaves.arrays.append(operand)
        return ReadInPlace
    return flatten(operand, leaves, "in_place")
