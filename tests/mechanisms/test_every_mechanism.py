"""What all mechanisms promise: libraries, weights, explanations, costs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import qkv
from qkv.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from qkv.mechanisms import (
    MECHANISMS,
    Additive,
    Causal,
    Flash,
    Linear,
    Linformer,
    Longformer,
    Mamba,
    MultiHead,
    MultiHeadLatent,
    MultiQuery,
    RelativeBias,
    Ring,
    Rotary,
    SlidingWindow,
    Soft,
    Strided,
    example_input,
    example_tokens,
)
from qkv.mechanisms.background import background
from qkv.mechanisms.base.attention import AttentionMechanism
from qkv.mechanisms.base.projected import ProjectedAttention
from qkv.samples import shared_example

V = shared_example().v
NAMES = sorted(MECHANISMS)
ATTENTION = [name for name in NAMES if issubclass(MECHANISMS[name], AttentionMechanism)]
PROJECTED = [name for name in NAMES if issubclass(MECHANISMS[name], ProjectedAttention)]
WITHOUT_PAIRS_OF_ONE_SEQUENCE = {"cross", "differential", "linear", "linformer", "performer"}
"""Two sequences, differences of weights, or no softmax over pairs of tokens."""


pytestmark = pytest.mark.usefixtures("x64")


def keywords(arguments: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("key", "value"), arguments[1:], strict=False))


@pytest.mark.slow
@pytest.mark.sampled("name", NAMES, one_in=6)
def test_one_class_takes_the_arrays_of_every_library(name: str) -> None:
    mechanism, arguments = MECHANISMS[name].example(), MECHANISMS[name].example_arguments()
    expected = mechanism(*arguments)
    assert isinstance(expected, np.ndarray)
    assert expected.shape == (5, 4)
    of_torch = mechanism(*map(torch.tensor, arguments))
    of_jax = mechanism(*map(jnp.asarray, arguments))
    assert isinstance(of_torch, torch.Tensor)
    assert isinstance(of_jax, jax.Array)
    assert of_torch.dtype is torch.float64
    np.testing.assert_allclose(of_torch.numpy(), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(np.asarray(of_jax), expected, rtol=0, atol=1e-13)
    single = mechanism(*(torch.tensor(a, dtype=torch.float32) for a in arguments))
    assert single.dtype is torch.float32
    np.testing.assert_allclose(single.numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.sampled("name", NAMES, one_in=6)
def test_gradients_of_torch_and_jax_agree_with_differences(name: str) -> None:
    mechanism, arguments = MECHANISMS[name].example(), MECHANISMS[name].example_arguments()
    rng = np.random.default_rng(0)
    # Not on the numbers of the example, where scores of a hard look-up tie.
    given = [a + 0.1 * rng.normal(size=a.shape) for a in arguments]
    direction = [rng.normal(size=a.shape) for a in given]
    cotangent = rng.normal(size=(5, 4))
    step = 1e-5

    def moved(by: float) -> Any:
        return mechanism(*(a + by * d for a, d in zip(given, direction, strict=True)))

    expected = float(((moved(step) - moved(-step)) / (2 * step) * cotangent).sum())
    tensors = [torch.tensor(a, requires_grad=True) for a in given]
    (mechanism(*tensors) * torch.tensor(cotangent)).sum().backward()
    along = sum(
        float((t.grad.numpy() * d).sum())
        for t, d in zip(tensors, direction, strict=True)
        if t.grad is not None
    )
    assert along == pytest.approx(expected, abs=1e-7)

    def loss(*arrays: Any) -> Any:
        return (mechanism(*arrays) * cotangent).sum()

    places = tuple(range(len(given)))
    gradients = jax.jit(jax.grad(loss, places))(*map(jnp.asarray, given))
    of_jax = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    assert of_jax == pytest.approx(expected, abs=1e-7)


def value_columns(name: str, heads: int) -> list[slice]:
    """The columns of V that the example of a mechanism gives each of its heads."""
    if name == "multi-query":
        return [slice(0, 2), slice(0, 2)]
    if name == "grouped-query":
        return [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    width = 4 // heads
    return [slice(h * width, (h + 1) * width) for h in range(heads)]


@pytest.mark.parametrize("name", ATTENTION + ["additive"])
def test_the_mixing_matrix_times_the_values_is_the_output(name: str) -> None:
    mechanism, arguments = MECHANISMS[name].example(), MECHANISMS[name].example_arguments()
    mixing = mechanism.token_mixing(*arguments)
    heads = mixing[None] if mixing.ndim == 2 else mixing
    values = V[: heads.shape[-1]]
    parts = [
        m @ values[:, columns]
        for m, columns in zip(heads, value_columns(name, len(heads)), strict=True)
    ]
    np.testing.assert_allclose(np.concatenate(parts, 1), mechanism(*arguments), rtol=0, atol=1e-12)
    of_torch = mechanism.token_mixing(*(torch.tensor(a, requires_grad=True) for a in arguments))
    assert not of_torch.requires_grad
    np.testing.assert_array_equal(of_torch.numpy(), mixing)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_explanation_ends_in_the_output(name: str, index: int) -> None:
    mechanism, arguments = MECHANISMS[name].example(), MECHANISMS[name].example_arguments()
    found = mechanism.explain(arguments[0], example_tokens(), index, **keywords(arguments))
    text = str(found)
    assert text.startswith(f"{name}: ")
    assert f"'{example_tokens()[index]}'" in text
    data = json.loads(found.to_json())
    assert data["mechanism"] == name
    assert data["paper"] == type(mechanism).paper
    assert [step["title"] for step in data["steps"]] == [step.title for step in found.steps]
    outputs = mechanism(*arguments)
    np.testing.assert_allclose(found.steps[-1].lines[-1].value, outputs[index], atol=1e-12)


def test_the_first_number_of_the_example_is_printed_with_its_calculation() -> None:
    arguments = MECHANISMS["scaled-dot-product"].example_arguments()
    mechanism = MECHANISMS["scaled-dot-product"].example()
    text = str(mechanism.explain(arguments[0], example_tokens(), **keywords(arguments)))
    assert "cat  1*1 + 0*0 + 1*1 + 0*0     = 2.0000" in text
    assert "cat  1 / 3.3597      = 0.2976" in text


def test_each_mask_step_shows_what_that_mask_and_those_before_it_forbid() -> None:
    mechanism, (x,) = MECHANISMS["strided"].example(), MECHANISMS["strided"].example_arguments()
    explained = mechanism.explain(x, example_tokens(), 3)
    steps = {step.title + step.formula: step for step in explained.steps}
    scores = x[3, :4] @ x[:, 4:8].T / 2
    causal = [line.value for line in steps["MaskCausal()"].lines]
    np.testing.assert_allclose(causal, [*scores[:4], -np.inf], atol=1e-12)
    both = [line.value for line in steps["Mask(SlidingWindow(1, 0) | Strided(2))"].lines]
    np.testing.assert_allclose(both, [-np.inf, *scores[1:4], -np.inf], atol=1e-12)


def test_turned_rows_are_not_said_to_equal_the_rows_before() -> None:
    mechanism, (x,) = MECHANISMS["rotary"].example(), MECHANISMS["rotary"].example_arguments()
    explained = mechanism.explain(x, example_tokens(), 1)
    (step,) = (step for step in explained.steps if step.title == "Rotate")
    cat = step.lines[2]  # after the query and the key of "The"
    pairs = x[1, 4:8:2] + 1j * x[1, 5:8:2]
    turned = pairs * np.exp(1j * np.array([1, 0.01]))
    np.testing.assert_allclose(cat.value, turned.view(np.float64), atol=1e-12)
    assert cat.work == "[1, 0, 1, 0] turned"


@pytest.mark.parametrize(("index", "name"), [(0, ""), (1, "_global")])
def test_the_row_of_a_global_token_names_the_projections_that_made_it(
    index: int, name: str
) -> None:
    layer = smaller("longformer")
    x = np.random.default_rng(2).normal(size=(5, 8))
    step = layer.explain(x, index=index).steps[0]
    made = x[index] @ layer.weights[f"q{name or '_proj'}.weight"].T
    np.testing.assert_allclose(step.lines[1].value, made, atol=1e-12)
    parts = [f"{side} = x W_{side}{name} + b_{side}{name}" for side in "qkv"]
    assert step.formula == ", ".join(parts)


@pytest.mark.parametrize("bias", [True, False])
def test_an_explanation_writes_the_biases_that_it_adds(bias: bool) -> None:
    layer = MultiHead(8, 2, bias=bias, qk_norm="head")
    text = str(layer.explain(np.ones((3, 8))))
    assert ("q = RMSNorm(x W_q + b_q), k = RMSNorm(x W_k + b_k), v = x W_v + b_v" in text) == bias
    assert ("o W_o + b_o" in text) == bias


@pytest.mark.parametrize("name", NAMES)
def test_explanations_refuse_what_they_cannot_show(name: str) -> None:
    mechanism, arguments = MECHANISMS[name].example(), MECHANISMS[name].example_arguments()
    with pytest.raises(ArgumentError, match="tokens"):
        mechanism.explain(arguments[0], ["one"], **keywords(arguments))
    with pytest.raises(ArgumentError, match="index=9"):
        mechanism.explain(arguments[0], example_tokens(), 9, **keywords(arguments))
    if type(mechanism).one_sequence_only:
        with pytest.raises(ArgumentError, match=f"{name} reads one sequence"):
            mechanism.explain(arguments[0], key=arguments[0])
    if name == "cross":
        with pytest.raises(ArgumentError, match="one sequence"):
            mechanism.explain(arguments[0])


def smaller(name: str) -> Any:
    """A mechanism of two heads with random weights and an output projection, sized for x (n, 8)."""
    options: dict[str, dict[str, Any]] = {
        "grouped-query": {"num_kv_heads": 1},
        "sliding-window": {"left": 2, "right": 1},
        "strided": {"stride": 3},
        "longformer": {"window": 1, "global_tokens": [1, 4]},
        "big-bird": {"block": 2, "num_random": 1},
        "ring": {"num_devices": 3},
        "relative-bias": {"num_buckets": 8, "max_distance": 9},
    }
    return MECHANISMS[name](8, 2, **options.get(name, {}))  # type: ignore[call-arg, arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("n", [5, 11])
@pytest.mark.parametrize("name", [n for n in PROJECTED if n not in WITHOUT_PAIRS_OF_ONE_SEQUENCE])
def test_costs_count_the_pairs_that_have_a_weight(name: str, n: int) -> None:
    mechanism = smaller(name)
    x = np.random.default_rng(1).normal(size=(n, 8))
    weights = mechanism.token_mixing(x)
    found = mechanism.cost(n)
    assert int(found["softmax_exp"]) == np.count_nonzero(np.broadcast_to(weights, (2, n, n)))
    assert int(found.parameters) == sum(w.size for w in mechanism.weights.values())
    twice = mechanism.cost(n, batch=2)
    assert int(twice["softmax_exp"]) == 2 * int(found["softmax_exp"])
    assert int(twice.parameters) == int(found.parameters)
    half = mechanism.cost(n, dtype="bfloat16")
    assert 2 * int(half.bytes_moved) == int(found.bytes_moved)


def test_the_letters_of_a_closed_form_are_what_its_page_says() -> None:
    mechanism, n = smaller("sliding-window"), 50  # two tokens to the left and one to the right
    found = mechanism.cost(n)
    letters = {
        letter: n if size == "tokens" else getattr(mechanism, size)
        for letter, size in background("sliding-window").sizes.items()
    }
    written = found.formulas["softmax_exp"].replace("^", "**")
    value = eval(re.sub("(?<=[a-z0-9]) (?=[a-z])", "*", written), {}, letters)
    pairs = sum(min(n - 1, i + 1) - max(0, i - 2) + 1 for i in range(n))
    assert value == 2 * pairs == int(found["softmax_exp"])


@pytest.mark.parametrize("root", [2, 7, 30])
def test_a_stride_of_the_square_root_has_n_sqrt_n_pairs(root: int) -> None:
    n = root * root
    rows, columns = np.indices((n, n))
    back = rows - columns
    seen = (back >= 0) & ((back < root) | (back % root == 0))
    pairs = Strided(4, stride=root).pairs(n)
    assert int(pairs) == seen.sum() < 1.5 * n * root


def test_costs_of_the_golden_example() -> None:
    assert int(MECHANISMS["scaled-dot-product"].example().cost(5).total) == 495
    exactly = MultiHead(512, 8, bias=False).cost(1000)
    assert int(exactly.parameters) == 4 * 512**2
    assert int(exactly["qk_multiply"] + exactly["av_multiply"]) == 2 * 1000 * 1000 * 512
    assert "n^2 d h" in exactly["qk_multiply"].formula


@pytest.mark.parametrize("name", PROJECTED)
def test_weights_follow_the_seed_and_may_be_given(name: str) -> None:
    first, again = smaller(name), smaller(name)
    assert first.weights.keys() == again.weights.keys()
    for key, weight in first.weights.items():
        np.testing.assert_array_equal(weight, again.weights[key])
    kind = next(key for key in first.weights if key.endswith("q_proj.weight"))
    other = MultiHead(8, 2, seed=1)
    assert not np.array_equal(first.weights[kind], other.weights["q_proj.weight"])


def test_the_one_key_head_of_multi_query_may_be_left_open() -> None:
    """None is what other classes take for their default, and was refused as a number of heads."""
    left_open, given = (MultiQuery(8, 2, num_kv_heads=heads) for heads in (None, 1))
    assert left_open.num_kv_heads == given.num_kv_heads == 1
    with pytest.raises(ArgumentError, match="num_kv_heads=2; multi-query attention has one"):
        MultiQuery(8, 2, num_kv_heads=2)


def test_weights_of_another_name_or_shape_are_refused() -> None:
    weights = dict(MultiHead(8, 2).weights)
    with pytest.raises(ArgumentError, match="missing"):
        MultiHead(8, 2, weights={key: w for key, w in weights.items() if key != "v_proj.bias"})
    with pytest.raises(ShapeError, match=r"k_proj.weight has shape \(8, 7\)"):
        MultiHead(8, 2, weights={**weights, "k_proj.weight": np.zeros((8, 7))})
    with pytest.raises(ArgumentError, match="num_heads=3"):
        MultiHead(8, 3)
    with pytest.raises(ArgumentError, match="num_kv_heads"):
        MultiHead(8, 4, num_kv_heads=3)
    with pytest.raises(ArgumentError, match="multi-head has no option casual"):
        MultiHead(8, 2, casual=True)  # type: ignore[call-arg]


def test_an_unknown_option_is_answered_with_those_that_the_mechanism_has() -> None:
    with pytest.raises(
        ArgumentError, match=r"Options are bias, causal, chunk_size, head_dim, kv_"
    ) as e:
        Linear(8, 2, casual=True)
    assert "rope" not in str(e.value)
    with pytest.raises(ArgumentError, match=r"left, num_kv_heads, .*right, rope"):
        SlidingWindow(8, 2, left=1, window=2)  # type: ignore[call-arg]


def test_input_that_does_not_fit_is_refused() -> None:
    layer = MultiHead(8, 2)
    with pytest.raises(ShapeError, match="rows of 8 numbers"):
        layer(np.zeros((5, 7)))
    with pytest.raises(DTypeError, match="int64"):
        layer(np.zeros((5, 8), np.int64))
    torch = pytest.importorskip("torch")
    with pytest.raises(DTypeError, match=r"torch.float8_e5m2; mechanisms take the floating ty"):
        layer(torch.zeros(5, 8).to(torch.float8_e5m2))
    with pytest.raises(DTypeError, match="not an array"):
        layer([[0.0] * 8])
    with pytest.raises(ShapeError, match="one sequence"):
        layer.explain(np.zeros((2, 5, 8)))
    with pytest.raises(DTypeError, match="not a floating type"):
        layer.cost(5, dtype="int8")
    with pytest.raises(ArgumentError, match="one sequence"):
        MECHANISMS["cross"].example()(example_input())


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.longdouble])
@pytest.mark.parametrize("make", [Linear, Additive, Mamba])
def test_types_that_attention_refuses_are_refused_by_formulas_too(make: Any, dtype: Any) -> None:
    """Linear attention in float8 had errors of 10 %, and causal Performer in longdouble failed."""
    layer, x = make(8), np.ones((5, 8), dtype)
    for compute in (layer, layer.token_mixing, layer.explain):
        with pytest.raises(
            DTypeError, match=f"x has dtype {np.dtype(dtype)}; mechanisms take the fl"
        ):
            compute(x)


@pytest.mark.parametrize("name", ["multi-head", "additive", "mamba", "linear", "rwkv4"])
def test_a_matrix_of_numpy_is_an_array(name: str) -> None:
    """Multiplying matrices by `*` is their product, and they have two dimensions always."""
    plain, x = MECHANISMS[name](8), np.random.default_rng(0).normal(size=(8, 8))  # type: ignore[call-arg, arg-type]
    weights = {key: w.view(np.matrix) if w.ndim == 2 else w for key, w in plain.weights.items()}
    layer = MECHANISMS[name](8, weights=weights)  # type: ignore[call-arg, arg-type]
    np.testing.assert_array_equal(layer(x.view(np.matrix)), plain(x))


def latent(**options: Any) -> MultiHeadLatent:
    sizes: dict[str, Any] = {"kv_lora_rank": 4, "qk_nope_head_dim": 2, "v_head_dim": 2}
    return MultiHeadLatent(8, 2, **{"qk_rope_head_dim": 4, **sizes, **options})


IMPOSSIBLE: list[tuple[str, Callable[[], Any], str]] = [
    ("no kv heads", lambda: MultiHead(8, 2, num_kv_heads=0), "num_kv_heads=0"),
    ("no kv width", lambda: MultiHead(8, 2, kv_dim=0), "kv_dim=0"),
    ("no buckets", lambda: RelativeBias(8, num_buckets=0), "num_buckets=0"),
    ("a window below zero", lambda: SlidingWindow(8, left=-1), "left=-1"),
    ("a window on both sides", lambda: Longformer(8, window=-1), "window=-1"),
    ("half a token", lambda: Longformer(8, window=1, global_tokens=[0.5]), "whole number"),
    (
        "a norm of two key heads for four global ones",
        lambda: Longformer(8, 4, window=1, global_tokens=[0], num_kv_heads=2, qk_norm="all heads"),
        "num_kv_heads=2 key heads",
    ),
    (
        "no temperature",
        lambda: Soft(4, temperature=0),
        "temperature=0 is not a finite number above 0",
    ),
    ("a word for a number", lambda: Soft(4, temperature="cold"), "'cold'"),  # type: ignore[arg-type]  # a user's mistake
    (
        "too few buckets",
        lambda: RelativeBias(8, num_buckets=3),
        "num_buckets=3.* 4 buckets or more",
    ),
    ("one direction", lambda: RelativeBias(8, num_buckets=1, causal=True), "2 buckets or more"),
    ("a short distance", lambda: RelativeBias(8, max_distance=8), "max_distance=8"),
    ("no cap", lambda: MultiHead(8, softcap=0.0), "^softcap=0.0"),
    (
        "an epsilon below zero",
        lambda: MultiHead(8, qk_norm="head", qk_norm_eps=-1.0),
        "qk_norm_eps",
    ),
    ("half a pair of latent numbers", lambda: latent(qk_rope_head_dim=3), "^qk_rope_head_dim=3"),
    (
        "a rotation of some latent numbers",
        lambda: latent(rope=qkv.RoPE(rotary_dim=2)),
        "^qk_rope_head_dim=4",
    ),
    ("an odd rotary dimension", lambda: Rotary(6, 2)(np.zeros((4, 6))), "3 entries"),
]


@pytest.mark.parametrize(
    ("make", "message"), [i[1:] for i in IMPOSSIBLE], ids=[i[0] for i in IMPOSSIBLE]
)
def test_impossible_sizes_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_as_many_values_as_keys() -> None:
    x = np.zeros((5, 8))
    for mechanism in (MultiHead(8), Linear(8), Linformer(8, max_len=5)):
        with pytest.raises(ShapeError, match="value"):
            mechanism(x, x[:3], x[:2])


@pytest.mark.parametrize(
    "name", [n for n in PROJECTED if n not in ("cross", "linear", "performer")]
)
def test_no_tokens_are_no_rows(name: str) -> None:
    if name == "longformer":
        assert Longformer(8, 2, window=1)(np.zeros((0, 8))).shape == (0, 8)
    else:
        assert smaller(name)(np.zeros((0, 8))).shape == (0, 8)


def test_an_explanation_without_keys_ends_in_what_attention_gives() -> None:
    for mechanism in (MultiHead(8, 2), Flash(8, 2)):
        x, nothing = np.ones((3, 8)), np.zeros((0, 8))
        found = mechanism.explain(x, key=nothing).steps[-1].lines[-1].value
        np.testing.assert_allclose(found, mechanism(x, nothing)[0], rtol=0, atol=1e-13)


def test_a_gradient_is_never_lost_in_silence() -> None:
    weights = {key: torch.tensor(w) for key, w in MultiHead(8, 2).weights.items()}
    weights["q_proj.weight"].requires_grad_()
    layer = MultiHead(8, 2, weights=weights)
    with pytest.raises(UnsupportedError, match=r"torch differentiates or traces q_proj.weight"):
        layer(np.zeros((5, 8)))
    layer(torch.zeros(5, 8, dtype=torch.float64)).sum().backward()
    assert weights["q_proj.weight"].grad is not None


def test_leading_dimensions_are_sequences() -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 8))
    for name in PROJECTED:
        if name == "cross":
            continue
        layer = smaller(name)
        whole = layer(x)
        for place in np.ndindex(2, 3):
            np.testing.assert_allclose(whole[place], layer(x[place]), rtol=0, atol=1e-13)


def test_without_positions_attention_is_permutation_equivariant() -> None:
    x = np.random.default_rng(0).normal(size=(6, 8))
    order = np.random.default_rng(1).permutation(6)
    np.testing.assert_allclose(MultiHead(8, 2)(x[order]), MultiHead(8, 2)(x)[order], atol=1e-13)
    assert abs(Causal(8, 2)(x[order]) - Causal(8, 2)(x)[order]).max() > 0.01


def test_a_causal_ring_hops_only_into_the_past() -> None:
    x = np.random.default_rng(0).normal(size=(7, 8))
    hops = [(hop.device, hop.source) for hop in Ring(8, 2, num_devices=3, causal=True).hops(x)]
    assert hops == [(0, 0), (1, 1), (1, 0), (2, 2), (2, 1), (2, 0)]
    np.testing.assert_allclose(
        Ring(8, 2, num_devices=3, causal=True)(x), Causal(8, 2)(x), rtol=0, atol=1e-13
    )


def test_the_parts_of_a_ring_are_joined_as_by_merge() -> None:
    x = np.random.default_rng(0).normal(size=(6, 8))
    ring = Ring(8, 2, num_devices=3, out_proj=False)
    parts = [(hop.out, hop.lse) for hop in ring.hops(x) if hop.device == 1]
    out, _ = qkv.merge(*parts)
    joined = np.moveaxis(out, 0, 1).reshape(2, 8)
    np.testing.assert_allclose(ring(x)[2:4], joined, rtol=0, atol=1e-13)
