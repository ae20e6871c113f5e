"""Integers that remember the polynomial in symbols from which they were computed."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from operator import index
from typing import Annotated, Any, TypeAlias

from qkv.arguments.declarations import checked, checked_integer, shown
from qkv.errors import ArgumentError

__all__ = ["Amount", "Count", "symbols"]


def _amount(name: str, given: Any) -> int:
    number = checked_integer(name, given)
    if number < 0:
        raise ArgumentError(f"{name}={shown(number)} is below 0.", action="Pass 0 or more.")
    return number


Amount: TypeAlias = Annotated[int, _amount]
"""A whole number of 0 or more, such as one of operations, of up to 2**256."""

_Powers = tuple[tuple[str, int], ...]
"""The symbols of one term with their exponents, sorted by symbol."""


class Count(int):
    """An integer that remembers the polynomial in symbols it was computed from.

    `+`, `-` and `*` with integers and other counts keep the polynomial, and so does an exact
    `//`. Everywhere else it is an ordinary integer.

    Parameters
    ----------
    value : int
        The number.
    symbol : str
        Its name; without one, the number stands for itself.

    Attributes
    ----------
    formula : str
        The polynomial, as in `4 n^2 d - n^2`.

    Raises
    ------
    ArgumentError
        The value is not an integer, or the symbol no string.

    Notes
    -----
    What is not a polynomial gets a symbol of its own, as `Count(isqrt(n), "sqrt(n)")`.

    Examples
    --------
    >>> from qkv.count import symbols
    >>> n, d = symbols(n=5, d=4)
    >>> scores = n * n * (2 * d - 1)
    >>> int(scores), scores.formula
    (175, '2 n^2 d - n^2')
    """

    _terms: dict[_Powers, Fraction]

    def __new__(cls, value: int, symbol: str = "") -> Count:
        try:
            value = index(value)
        except TypeError:
            symbol = None  # type: ignore[assignment]  # refused below, with the same message
        if not isinstance(symbol, str):
            raise ArgumentError(
                f"Count({shown(value)}, {shown(symbol)}) is not an integer and its name.",
                action='Pass them as in Count(5, "n").',
            )
        if symbol:
            return cls._of(int(value), {((symbol, 1),): Fraction(1)})
        return cls._of(int(value), {(): Fraction(int(value))})

    @classmethod
    def _of(cls, value: int, terms: Mapping[_Powers, Fraction]) -> Count:
        made = super().__new__(cls, value)
        made._terms = {powers: factor for powers, factor in terms.items() if factor}
        return made

    def __getnewargs__(self) -> tuple[int]:
        return (int(self),)

    @property
    def formula(self) -> str:
        """The polynomial in symbols, highest degree first."""
        text = ""
        for powers, factor in sorted(self._terms.items(), key=_order):
            sign = "-" if factor < 0 else "+"
            text += f" {sign} {_term(powers, abs(factor))}" if text else ""
            text = text or ("-" if factor < 0 else "") + _term(powers, abs(factor))
        return text or "0"

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return int(self) + other
        terms = dict(self._terms)
        for powers, factor in _terms_of(other).items():
            terms[powers] = terms.get(powers, Fraction(0)) + factor
        return Count._of(int(self) + int(other), terms)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return int(self) * other if isinstance(other, float) else NotImplemented
        terms: dict[_Powers, Fraction] = {}
        for a, x in self._terms.items():
            for b, y in _terms_of(other).items():
                powers = dict(a)
                for symbol, exponent in b:
                    powers[symbol] = powers.get(symbol, 0) + exponent
                key = tuple(sorted(powers.items()))
                terms[key] = terms.get(key, Fraction(0)) + x * y
        return Count._of(int(self) * int(other), terms)

    __rmul__ = __mul__

    def __neg__(self) -> Count:
        return Count._of(-int(self), {powers: -factor for powers, factor in self._terms.items()})

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __floordiv__(self, other: Any) -> Any:
        quotient = int(self) // other
        if not isinstance(other, int) or quotient * other != self:
            return quotient
        terms = {powers: factor / int(other) for powers, factor in self._terms.items()}
        return Count._of(int(quotient), terms)


def _terms_of(number: int) -> dict[_Powers, Fraction]:
    return number._terms if isinstance(number, Count) else {(): Fraction(int(number))}


def _order(term: tuple[_Powers, Fraction]) -> tuple[int, int, int, _Powers]:
    powers = dict(term[0])
    return -sum(powers.values()), -powers.get("n", 0), -powers.get("m", 0), term[0]


def _term(powers: _Powers, factor: Fraction) -> str:
    # Sequence lengths come first, as papers write them: n^2 d, not d n^2.
    named = sorted(powers, key=lambda power: ("nm".find(power[0]) % 3, power[0]))
    parts = [symbol if exponent == 1 else f"{symbol}^{exponent}" for symbol, exponent in named]
    if factor.numerator != 1 or not parts:
        parts.insert(0, str(factor.numerator))
    divisor = f" / {factor.denominator}" if factor.denominator != 1 else ""
    return " ".join(parts) + divisor


@checked
def symbols(**sizes: int) -> tuple[Count, ...]:
    """One named count for each keyword, in their order.

    Parameters
    ----------
    **sizes : int
        What each symbol stands for.

    Examples
    --------
    >>> n, w = symbols(n=1000, w=128)
    >>> (n * w).formula
    'n w'
    """
    return tuple(Count(value, name) for name, value in sizes.items())
