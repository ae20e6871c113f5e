"""Every option of every mechanism beside its definition, written out in NumPy and float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.models.t5.modeling_t5 import T5Attention

import qkv
from qkv.errors import ArgumentError
from qkv.mechanisms import MECHANISMS, Cross, Flash, Longformer, MultiHead, Ring
from qkv.mechanisms.base.projected import Options, ProjectedAttention

Array = NDArray[Any]
WIDTH, HEADS, DIM, N = 16, 4, 4, 9
OTHER_WIDTH = 12
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
BLOCKS = np.array([[[2], [3], [-1], [0], [4]]] * HEADS)
PROJECTED = [n for n, cls in MECHANISMS.items() if issubclass(cls, ProjectedAttention)]
SIZES: dict[str, dict[str, Any]] = {
    "multi-query": {"num_kv_heads": 1},
    "grouped-query": {"num_kv_heads": 2},
    "relative-bias": {"num_buckets": 6, "max_distance": 7},
    "sliding-window": {"left": 2, "right": 1},
    "strided": {"stride": 3},
    "longformer": {"window": 1, "global_tokens": [0, 3, 4, 7]},
    "big-bird": {"block": 2, "random_blocks": BLOCKS},
    "linformer": {"max_len": N + 2, "num_mixtures": 3},
    "performer": {"num_features": 8},
    "flash": {"block_q": 4, "block_kv": 3},
    "ring": {"num_devices": 3},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "head_dim": {"head_dim": 6},
    "num_kv_heads": {"num_kv_heads": 2},
    "kv_dim": {"kv_dim": OTHER_WIDTH},
    "causal": {"causal": True},
    "rope": {"rope": qkv.RoPE(base=100.0)},
    "alibi": {"alibi": True},
    "bias": {"bias": False},
    "out_proj": {"out_proj": False},
    "scale": {"scale": 0.7},
    "qk_norm": {"qk_norm": "head"},
    "qk_norm of all heads": {"qk_norm": "all heads"},
    "qk_norm_eps": {"qk_norm": "head", "qk_norm_eps": 0.5},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": True},
}
OPTIONS["all"] = {
    "head_dim": 6, "num_kv_heads": 2, "causal": True, "rope": qkv.RoPE(base=100.0), "alibi": True,
    "scale": 0.7, "qk_norm": "head", "softcap": 0.8, "sinks": True,
}  # fmt: skip
REFUSED = {
    "linear": ("scale", "rope", "alibi", "softcap", "sinks"),
    "performer": ("scale", "rope", "alibi", "softcap", "sinks"),
    "linformer": ("causal", "rope", "alibi"),
}
"""Options that have no meaning there."""
CASES = [(name, option) for name in PROJECTED for option in OPTIONS]


def options_of(name: str, option: str) -> dict[str, Any]:
    """The sizes of the mechanism and the option; of "all" those that it takes."""
    options = dict(OPTIONS[option])
    if option == "all":
        for refused in REFUSED.get(name, ()):
            del options[refused]
    if name == "multi-query":
        options.pop("num_kv_heads", None)
    return SIZES.get(name, {}) | options


def refused(name: str, option: str) -> bool:
    if option == "kv_dim":
        return MECHANISMS[name].one_sequence_only
    return option in REFUSED.get(name, ())


def made(name: str, options: dict[str, Any]) -> Any:
    """The mechanism with random weights, also where those of a new one are zeros or ones."""
    cls: Any = MECHANISMS[name]
    rng = np.random.default_rng(3)
    shapes = {key: w.shape for key, w in cls(WIDTH, HEADS, **options).weights.items()}
    return cls(WIDTH, HEADS, **options, weights={
        key: rng.normal(size=shape) * (0.5 if len(shape) > 1 else 1.0)
        for key, shape in shapes.items()
    })  # fmt: skip


def inputs(name: str, option: str) -> tuple[Array, ...]:
    rng = np.random.default_rng(4)
    x = 1.5 * rng.normal(size=(N, WIDTH))
    if option == "kv_dim":
        return x, 1.5 * rng.normal(size=(N, OTHER_WIDTH))
    return (x, 1.5 * rng.normal(size=(N, WIDTH))) if name == "cross" else (x,)


class Definition:
    """One mechanism written out, from its weights and the options that it was made with."""

    def __init__(self, name: str, weights: dict[str, Array], options: dict[str, Any]) -> None:
        self.name, self.weights, self.options = name, weights, options
        self.dim = options.get("head_dim", DIM)
        self.kv_heads = options.get("num_kv_heads", HEADS)
        fixed = name in ("causal", "strided", "kv-cache-decoding")
        self.causal = options.get("causal", False) or fixed
        rope = options.get("rope")
        self.base = (10000.0 if name == "rotary" else None) if rope is None else rope.base
        unscaled = 1.0 if name == "relative-bias" else self.dim**-0.5
        self.scale = options.get("scale", unscaled)

    def linear(self, side: str, x: Array) -> Any:
        return x @ self.weights[f"{side}.weight"].T + self.weights.get(f"{side}.bias", 0.0)

    def rows(self, side: str, x: Array, heads: int, norm: str | None = None) -> Any:
        """Rows of each head `(heads, n, dim)`, normalised if they are queries or keys."""
        rows = self.linear(side, x)
        kind = self.options.get("qk_norm") if norm else None
        if kind == "all heads":
            rows = self.normalised(rows, norm)
        apart = rows.reshape(len(x), heads, self.dim).transpose(1, 0, 2)
        return self.normalised(apart, norm) if kind == "head" else apart

    def normalised(self, rows: Array, norm: str | None) -> Any:
        eps = self.options.get("qk_norm_eps", 1e-6)
        root = np.sqrt((rows**2).mean(-1, keepdims=True) + eps)
        return rows / root * self.weights[f"{norm}_norm.weight"]

    def turned(self, rows: Array) -> Array:
        """Row p turned by the angles p * base^(-2m/d)."""
        if self.base is None:
            return rows
        half = self.dim // 2
        angles = np.arange(rows.shape[1])[:, None] * self.base ** (-np.arange(half) / half)
        a, b = rows[..., :half], rows[..., half:]
        turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
        return np.concatenate(turned, -1)

    def allowed(self, i: int, j: int) -> Any:
        o = self.options
        if self.causal and j > i:
            return False
        if self.name == "sliding-window":
            return i - o["left"] <= j <= i + o["right"]
        if self.name == "strided":
            return i - j < o["stride"] or (i - j) % o["stride"] == 0
        if self.name == "longformer":
            return abs(i - j) <= o["window"] or bool({i, j} & set(o["global_tokens"]))
        if self.name == "big-bird":
            b, c, last = i // 2, j // 2, (N - 1) // 2
            near = abs(b - c) <= 1 or bool({b, c} & {0, last})
            return near or c in BLOCKS[0, b]
        return True

    def weights_of(self, head: int, query: Array, key: Array, i: int) -> Array:
        """The softmax of row i of a head, with every variant."""
        scores = key @ query * self.scale
        for j in range(len(scores)):
            if self.name == "relative-bias":
                distance = torch.tensor([j - i])
                bucket = T5Attention._relative_position_bucket(
                    distance, not self.causal, self.options["num_buckets"],
                    self.options["max_distance"],
                )  # fmt: skip
                scores[j] += self.weights["relative_attention_bias.weight"][int(bucket), head]
            if self.options.get("alibi") or self.name == "alibi":
                scores[j] -= 2.0 ** (-8 * (head + 1) / HEADS) * abs(i - j)
        if "softcap" in self.options:
            scores = self.options["softcap"] * np.tanh(scores / self.options["softcap"])
        if self.name != "linformer":
            scores[[not self.allowed(i, j) for j in range(len(scores))]] = -np.inf
        total = np.exp(scores).sum()
        if self.options.get("sinks"):
            total += np.exp(self.weights["sinks"][head])
        weights: Array = np.exp(scores) / total
        return weights

    def feature_weights(self, query: Array, key: Array, i: int, projection: Array) -> Any:
        """The weights of row i of linear attention and of performer."""

        def features(rows: Array) -> Any:
            if self.name == "linear":
                return np.where(rows > 0, rows + 1, np.exp(np.minimum(rows, 0)))
            y = rows / self.dim**0.25
            return np.exp(y @ projection.T - (y**2).sum(-1, keepdims=True) / 2)

        products = features(key) @ features(query[None])[0]
        products[[not self.allowed(i, j) for j in range(len(products))]] = 0.0
        return products / products.sum()

    def __call__(self, mechanism: Any, x: Array, key: Array | None = None) -> tuple[Array, Array]:
        """The weights of every head, and the output."""
        y = x if key is None else key
        group = HEADS // self.kv_heads
        q = self.turned(self.rows("q_proj", x, HEADS, "q"))
        k = self.turned(self.rows("k_proj", y, self.kv_heads, "k")).repeat(group, 0)
        v = self.rows("v_proj", y, self.kv_heads)
        if self.name == "differential":
            half = self.kv_heads // 2
            v = np.concatenate([v[:half], v[half:]], -1)
            v = np.concatenate([v, v])
        v = v.repeat(group, 0)
        mixed_k, mixed_v = k, v
        if self.name == "linformer":
            mixed_k = self.weights["e_proj.weight"][:, : len(y)] @ k
            mixed_v = self.weights["f_proj.weight"][:, : len(y)] @ v
        weights = np.zeros((HEADS, len(x), mixed_k.shape[1]))
        out = np.zeros((HEADS, len(x), v.shape[-1]))
        for h in range(HEADS):
            for i in range(len(x)):
                if self.name in ("linear", "performer"):
                    projection = getattr(mechanism, "projection", np.zeros(0))
                    weights[h, i] = self.feature_weights(q[h, i], k[h], i, projection)
                else:
                    weights[h, i] = self.weights_of(h, q[h, i], mixed_k[h], i)
                out[h, i] = weights[h, i] @ mixed_v[h]
        if self.name == "longformer":
            q = self.turned(self.rows("q_global", x, HEADS, "q"))
            k = self.turned(self.rows("k_global", x, HEADS, "k"))
            v = self.rows("v_global", x, HEADS)
            for h in range(HEADS):
                for i in self.options["global_tokens"]:
                    weights[h, i] = self.weights_of(h, q[h, i], k[h], i)
                    out[h, i] = weights[h, i] @ v[h]
        if self.name == "linformer":
            weights = weights @ self.weights["f_proj.weight"][:, : len(y)]
        if self.name == "differential":
            q1, k1, q2, k2 = (self.weights[name] for name in LAMBDAS)
            second = np.exp(q1 @ k1) - np.exp(q2 @ k2) + 0.2
            half = HEADS // 2
            weights = weights[:half] - second * weights[half:]
            out = out[:half] - second * out[half:]
            out = 0.8 * out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-5)
        joined = out.transpose(1, 0, 2).reshape(len(x), -1)
        project = self.options.get("out_proj", self.name != "self")
        return weights, self.linear("out_proj", joined) if project else joined


@pytest.mark.parametrize(("name", "option"), CASES)
@pytest.mark.one_in(2)
def test_an_option_does_what_its_definition_says(name: str, option: str) -> None:
    """The call, the weights, the explanation and the cost agree with one another too."""
    options = options_of(name, option)
    if refused(name, option):
        with pytest.raises(ArgumentError, match=option):
            made(name, options)
        return
    mechanism, arguments = made(name, options), inputs(name, option)
    weights, out = Definition(name, mechanism.weights, options)(mechanism, *arguments)
    np.testing.assert_allclose(mechanism(*arguments), out, rtol=0, atol=1e-9)
    np.testing.assert_allclose(mechanism.token_mixing(*arguments), weights, rtol=0, atol=1e-9)
    keywords = dict(zip(("key",), arguments[1:], strict=False))
    for index in (0, 3, N - 1):
        found = mechanism.explain(arguments[0], index=index, **keywords).steps[-1].lines[-1].value
        np.testing.assert_allclose(found, out[index], rtol=0, atol=1e-9)
    cost = mechanism.cost(N)
    assert int(cost.parameters) == mechanism.parameters == sum(
        w.size for w in mechanism.weights.values()
    )  # fmt: skip
    if name not in ("linear", "performer", "linformer", "differential"):
        seen = np.count_nonzero(weights)
        assert int(cost["softmax_exp"]) == int(mechanism.pairs(N)) * HEADS == seen
        assert int(cost.counts.get("softcap_tanh", 0)) == seen * ("softcap" in options)
        assert int(cost.counts.get("sinks_exp", 0)) == HEADS * N * ("sinks" in options)


def test_every_option_of_projected_attention_is_tried() -> None:
    tried = {name for options in OPTIONS.values() for name in options}
    assert tried == Options.__optional_keys__ - {"weights", "seed"}


ALWAYS: list[tuple[str, dict[str, Any], str]] = [
    ("strided", {"causal": False}, "strided always has causal=True; given is causal=False"),
    ("kv-cache-decoding", {"causal": False}, "kv-cache-decoding always has causal=True"),
    ("alibi", {"alibi": False}, "alibi always has alibi=True"),
]


@pytest.mark.parametrize(("name", "options", "message"), ALWAYS, ids=[name for name, *_ in ALWAYS])
def test_an_option_that_defines_a_mechanism_is_not_overruled_in_silence(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        made(name, SIZES.get(name, {}) | options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 2, 20])
@pytest.mark.parametrize("tokens", [(), (0,), (2, 3, 11), tuple(range(12))])
def test_pairs_of_longformer_are_counted_as_a_loop_does(
    tokens: tuple[int, ...], window: int, causal: bool
) -> None:
    layer = Longformer(4, window=window, global_tokens=tokens, causal=causal)
    expected = sum(
        (not causal or j <= i) and (abs(i - j) <= window or i in tokens or j in tokens)
        for i in range(12)
        for j in range(12)
    )
    assert int(layer.pairs(12)) == expected


def test_sinks_of_a_ring_have_the_gradient_of_multi_head() -> None:
    rng = np.random.default_rng(5)
    x, cotangent = torch.tensor(rng.normal(size=(2, 2, 7, 8)))
    found = []
    for make in (MultiHead, lambda *sizes, **more: Ring(*sizes, num_devices=3, **more)):
        weights = {key: torch.tensor(w) for key, w in MultiHead(8, 2, sinks=True).weights.items()}
        weights["sinks"] = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
        given = x.clone().requires_grad_()
        (make(8, 2, sinks=True, weights=weights)(given) * cotangent).sum().backward()
        found.append((weights["sinks"].grad, given.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_cost_of_cross_attention_is_that_of_its_lengths() -> None:
    options: dict[str, Any] = {"qk_norm": "head", "sinks": True, "softcap": 3.0}
    layer, n, m = Cross(8, 2, **options), 5, 3
    found = layer.cost(n, kv_len=m)
    assert int(found["softcap_tanh"]) == int(found["softmax_exp"]) == 2 * n * m
    assert int(found["sinks_exp"]) == 2 * n
    assert int(found["qk_norm_sqrt"]) == 2 * (n + m)
    assert int(found["q_proj_multiply"]) == n * 64
    assert int(found["v_proj_multiply"]) == m * 64
    assert int(found.parameters) == layer.parameters
    read = (n + m) * 8 + layer.parameters
    assert int(found.bytes_moved) == 4 * (read + n * 8)
    assert layer.cost(n).counts == MultiHead(8, 2, **options).cost(n).counts
    with pytest.raises(ArgumentError, match="n=5 and kv_len=3"):
        Cross(8, 2, causal=True).cost(n, kv_len=m)


def test_an_explanation_says_what_sinks_take() -> None:
    weights = {**MultiHead(8, 2, sinks=True).weights, "sinks": np.array([1.5, 9.0])}
    x = np.random.default_rng(6).normal(size=(5, 8))
    steps = MultiHead(8, 2, sinks=True, weights=weights).explain(x).steps
    (last,) = (s for s in steps if s.title == "Head 1. Softmax")
    assert "max = 9, " in last.formula
    assert last.formula.endswith("of which exp(sink - max) = 1")
    begins = [
        s for s in Flash(8, 2, sinks=True, weights=weights).explain(x).steps if "begin" in s.title
    ]
    assert [line.value for s in begins for line in s.lines] == [1.5, 1.0, 9.0, 1.0]
    once = Ring(8, 2, num_devices=3, sinks=True, weights=weights).explain(x).steps[-2]
    assert (once.title, once.lines[0].value) == ("Sinks, once", [1.5, 9.0])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PROJECTED)
def test_all_options_together_in_every_library(name: str) -> None:
    """Two sequences at once, compiled in JAX, with the gradient of the sum in both."""
    mechanism, arguments = made(name, options_of(name, "all")), inputs(name, "all")
    expected = mechanism(*arguments)
    tensors = [torch.tensor(np.stack([a, a[::-1]])).requires_grad_() for a in arguments]
    arrays = [jnp.asarray(t.detach().numpy()) for t in tensors]
    of_torch = mechanism(*tensors)
    np.testing.assert_allclose(of_torch[0].detach().numpy(), expected, rtol=0, atol=1e-9)
    of_torch.sum().backward()
    of_jax, pullback = jax.vjp(jax.jit(mechanism.__call__), *arrays)
    np.testing.assert_allclose(of_jax, of_torch.detach().numpy(), rtol=0, atol=1e-9)
    for ours, theirs in zip(pullback(jnp.ones_like(of_jax)), tensors, strict=True):
        assert theirs.grad is not None
        np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=0, atol=1e-8)
