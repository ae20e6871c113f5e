"""Take a call apart into a hashable structure and its arrays, and put it together again.

A structure is a tree of tuples. The first entry of each is a type, which says what the others are:

    (cls, field, field, ...)            a variant, or keys and values in storage of their own
    (tuple or list, entry, entry, ...)  a sequence
    (float, digits), (bool, 0 or 1)     numbers, so that 1, 1.0 and True are three structures
    (object, cls, names, field, ...)    a variant whose class is not a dataclass
    (np.generic, dtype, bytes)          a NumPy number; of a type of others, its class and bytes
    (Numbered, number)                  an object that compiled code of another library names
    ReadInPlace, ReadByValue            the place of an array, which is the next of the leaves

Everything else stands for itself: None, integers, strings, and an `Opaque` around an object that
declares nothing. Other libraries' compilers hold a structure as text (`structure_text`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from qkv._dynamo import as_constant
from qkv.arrays import is_array
from qkv.arrays.copies import own_copy
from qkv.call.binding.numbered import numbered
from qkv.errors import ArgumentError
from qkv.problem.stored_rows import Paged, Quantized
from qkv.variants.base import Opaque, Role
from qkv.variants.captured import Condition

__all__ = [
    "ARRAY_TYPES",
    "NUMBER_TYPES",
    "Leaves",
    "Numbered",
    "ReadByValue",
    "ReadInPlace",
    "Tree",
    "add_length_keys",
    "copied",
    "declared_fields",
    "flatten",
    "is_known",
    "names_of",
    "roles_of",
    "slots_of",
    "undeclared_objects",
    "unflatten",
    "uses_batch_index",
    "with_places",
    "without_arrays",
]  # fmt: skip

ARRAY_TYPES: set[type] = {np.ndarray}
"""Types whose objects are known to be arrays, so that this is not looked up; bridges add some."""

NUMBER_TYPES: dict[type, Callable[[Any], int | float]] = {}
"""What makes a number of what stands for one, as a size that torch traces; bridges add some."""

Tree: TypeAlias = Any
"""A node of a structure; hashable."""


class ReadInPlace:
    """The place of an array of which any values will do."""


class ReadByValue:
    """The place of an array whose values a prepared call is prepared for."""


class Numbered:
    """An object under a number of this process."""


class Leaves(NamedTuple):
    """The arrays of a call, which of them are compared by value, and which of these are lengths or
    arrays that each decoding step has its own of."""

    arrays: list[Any]
    by_value: list[int]
    lengths: list[int]
    per_step: list[int]

    @classmethod
    def none(cls) -> Leaves:
        """No arrays yet."""
        return cls([], [], [], [])


Whole: TypeAlias = Callable[[Any], int]
"""Gives a number to an object that is not to be taken apart."""

_STORAGE_ROLES: dict[type, dict[str, Role]] = {
    Paged: {"pages": "in_place", "page_table": "value"},
    Quantized: {"values": "in_place", "scales": "in_place", "offset": "in_place"},
}


def flatten(value: Any, leaves: Leaves, role: Role = "value", whole: Whole | None = None) -> Tree:
    """The structure of a value; its arrays are added to `leaves`.

    Parameters
    ----------
    value : object
        A variant, an option, an operand, or what these hold.
    leaves : Leaves
        Is added to.
    role : Role
        How the arrays in it are read.
    whole : callable, optional
        Given while another library compiles: objects that declare nothing, and functions, stay
        whole, under the number that it gives.
    """
    kind = type(value)
    if whole is not None:
        value = as_constant(value)
    if value is None or kind is int or kind is str:
        return value
    if kind is float:
        return float, value.hex()
    if kind in ARRAY_TYPES:
        return _place(value, leaves, role)
    if whole is not None:
        of_class = declared_fields(kind)
        if of_class:
            return (kind, *[flatten(getattr(value, n), leaves, r, whole) for n, r in of_class])
    named = _declared.get(kind) or _fields_of(kind, value)
    if named is not None:
        parts = []
        for name, field_role in named:
            part = getattr(value, name)
            # Most fields stand for themselves or are arrays, and need no call.
            if whole is None and type(part) in ARRAY_TYPES:
                part = _place(part, leaves, field_role)
            elif whole is not None or not (part is None or type(part) is str or type(part) is int):
                part = flatten(part, leaves, field_role, whole)
            parts.append(part)
        if kind in _declared:
            return (kind, *parts)
        return (object, kind, (tuple, *[name for name, _ in named]), *parts)
    if kind is bool:
        return bool, int(value)
    if kind is tuple or kind is list:
        try:
            return (kind, *[flatten(entry, leaves, role, whole) for entry in value])
        except RecursionError:
            raise ArgumentError(
                f"a {kind.__name__} among the variants holds itself.", action="Pass variants."
            ) from None
    if is_array(value):
        return _place(value, leaves, role)
    if isinstance(value, np.generic):
        # The text of types of others, as bfloat16, says no more than how many bytes they have.
        is_of_others = value.dtype.isbuiltin == 2
        return np.generic, kind if is_of_others else value.dtype.str, value.tobytes()
    if kind in NUMBER_TYPES:
        return flatten(NUMBER_TYPES[kind](value), leaves, role)
    if whole is not None:
        return Numbered, whole(value)
    if role == "condition" and callable(value):
        value = value if kind is Condition else Condition(value)
        kind = Condition
    if hasattr(kind, "tree_flatten"):
        static, arrays = value.tree_flatten()
        return (kind, static, *[flatten(array, leaves, "value") for array in arrays])
    return Opaque(value)


def _place(array: Any, leaves: Leaves, role: Role) -> Tree:
    """Add an array to the leaves."""
    if role == "in_place" or role == "condition":
        leaves.arrays.append(array)
        return ReadInPlace
    leaves.by_value.append(len(leaves.arrays))
    if role == "lengths":
        leaves.lengths.append(len(leaves.arrays))
    elif role == "per_step":
        leaves.per_step.append(len(leaves.arrays))
    leaves.arrays.append(array)
    return ReadByValue


def unflatten(tree: Tree, next_array: Callable[[], Any]) -> Any:
    """The value again, with an array from `next_array` in each of the places."""
    if tree is ReadInPlace or tree is ReadByValue:
        return next_array()
    if isinstance(tree, Opaque):
        return tree.thing
    if type(tree) is not tuple:
        return tree
    kind, *parts = tree
    if kind is tuple or kind is list:
        return kind([unflatten(part, next_array) for part in parts])
    if kind is float:
        return float.fromhex(parts[0])
    if kind is bool:
        return bool(parts[0])
    if kind is np.generic:
        return np.frombuffer(parts[1], parts[0])[0]
    if kind is Numbered:
        return numbered(parts[0]).thing
    if kind is object:
        kind, (_, *names), *parts = parts
        return _rebuild(kind, names, [unflatten(part, next_array) for part in parts])
    if hasattr(kind, "tree_unflatten"):
        static, *places = parts
        return kind.tree_unflatten(static, [unflatten(place, next_array) for place in places])
    names = [name for name, _ in _fields_of(kind, None) or ()]
    return _rebuild(kind, names, [unflatten(part, next_array) for part in parts])


def with_places(tree: Tree, arrays: Iterator[Any], leaves: list[Any]) -> Tree:
    """The structure with a place also for each object that is no variant, as a sharding of JAX.

    What belongs into the places is added to `leaves`.
    """
    if tree is ReadInPlace or tree is ReadByValue:
        leaves.append(next(arrays))
    elif type(tree) is Opaque and not hasattr(tree.thing, "lower"):
        leaves.append(tree.thing)
    elif type(tree) is tuple:
        return tuple([with_places(part, arrays, leaves) for part in tree])
    else:
        return tree
    return ReadInPlace


def roles_of(tree: Tree, leaves: Iterator[Any], name: str = "") -> Iterator[str]:
    """What messages call each array of a tree; without a name it is that of its variant."""
    if tree is ReadInPlace or tree is ReadByValue:
        dtype = str(getattr(next(leaves), "dtype", ""))
        bare = "mask" if "bool" in dtype else "bias" if "float" in dtype else "a variant"
        yield name or bare
    elif type(tree) is tuple:
        kind = tree[1] if tree[0] is object else tree[0]
        if not (name or kind in _CONTAINERS or kind.__name__ in _JOINED):
            name = f"an array of {kind.__name__}"
        for part in tree[1:]:
            yield from roles_of(part, leaves, name)


def copied(value: Any) -> Any:
    """What `flatten` takes, with copies of the arrays in it that others could change."""
    leaves = Leaves.none()
    tree = flatten(value, leaves)
    own = map(own_copy, leaves.arrays)
    return unflatten(tree, lambda: next(own))


def is_known(tree: Tree) -> bool:
    """Whether a structure determines its call: nothing in it is opaque."""
    if type(tree) is tuple:
        return tree[0] is not Numbered and all(map(is_known, tree[1:]))
    return not isinstance(tree, Opaque) or tree.known


def undeclared_objects(tree: Tree) -> Iterator[Any]:
    """The objects in a structure that do not say what they hold."""
    if type(tree) is tuple:
        for part in tree:
            yield from undeclared_objects(part)
    elif isinstance(tree, Opaque) and not tree.known:
        yield tree.thing


def uses_batch_index(tree: Tree) -> bool:
    """Whether a variant in the structure may tell batch rows apart by their flat index."""
    if type(tree) is tuple:
        kind, *parts = tree
        if kind is object:
            kind, _, *parts = parts
        own = kind is Numbered or getattr(kind, "uses_batch_index", kind not in _CONTAINERS)
        return own or any(map(uses_batch_index, parts))
    return isinstance(tree, Opaque) and tree.uses_batch_index


def add_length_keys(tree: Tree, kv_len: int, keys: list[Hashable]) -> bool:
    """Whether every variant in the structure says how it depends on the number of keys.

    To `keys` is added what `Variant.length_key` gives, for those that have it.
    """
    if type(tree) is not tuple:
        return True
    kind, *parts = tree
    if kind is object:
        kind, _, *parts = parts
    if kind not in _CONTAINERS:
        if not getattr(kind, "positions_only", False):
            return False
        # What is not an array is constant, and cannot grow with the steps.
        if any(parts[n] is not ReadByValue for n in _per_step_fields(kind)):
            return False
        if getattr(kind, "length_key", None) is not None:
            keys.append(unflatten(tree, lambda: None).length_key(kv_len))
    return all(add_length_keys(part, kv_len, keys) for part in parts)


_CONTAINERS = (tuple, list, float, bool, np.generic)
_JOINED = ("AnyOf", "AllOf", "Not")
"""Masks of masks, which are written with operators."""


def without_arrays(tree: Tree) -> Tree:
    """An equal structure, or key made of structures, that keeps no array of a function alive."""
    if isinstance(tree, tuple):
        return tuple([without_arrays(part) for part in tree])
    return tree.without_arrays() if hasattr(tree, "without_arrays") else tree


# Fields


_slots: dict[type, tuple[str, ...]] = {}
_declared: dict[type, tuple[tuple[str, Role], ...]] = {}
"""Fields and roles of dataclasses, whose instances all have the same fields."""


def _fields_of(kind: type, value: Any) -> tuple[tuple[str, Role], ...] | None:
    """Names and roles of what an object holds, if its class declares roles."""
    known = _declared.get(kind)
    if known is not None:
        return known
    roles = _STORAGE_ROLES.get(kind) or getattr(kind, "roles", None)
    if roles is None:
        return None
    of_class = declared_fields(kind)
    return of_class or tuple([(name, roles.get(name, "value")) for name in sorted(names_of(value))])


def names_of(thing: Any) -> list[str]:
    """The names of an object's own attributes, those in `__slots__` too."""
    names = list(getattr(thing, "__dict__", ()))
    kind: type = type(thing)
    slots = slots_of(kind)
    return names + [name for name in slots if hasattr(thing, name)] if slots else names


def slots_of(kind: type) -> tuple[str, ...]:
    """The names in `__slots__` of a class and its bases, which `vars` of an object leaves out."""
    known = _slots.get(kind)
    if known is not None:
        return known
    members = [item for base in kind.__mro__ for item in vars(base).items()]
    names = [name for name, part in members if isinstance(part, MemberDescriptorType)]
    return _slots.setdefault(kind, tuple(names))


def declared_fields(kind: type) -> tuple[tuple[str, Role], ...]:
    """Names and roles of the fields of a dataclass that declares roles; empty for other classes.

    A function of its own, since the first call with a class may be one that another library
    compiles: that library runs this, and does not read it.
    """
    roles = _STORAGE_ROLES.get(kind) or getattr(kind, "roles", None)
    if roles is None or "__dataclass_fields__" not in vars(kind):
        return ()
    declared = tuple([(field.name, roles.get(field.name, "value")) for field in fields(kind)])
    _declared[kind] = declared
    return declared


@lru_cache(maxsize=256)
def _per_step_fields(kind: type) -> tuple[int, ...]:
    """The indices of the fields of a class that each decoding step has its own of."""
    roles = [role for _, role in _declared.get(kind, ())]
    return tuple([n for n, role in enumerate(roles) if role in ("lengths", "per_step")])


def _rebuild(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    """An object of the class with these values, which were checked when it was first made."""
    rebuilt: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(rebuilt, name, value)
    return rebuilt
