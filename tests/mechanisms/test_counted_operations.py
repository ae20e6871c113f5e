"""Ledgers of mechanisms, against loops from their papers over numbers that count what is done.

Sums of n numbers take n - 1 additions. What depends on the weights alone is made before the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.mechanisms import (
    RWKV4,
    RWKV6,
    Differential,
    Flash,
    GatedDelta,
    Linear,
    Linformer,
    Mamba,
    Mamba2,
    MultiHead,
    MultiHeadLatent,
    Performer,
    RelativeBias,
    Ring,
)

TOKENS = 5
DONE: Counter[str] = Counter()


def counting(kind: str) -> Callable[[Any, Any], Any]:
    def operation(_: Any, other: Any) -> Any:
        if isinstance(other, np.ndarray):
            return NotImplemented
        DONE[kind] += 1
        return Number()

    return operation


class Number:
    """A number without a value."""

    __add__ = __radd__ = counting("add")
    __sub__ = __rsub__ = counting("subtract")
    __mul__ = __rmul__ = counting("multiply")
    __truediv__ = __rtruediv__ = counting("divide")


def draw(*shape: int) -> Any:
    array = np.empty(shape, object)
    for index in np.ndindex(*shape):
        array[index] = Number()
    return array


def each(array: Any, *kinds: str) -> Any:
    """An array like this one, after one operation of each kind for every number."""
    for kind in kinds:
        DONE[kind] += np.size(array)
    return draw(*np.shape(array))


def activated(array: Any) -> Any:
    return each(array, "exp", "add", "divide", "multiply")


def total(array: Any, axis: int = -1) -> Any:
    first, *others = np.moveaxis(array, axis, 0)
    for other in others:
        first = first + other
    return first


def projected(rows: Any, outer: int) -> Any:
    return total(rows[..., None, :] * draw(outer, rows.shape[-1]))


def rms_norm(rows: Any) -> Any:
    return rows / each(total(rows * rows) / rows.shape[-1] + 1e-5, "sqrt")[..., None]


def l2_norm(rows: Any) -> Any:
    return rows / each(total(rows * rows) + 1e-6, "sqrt")[..., None]


def outer(column: Any, row: Any) -> Any:
    return column[..., :, None] * row[..., None, :]


def rwkv6() -> None:
    e, h, d, r, s = 8, 2, 4, 3, 5
    for _ in range(TOKENS):
        x = draw(e)
        past = draw(e) - x
        low = each(projected(x + past * draw(e), 5 * r), "tanh")
        sides = [x + past * (draw(e) + projected(low[i * r : (i + 1) * r], e)) for i in range(5)]
        hidden = each(projected(sides[0], s), "tanh")
        decay = each(draw(h * d) + projected(hidden, h * d), "exp", "subtract", "exp")
        receptance, key, value = (projected(side, h * d).reshape(h, d) for side in sides[1:4])
        gate = activated(projected(sides[4], h * d))
        new, own = outer(key, value), outer(draw(h, d) * key, value)
        out = total(receptance[..., None] * (draw(h, d, d) + own), 1)
        _ = decay.reshape(h, d, 1) * draw(h, d, d) + new
        out = out - (total(out) / d)[:, None]
        rows = rms_norm(out).reshape(-1) * draw(h * d) + draw(h * d)
        projected(rows * gate, e)


def rwkv4() -> None:
    e, h = 8, 6
    mixes = [(m, 1 - m) for m in draw(3, e)]
    for _ in range(TOKENS):
        key, value, receptance = (projected(draw(e) * a + draw(e) * b, h) for a, b in mixes)
        bonus = key + draw(h)
        top = each(bonus, "compare")
        past, own = each(draw(h) - top, "exp"), each(bonus - top, "exp")
        out = (past * draw(h) + own * value) / (past * draw(h) + own)
        faded = draw(h) - draw(h)
        top = each(faded, "compare")
        past, own = each(faded - top, "exp"), each(key - top, "exp")
        _ = past * draw(h) + own * value, past * draw(h) + own
        projected(activated(receptance) * out, e)


def mamba() -> None:
    e, c, s, rank, kernel = 8, 16, 3, 1, 4
    for _ in range(TOKENS):
        both = projected(draw(e), 2 * c)
        x = activated(total(draw(c, kernel) * draw(c, kernel)) + draw(c))
        parts = projected(x, rank + 2 * s)
        step = activated(projected(parts[:rank], c) + draw(c))
        decay = each(step[:, None] * draw(c, s), "exp")
        state = decay * draw(c, s) + outer(step * x, parts[rank : rank + s])
        out = total(state * parts[rank + s :]) + draw(c) * x
        projected(out * activated(both[c:]), e)


def mamba2() -> None:
    e, h, d, s, g, kernel = 8, 4, 4, 6, 2, 4
    inner, mixed = h * d, h * d + 2 * g * s
    for _ in range(TOKENS):
        rows = projected(draw(e), inner + mixed + h)
        x = activated(total(draw(mixed, kernel) * draw(mixed, kernel)) + draw(mixed))
        value, step = x[:inner].reshape(h, d), activated(rows[-h:] + draw(h))
        decay = each(step * draw(h), "exp")[:, None, None]
        state = decay * draw(h, s, d) + outer(draw(h, s), step[:, None] * value)
        out = total(draw(h, s, 1) * state, 1) + draw(h, 1) * value
        gated = out.reshape(-1) * activated(rows[:inner])
        projected(rms_norm(gated.reshape(g, -1)).reshape(-1) * draw(inner), e)


def gated_delta() -> None:
    e, h, g, d, v, kernel = 8, 4, 2, 3, 5, 4
    keys, values = g * d, h * v
    mixed = 2 * keys + values
    for _ in range(TOKENS):
        projected(draw(e), 2 * keys + 2 * values)
        projected(draw(e), 2 * h)
        activated(total(draw(mixed, kernel) * draw(mixed, kernel)))
        query, key = (
            np.repeat(rows, 2, 0) for rows in (l2_norm(draw(g, d)) * 0.5, l2_norm(draw(g, d)))
        )
        decay = each(draw(h) * activated(draw(h) + draw(h)), "exp")[:, None, None]
        beta = activated(draw(h))[:, None]
        state = decay * draw(h, d, v)
        error = beta * (draw(h, v) - total(key[..., None] * state, 1))
        state = state + outer(key, error)
        out = rms_norm(total(query[..., None] * state, 1)) * draw(v)
        projected(out.reshape(-1) * activated(draw(values)), e)


def heads_of(e: int, h: int, d: int) -> list[Any]:
    return [(projected(draw(TOKENS, e), h * d)).reshape(TOKENS, h, d) for _ in range(3)]


def read_and_write(h: int, features: int, d: int) -> None:
    """`phi(k)^T [v, 1]` is added to the state, and `phi(q)` reads it, for every token."""
    for _ in range(TOKENS * h):
        key = draw(features)
        _ = draw(features, d) + outer(key, draw(d)), draw(features) + key
        sums = total(draw(features, 1) * draw(features, d + 1), 0)
        _ = sums[:d] / sums[d]


def linear() -> None:
    e, h, d = 8, 2, 4
    for rows in heads_of(e, h, d)[:2]:
        each(rows, "compare", "exp", "add")
    read_and_write(h, d, d)
    projected(draw(TOKENS, h * d), e)


def performer() -> None:
    e, h, d, m = 8, 2, 4, 3
    for rows in heads_of(e, h, d)[:2]:
        scaled = rows * 0.5
        exponents = projected(scaled, m) - (total(scaled * scaled) * 0.5)[..., None]
        each(exponents[..., 1:], "compare")
        _ = each(exponents - draw(1), "exp") * 0.5
    read_and_write(h, m, d)
    projected(draw(TOKENS, h * d), e)


def attention(keys_of_rows: list[int], width: int, v_width: int) -> None:
    for count in keys_of_rows:
        scores = total(draw(width) * draw(count, width)) / 2
        each(scores[1:], "compare")
        weights = each(scores - draw(1), "exp")
        total((weights / total(weights))[:, None] * draw(count, v_width), 0)


def differential() -> None:
    e, h, d = 8, 4, 2
    heads_of(e, h, d)
    attention([TOKENS] * TOKENS * h, d, 2 * d)
    maps = draw(2, TOKENS, h // 2, 2 * d)
    pairs = rms_norm(maps[0] - Number() * maps[1]) * draw(1)
    projected(pairs.reshape(TOKENS, -1), e)


def linformer() -> None:
    e, h, d, k = 8, 2, 4, 3
    heads_of(e, h, d)
    for _ in range(2 * h):
        total(draw(k, TOKENS, 1) * draw(TOKENS, d), 1)
    attention([k] * TOKENS * h, d, d)
    projected(draw(TOKENS, h * d), e)


def sinks() -> None:
    """The softmax of a row has one term more than it has keys."""
    e, h, d = 8, 2, 4
    heads_of(e, h, d)
    for _ in range(TOKENS * h):
        scores = np.append(total(draw(d) * draw(TOKENS, d)) / 2, draw(1))
        each(scores[1:], "compare")
        weights = each(scores - draw(1), "exp")
        total((weights[:-1] / total(weights))[:, None] * draw(TOKENS, d), 0)
    projected(draw(TOKENS, h * d), e)


def multi_head_latent() -> None:
    e, h, c, r, p, v, rank = 8, 2, 4, 2, 3, 5, 3
    latent = projected(draw(TOKENS, e), c + r)[:, :c]
    projected(rms_norm(latent) * draw(c), h * (p + v))
    projected(rms_norm(projected(draw(TOKENS, e), rank)) * draw(rank), h * (p + r))
    for _ in range(TOKENS * (h + 1) * r // 2):
        a, b, cos, sin = draw(4)
        _ = a * cos - b * sin, a * sin + b * cos
    attention([*range(1, TOKENS + 1)] * h, p + r, v)
    projected(draw(TOKENS, h * v), e)


def relative_bias() -> None:
    """Scores of T5 are divided by nothing."""
    e, h, d = 8, 2, 4
    heads_of(e, h, d)
    for _ in range(TOKENS * h):
        scores = total(draw(d) * draw(TOKENS, d)) + draw(TOKENS)
        each(scores[1:], "compare")
        weights = each(scores - draw(1), "exp")
        total((weights / total(weights))[:, None] * draw(TOKENS, d), 0)
    projected(draw(TOKENS, h * d), e)


LATENT = {"kv_lora_rank": 4, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 5}
CASES: dict[Callable[[], None], Any] = {
    rwkv6: RWKV6(8, 2, mix_rank=3, decay_rank=5),
    rwkv4: RWKV4(8, 6),
    mamba: Mamba(8, state_size=3),
    mamba2: Mamba2(8, 4, state_size=6, num_groups=2),
    gated_delta: GatedDelta(8, 4, num_key_heads=2, head_dim=3, v_head_dim=5),
    linear: Linear(8, 2, causal=True, bias=False),
    performer: Performer(8, 2, causal=True, num_features=3, bias=False),
    differential: Differential(8, 4, bias=False),
    linformer: Linformer(8, 2, max_len=8, num_mixtures=3, bias=False),
    relative_bias: RelativeBias(8, 2),
    sinks: MultiHead(8, 2, sinks=True, bias=False),
    multi_head_latent: MultiHeadLatent(8, 2, q_lora_rank=3, **LATENT),
}


@pytest.mark.parametrize("loop", CASES, ids=lambda loop: loop.__name__)
def test_operations_are_those_of_a_loop(loop: Callable[[], None]) -> None:
    DONE.clear()
    loop()
    found: Counter[str] = Counter()
    for name, count in CASES[loop].cost(TOKENS).counts.items():
        found[name.rpartition("_")[2]] += int(count)
    assert +found == +DONE


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 7, 33])
def test_a_ring_joins_the_rows_of_each_hop(n: int, causal: bool) -> None:
    layer = Ring(8, 2, num_devices=3, causal=causal)
    hops = list(layer.hops(np.ones((n, 8))))
    first = {hop.device: hop for hop in reversed(hops)}
    joined = sum(hop.lse.size for hop in hops) - sum(hop.lse.size for hop in first.values())
    assert layer.cost(n).counts.get("merge_log", 0) == joined


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 7, 33])
def test_flash_corrects_the_rows_of_each_tile(n: int, causal: bool) -> None:
    layer = Flash(8, 2, block_q=4, block_kv=4, causal=causal)
    tiles = list(layer.tiles(np.ones((n, 8))))
    rows = sum(tile.q_rows.stop - tile.q_rows.start for tile in tiles)
    assert layer.cost(n).counts["correction_exp"] == rows


@pytest.mark.parametrize("loop", [linear, performer, rwkv6, mamba, mamba2, gated_delta])
def test_every_sequence_of_a_batch_has_a_state_of_its_own(loop: Callable[[], None]) -> None:
    layer = CASES[loop]
    _, state = layer.step(np.ones((3, TOKENS, 8)))
    kept = state["sums" if "sums" in state else "scan"]
    assert int(layer.cost(TOKENS, batch=3).space["state"]) == kept.size


def test_maps_of_differential_attention_leave_rows_of_two_heads() -> None:
    layer, x = CASES[differential], np.ones((3, TOKENS, 8))
    maps = qkv.attention(*layer.heads(x, x, x))
    assert int(layer.cost(TOKENS, batch=3).space["av"]) == maps.size


def test_longer_sequences_need_longer_mixtures_of_linformer() -> None:
    """Pages and tables ask for the cost of many more tokens than the example reads."""
    short, long = (Linformer(8, 2, max_len=n, num_mixtures=3).cost(70, 4) for n in (5, 70))
    assert int(short.parameters) == int(long.parameters) == 4 * 8 * 9 + 2 * 3 * 70
    assert int(short.bytes_moved) == int(long.bytes_moved)
