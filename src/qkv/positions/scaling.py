"""The frequencies of rotary embeddings, and how they are scaled for contexts longer than trained.

Each function gives radians per position of each pair, `(rotary_dim / 2,)`, in float64; YaRN and
LongRoPE give an attention factor as well. The constructors of `qkv.RoPE` say what parameters mean.
"""

from __future__ import annotations

from math import ceil, floor, inf, log, nan, pi, sqrt
from sys import float_info
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv.arguments.declarations import checked, is_integer, shown
from qkv.arguments.readable_checks import as_array
from qkv.errors import ArgumentError, DTypeError

Array = NDArray[np.float64]

__all__ = [
    "checked_rotary_dim",
    "dynamic_ntk",
    "inverse_frequencies",
    "linear",
    "llama3",
    "longrope",
    "ntk_aware",
    "positive",
    "proportional",
    "yarn",
]


def positive(name: str, value: Any) -> float:
    """A positive finite number, or an error that names it."""
    try:
        # Numbers of types that others gave to NumPy, as bfloat16, are of none of its classes.
        is_number = isinstance(value, int | float | np.generic) and not isinstance(
            value, bool | np.bool_ | np.character | np.complexfloating
        )
        number = float(value) if is_number else nan
    except (TypeError, ValueError, OverflowError):
        number = nan
    if not 0 < number <= float_info.max:
        is_array = getattr(value, "shape", None) == () and not isinstance(value, np.generic)
        given = f"RoPE {name}={shown(value)}"
        raise ArgumentError(
            f"{given} is an array, not a number."
            if is_array
            else f"{given} is not a positive number.",
            action=f"Pass float({name})."
            if is_array
            else f"Pass {name} as the model's configuration has it.",
        )
    return number


_MOST_ENTRIES = 2**24
"""The most entries of a row that are rotated."""


def checked_rotary_dim(rotary_dim: Any, name: str = "rotary_dim") -> int:
    """The number of entries to rotate, which come in pairs."""
    is_whole = is_integer(rotary_dim)
    if not is_whole or rotary_dim % 2 or not 0 <= rotary_dim <= _MOST_ENTRIES:
        action = f"Pass an even {name}."
        if name == "head_dim" and is_whole and 1 < rotary_dim <= _MOST_ENTRIES:
            action = f"Pass qkv.RoPE(rotary_dim={rotary_dim - 1}), or rows with an even head_dim."
        given = shown(rotary_dim)
        raise ArgumentError(
            f"RoPE rotates pairs; {name}={given} entries are not a whole number of pairs.",
            action=action,
        )
    return int(rotary_dim)


def inverse_frequencies(rotary_dim: int, base: float, name: str = "rotary_dim") -> Array:
    """`base ** (-2 i / rotary_dim)`."""
    pairs = checked_rotary_dim(rotary_dim, name) // 2
    steps = np.arange(pairs, dtype=np.float64)
    return np.asarray(positive("base", base) ** (-steps / max(pairs, 1)))


def given_frequencies(inv_freq: ArrayLike) -> Array:
    """Frequencies that a caller gives."""
    given = as_array("inv_freq", inv_freq)
    if given.dtype.kind in "OSUTcmM" or given.dtype.names:
        raise DTypeError(
            f"inv_freq has dtype {given.dtype}, not that of real numbers.",
            action="Pass one frequency for each pair: (rotary_dim / 2,).",
        )
    frequencies = given.astype(np.float64)
    if not np.isfinite(frequencies).all():
        raise ArgumentError(
            f"inv_freq holds numbers that are not finite: {str(given)[:60]}.",
            action="Pass radians per position, as in base ** (-2 * n / rotary_dim).",
        )
    return frequencies


@checked
def linear(rotary_dim: int, factor: float, base: float) -> Array:
    """Positions divided by `factor`."""
    return inverse_frequencies(rotary_dim, base) / positive("factor", factor)


@checked
def ntk_aware(rotary_dim: int, factor: float, base: float) -> Array:
    """`base * factor ** (d / (d - 2))` for a base: the slowest pair is divided by `factor`."""
    dim = checked_rotary_dim(rotary_dim)
    if dim < 4:
        raise ArgumentError(
            f"NTK scaling spreads over 2 or more pairs; rotary_dim={dim}.",
            action="Pass rotary_dim of 4 or more, or use RoPE.linear.",
        )
    base, factor = positive("base", base), positive("factor", factor)
    try:
        grown = base * factor ** (dim / (dim - 2))
    except OverflowError:
        grown = inf
    if grown == inf:
        raise ArgumentError(
            f"NTK scaling by factor={factor:g} makes a base beyond the range of float64.",
            action="Pass a smaller factor.",
        )
    return inverse_frequencies(dim, grown)


@checked
def dynamic_ntk(
    rotary_dim: int, factor: float, max_position_embeddings: int, seq_len: int, base: float
) -> Array:
    """`ntk_aware` whose factor grows with the length, from 1 at `max_position_embeddings`."""
    trained = positive("max_position_embeddings", max_position_embeddings)
    length = max(positive("seq_len", seq_len), trained)
    factor = positive("factor", factor)
    return ntk_aware(rotary_dim, factor * length / trained - (factor - 1), base)


@checked
def yarn(
    rotary_dim: int,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float,
    beta_slow: float,
    attention_factor: float | None,
    mscale: float | None,
    mscale_all_dim: float | None,
    truncate: bool,
    base: float,
) -> tuple[Array, float]:
    """Fast pairs as they are, slow ones divided by `factor`, a ramp between; attention factor."""
    dim, factor = checked_rotary_dim(rotary_dim), positive("factor", factor)
    trained = positive("original_max_position_embeddings", original_max_position_embeddings)
    plain = inverse_frequencies(dim, base)
    if base <= 1:
        raise ArgumentError(f"YaRN needs a base above 1, not {base!r}.", action="Pass rope_theta.")

    def pair_that_turns(times: float) -> float:
        """The pair, not a whole number, that turns so many times within the trained length."""
        return (dim * log(trained / (times * 2 * pi))) / (2 * log(base))

    low = pair_that_turns(positive("beta_fast", beta_fast))
    high = pair_that_turns(positive("beta_slow", beta_slow))
    if truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # as in the published code
    ramp = np.clip((np.arange(dim // 2) - low) / width, 0, 1)

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0

    if attention_factor is None:
        attention_factor = grown(1.0)
        if mscale and mscale_all_dim:
            attention_factor = grown(mscale) / grown(mscale_all_dim)
    return np.asarray(plain / factor * ramp + plain * (1 - ramp)), attention_factor


@checked
def llama3(
    rotary_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
    base: float,
) -> Array:
    """Pairs of short wavelength as they are, of long ones divided by `factor`, smooth between."""
    low = positive("low_freq_factor", low_freq_factor)
    high = positive("high_freq_factor", high_freq_factor)
    if high <= low:
        raise ArgumentError(
            f"high_freq_factor={high:g} is not above low_freq_factor={low:g}.",
            action="Pass both as in the model's rope_scaling (4.0 and 1.0 in Llama 3.1).",
        )
    plain = inverse_frequencies(rotary_dim, base)
    trained = positive("original_max_position_embeddings", original_max_position_embeddings)
    turns = trained * plain / (2 * pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray((1 - smooth) * plain / positive("factor", factor) + smooth * plain)


@checked
def longrope(
    rotary_dim: int,
    short_factor: ArrayLike,
    long_factor: ArrayLike,
    original_max_position_embeddings: int,
    seq_len: int,
    factor: float,
    attention_factor: float | None,
    base: float,
) -> tuple[Array, float]:
    """Each pair divided by a factor of its own, of one set or the other; attention factor."""
    plain = inverse_frequencies(rotary_dim, base)
    trained = positive("original_max_position_embeddings", original_max_position_embeddings)
    sets = {}
    for name, given in (("short_factor", short_factor), ("long_factor", long_factor)):
        try:
            sets[name] = np.asarray(as_array(name, given), np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(
                f"{name} is not an array of numbers.", action="Pass one."
            ) from error
        if sets[name].shape != plain.shape or not (sets[name] > 0).all():
            raise ArgumentError(
                f"{name} has shape {sets[name].shape}; rotary_dim={rotary_dim} has {len(plain)} "
                "pairs.",
                action="Pass one positive factor for each pair: (rotary_dim / 2,).",
            )
    chosen = sets["long_factor" if positive("seq_len", seq_len) > trained else "short_factor"]
    if attention_factor is None:
        beyond = positive("factor", factor) > 1
        attention_factor = sqrt(1 + log(factor) / log(trained)) if beyond else 1.0
    return np.asarray(plain / chosen), attention_factor


def proportional(head_dim: int, proportion: float, factor: float, base: float) -> Array:
    """The first `proportion` of the pairs, by the frequencies of the whole; others stand still."""
    plain = inverse_frequencies(head_dim, base)
    moving = int(proportion * head_dim // 2)
    return np.where(np.arange(len(plain)) < moving, plain, 0.0) / positive("factor", factor)
