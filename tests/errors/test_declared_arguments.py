"""Arguments are checked by their declarations, before anything is computed or allocated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_overloads, get_type_hints

import numpy as np
import pytest

import qkv
import qkv.cache
import qkv.cost
import qkv.mechanisms as m
from qkv.arguments.declarations import NotNegative, Places, Size, Whole, checked
from qkv.cache import ContiguousCache, PageAllocator, PagedCache, RollingCache
from qkv.errors import ArgumentError, DTypeError, QkvError, ShapeError
from qkv.mechanisms.base.mechanism import Mechanism

SIZES: dict[str, Any] = {
    "num_heads": 2, "num_kv_heads": 2, "kv_lora_rank": 4, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 4, "left": 1, "window": 1, "block": 2, "stride": 2,
    "num_devices": 2,
}  # fmt: skip
"""What mechanisms need beside their width."""


def made(cls: Any, **options: Any) -> Any:
    parameters = inspect.signature(cls).parameters
    needed = {n: SIZES[n] for n, p in parameters.items() if n in SIZES and p.default is p.empty}
    width = {"head_dim" if "embed_dim" not in parameters else "embed_dim": 8}
    return cls(**{**width, **needed, **options})


def declared() -> list[tuple[type[Mechanism], str]]:
    """Mechanisms with the names of their numbers."""
    return [
        (cls, name)
        for cls in m.MECHANISMS.values()
        for name, parameter in inspect.signature(cls).parameters.items()
        if any(word in str(parameter.annotation) for word in ("Size", "Whole", "NotNegative"))
    ]


WRONG = [-1, True, "2", [[1]], np.nan, 10**400, np.ones(2)]


@pytest.mark.parametrize("value", WRONG, ids=str)
def test_numbers_of_constructors_are_checked(value: Any) -> None:
    pairs = declared()
    assert len({cls for cls, _ in pairs}) == len(m.MECHANISMS)
    for cls, name in pairs:
        with pytest.raises(QkvError, match=name):
            made(cls, **{name: value})


@pytest.mark.parametrize("value", [0.5, 2**62], ids=str)
def test_sizes_are_whole_numbers_that_floats_hold(value: Any) -> None:
    for cls, name in declared():
        if name not in ("temperature", "eps", "norm_epsilon"):
            with pytest.raises(QkvError, match=name):
                made(cls, **{name: value})


@pytest.mark.parametrize("cls", m.MECHANISMS.values(), ids=lambda cls: cls.name)
def test_what_is_no_array_of_rows_is_refused(cls: Any) -> None:
    layer = made(cls)
    methods = ["__call__", "token_mixing", "explain", "step", "hops", "tiles", "initial_state"]
    for method in (getattr(layer, name) for name in methods if hasattr(layer, name)):
        for value in (None, [[1.0] * 8], "x", object(), np.float64(1), np.zeros((5, 8), "U1")):
            with pytest.raises(DTypeError):
                method(value)
        with pytest.raises(ShapeError):
            method(np.zeros(8))


@pytest.mark.slow
@pytest.mark.parametrize("cls", m.MECHANISMS.values(), ids=lambda cls: cls.name)
def test_no_sequences_are_no_outputs(cls: Any) -> None:
    x = np.ones((0, 3, 8))
    layer = made(cls)
    given = (x, x) if cls is m.Cross else (x,)
    assert layer(*given).shape == (0, *layer(*(a for a in [np.ones((3, 8))] * len(given))).shape)


@pytest.mark.parametrize("make", [
    lambda: m.Performer(8, 2, num_features=10**9),
    lambda: m.MultiHead(2**20),
    lambda: m.Linformer(8, 2, max_len=2**40),
    lambda: m.RelativeBias(8, num_buckets=2**40),
])  # fmt: skip
def test_gigabytes_of_random_numbers_are_not_drawn(make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError, match="random numbers"):
        make()


@pytest.mark.parametrize("make", [
    lambda: PagedCache(num_pages=2**62),
    lambda: ContiguousCache(2**62),
    lambda: RollingCache(2**62),
    lambda: RollingCache(4, 2**62),
    lambda: PageAllocator(2**62),
    lambda: PageAllocator(4).grow(2**62),
    lambda: PageAllocator(4).release([[1]]),  # type: ignore[list-item]  # a user's mistake
    lambda: PageAllocator(4).share(3),  # type: ignore[arg-type]  # a user's mistake
])  # fmt: skip
def test_caches_refuse_what_they_cannot_hold(make: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentError):
        make()


def test_rows_that_memory_has_no_room_for() -> None:
    cache = ContiguousCache(2**40)
    rows = np.zeros((64, 8, 1, 128), np.float32)
    with pytest.raises(ArgumentError, match="no memory for rows"):
        cache.append(rows, rows)
    assert not cache.lengths.any()


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size",
                                  "intermediate_size", "num_attention_heads"])  # fmt: skip
@pytest.mark.parametrize("value", [2 * 10**13, 10**400], ids=["2e13", "10**400"])
def test_numbers_of_a_configuration_have_limits(name: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=rf"(?s){name} is .* at most"):
        qkv.cost.read_config({**CONFIG, name: value})


def test_twenty_million_layers_are_too_many() -> None:
    with pytest.raises(ArgumentError, match="at most 10000"):
        qkv.cost.read_config({**CONFIG, "num_hidden_layers": 2 * 10**7})


@checked
def some(
    size: Size,
    places: Places = (),
    *others: int,
    rate: NotNegative = 0.0,
    names: Sequence[str] | None = None,
    by_name: Mapping[str, int] | None = None,
    pair: tuple[int, float] = (1, 2.0),
    **more: Whole,
) -> Any:
    return size, places, others, rate, names, by_name, pair, more


def test_declared_arguments_come_as_they_are_declared() -> None:
    assert some(np.int64(3), np.array([1, 2]), 4, rate=1, names=("a",), extra=0) == (
        3, [1, 2], (4,), 1, ["a"], None, (1, 2.0), {"extra": 0},
    )  # fmt: skip
    assert type(some(np.int64(3))[0]) is int


@pytest.mark.parametrize("given", [
    {"size": 0}, {"size": True}, {"size": 2**53 + 1}, {"places": [0, -1]}, {"places": "01"},
    {"places": np.array(1)}, {"rate": -0.1}, {"rate": np.nan}, {"rate": 10**400},
    {"rate": "fast"}, {"names": "abc"}, {"names": ["a", 1]}, {"names": {"a"}}, {"by_name": [1]},
    {"pair": (1,)}, {"pair": (1, "x")}, {"extra": -1},
], ids=str)  # fmt: skip
def test_what_is_declared_otherwise_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(given))):
        some(**{"size": 1, **given})
    with pytest.raises(ArgumentError, match="others"):
        some(1, (), 0.5)  # type: ignore[arg-type]  # a user's mistake


def test_bindings_of_python_stay_its_own() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'size'"):
        some()  # type: ignore[call-arg]  # a user's mistake


def test_type_checkers_are_told_that_the_output_is_what_the_query_is() -> None:
    alone, with_lse, either = [get_type_hints(each) for each in get_overloads(qkv.attention)]
    array = alone["query"]
    assert isinstance(array, TypeVar)
    assert alone["return"] is array
    assert with_lse["return"] == tuple[array, Any]
    assert either["return"] == array | tuple[array, Any]
    for each in (alone, with_lse, either):
        assert list(each) == list(get_type_hints(qkv.attention))
