"""What all variants of qkv have in common."""

import re
from pathlib import Path

import numpy as np
import pytest

import qkv
from qkv.problem.building.builder import Shape
from qkv.problem.building.check import check
from qkv.variants import ALL, MaskVariant, Variant

SHAPE = Shape((2,), 4, 2, 9, 9, 8, 8)
EXAMPLES = [
    pytest.param(kind, i, id=f"{kind.__name__}-{i}")
    for kind in ALL
    for i in range(len(kind.examples(SHAPE, np.random.default_rng(0))))
]


def lowered(variant, shape=SHAPE):
    query = np.zeros((*shape.batch_shape, shape.num_heads, shape.q_len, shape.head_dim))
    key = np.zeros((*shape.batch_shape, shape.num_kv_heads, shape.kv_len, shape.head_dim))
    return check(query, key, key, [variant], q_offset="start")


def test_all_lists_every_variant_that_is_exported() -> None:
    classes = [value for value in vars(qkv).values() if isinstance(value, type)]
    exported = {kind for kind in classes if issubclass(kind, Variant)}
    assert exported - {Variant, MaskVariant} <= set(ALL)
    assert len(ALL) == len(set(ALL))


def class_attributes(kind: type) -> set[str]:
    return {name for name, hint in kind.__annotations__.items() if "ClassVar" in hint}


def test_class_attributes_are_declared_and_documented_in_variant() -> None:
    declared = class_attributes(Variant)
    for kind in ALL:
        assert class_attributes(kind) <= declared, kind.__name__
    guide = (Path(__file__).parents[2] / "docs/add-a-variant.md").read_text(encoding="utf-8")
    for name in declared:
        assert re.search(rf"^ *{name} : ", Variant.__doc__, re.MULTILINE), name
        assert re.search(rf"^\| `{name}\b", guide, re.MULTILINE), name


@pytest.mark.parametrize(("kind", "i"), EXAMPLES)
def test_examples_follow_from_the_generator(kind, i) -> None:
    """The same seed gives the same problem."""
    first, second = (lowered(kind.examples(SHAPE, np.random.default_rng(5))[i]) for _ in range(2))
    assert first.spec == second.spec
    for name, table in first.operands.tables.items():
        np.testing.assert_array_equal(table, second.operands.tables[name])


@pytest.mark.parametrize(("kind", "i"), EXAMPLES)
def test_a_spec_is_hashable_and_holds_no_arrays(kind, i) -> None:
    spec = lowered(kind.examples(SHAPE, np.random.default_rng(0))[i]).spec
    assert hash(spec) == hash(lowered(kind.examples(SHAPE, np.random.default_rng(0))[i]).spec)

    def without_arrays(value):
        assert not isinstance(value, np.ndarray)
        if isinstance(value, tuple):
            for part in value:
                without_arrays(part)
        for name in getattr(value, "__dataclass_fields__", ()):
            without_arrays(getattr(value, name))

    without_arrays(spec)


@pytest.mark.parametrize(("kind", "i"), EXAMPLES)
def test_values_and_lengths_are_not_structure(kind, i) -> None:
    """Another length, other slopes or another seed must compile nothing."""
    longer = Shape((2,), 4, 2, 12, 12, 8, 8)
    keys = {
        lowered(kind.examples(shape, np.random.default_rng(seed))[i], shape).spec.kernel_key
        for shape, seed in ((SHAPE, 0), (SHAPE, 1), (longer, 0))
    }
    assert len(keys) == 1


@pytest.mark.parametrize(("kind", "i"), EXAMPLES)
def test_a_variant_names_itself(kind, i) -> None:
    variant = kind.examples(SHAPE, np.random.default_rng(0))[i]
    text = repr(variant)
    assert len(text) < 120
    assert text in lowered(variant).spec.summary
