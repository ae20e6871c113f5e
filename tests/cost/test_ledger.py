"""Counts of operations against a loop that counts them, and formulas against their numbers."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections import Counter
from fractions import Fraction

import pytest

from qkv.errors import ArgumentError
from qkv.ledger import Count, Ledger, attended_pairs, ledger, matmul, step, symbols


def value(formula: str, sizes: dict[str, int]) -> Fraction:
    """What a formula says, read as text."""
    total = Fraction(0)
    for term in formula.replace("- ", "+ -").split("+ "):
        product, sign = Fraction(1), 1
        text, _, divisor = term.partition(" / ")
        for factor in text.split():
            if factor.startswith("-"):
                sign, factor = -1, factor[1:]
            name, _, power = factor.partition("^")
            base = sizes[name] if name in sizes else int(name)
            product *= Fraction(base) ** int(power or 1)
        total += sign * product / int(divisor or 1)
    return total


def counted_by_hand(n: int, m: int, d: int, d_v: int) -> Counter[str]:
    """Attention in loops over numbers; each operation is counted where it is done."""
    done: Counter[str] = Counter()

    def many(name: str, numbers: list[float], join) -> float:
        result = numbers[0]
        for number in numbers[1:]:
            done[name] += 1
            result = join(result, number)
        return result

    for _ in range(n):
        row = []
        for _ in range(m):
            products = []
            for _ in range(d):
                done["qk_multiply"] += 1
                products.append(0.5)
            score = many("qk_add", products, float.__add__)
            done["scale_divide"] += 1
            row.append(score / math.sqrt(d))
        top = many("softmax_compare", row, max)
        for j in range(m):
            done["softmax_subtract"] += 1
            done["softmax_exp"] += 1
            row[j] = math.exp(row[j] - top)
        total = many("softmax_add", row, float.__add__)
        for j in range(m):
            done["softmax_divide"] += 1
            row[j] /= total
        for _ in range(d_v):
            products = []
            for weight in row:
                done["av_multiply"] += 1
                products.append(weight * 0.5)
            many("av_add", products, float.__add__)
    return done


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (5, 5, 4, 4), (2, 7, 3, 5), (1, 1, 1, 1)])
def test_counts_are_those_of_a_loop(sizes: tuple[int, int, int, int]) -> None:
    counts = ledger(*sizes).counts
    assert {name: count for name, count in counts.items() if count} == counted_by_hand(*sizes)


def test_the_walkthrough_of_three_tokens_takes_138_operations() -> None:
    counted = ledger(3, 3, 3, 3)
    assert counted.total == 138
    assert counted.total.formula == "2 n m d + 2 n m d_v + 5 n m - n d_v - 2 n"
    assert counted.kinds == {
        "multiply": 54, "add": 42, "subtract": 9, "divide": 18, "compare": 6, "exp": 9,
    }  # fmt: skip
    assert counted.space == {"qk": 9, "scale": 9, "softmax": 9, "av": 9}


def test_formulas_give_their_numbers() -> None:
    sizes = {"n": 6, "m": 11, "d": 4, "d_v": 3}
    counted = ledger(*sizes.values())
    for count in [*counted.counts.values(), counted.total, *counted.space.values()]:
        assert value(count.formula, sizes) == count


def test_ledgers_add_up_and_multiply() -> None:
    n, d, h = symbols(n=5, d=4, h=3)
    one = matmul("qk", n, d, n) + Ledger(parameters=d * d, bytes_read=2 * n * d)
    heads = one * h
    assert heads["qk_multiply"] == 300
    assert heads["qk_multiply"].formula == "n^2 d h"
    assert (heads.parameters, heads.bytes_moved) == (48, 120)
    assert sum([one, one, one], Ledger()).counts == heads.counts
    assert sum([one, one]) == one * 2


def test_a_count_is_an_integer() -> None:
    (n,) = symbols(n=7)
    pairs = n * (n + 1) // 2
    assert (pairs, pairs.formula) == (28, "n^2 / 2 + n / 2")
    assert n // 2 == 3
    assert not isinstance(n // 2, Count)
    assert (1 - n, (1 - n).formula) == (-6, "-n + 1")
    assert n * 0.5 == 3.5
    assert n + 0.5 == 7.5
    assert json.dumps({"n": n}) == '{"n": 7}'
    assert (n - n).formula == "0"
    assert range(10)[n] == 7
    for again in (copy.deepcopy(pairs), pickle.loads(pickle.dumps(pairs))):
        assert (again, again.formula) == (28, pairs.formula)


def test_what_is_not_counted_is_refused() -> None:
    with pytest.raises(ArgumentError, match="'multiplies' is not a kind of operation"):
        step("qk", multiplies=3)
    with pytest.raises(ArgumentError, match="'qk_exp' is not counted here"):
        ledger(3, 3, 3, 3)["qk_exp"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("left", [None, 0, 1, 3, 40])
def test_pairs_are_those_of_a_loop(causal: bool, left: int | None) -> None:
    for q_len, kv_len in [(1, 1), (1, 9), (7, 7), (4, 9), (12, 12)]:
        if not causal and q_len != kv_len:
            continue
        allowed = 0
        for i in range(kv_len - q_len, kv_len):
            for j in range(kv_len):
                near = left is None or (i - j <= left and (causal or j - i <= left))
                allowed += near and (j <= i or not causal)
        assert attended_pairs(q_len, kv_len, causal=causal, left=left) == allowed


@pytest.mark.parametrize(("causal", "left"), [(True, None), (True, 1), (False, 1)])
def test_pairs_of_more_queries_than_keys_are_refused(causal: bool, left: int | None) -> None:
    with pytest.raises(ArgumentError, match="q_len=5 > kv_len=3"):
        attended_pairs(5, 3, causal=causal, left=left)
    assert attended_pairs(5, 3) == 15
