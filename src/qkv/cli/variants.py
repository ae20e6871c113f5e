"""Command-line options for variants: one table, applied in the order of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import qkv
from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError, FileError, QkvError

__all__ = ["VariantArgument", "add_variants", "command_line_of", "variants_of", "words"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its value, the variant that it makes, and its help.

    `optional` says that the option may stand alone; without `takes` it always does. `uniform`
    says that the variant is the same for every batch row, head and query, so that any part of a
    problem can be computed alone.
    """

    flag: str
    takes: str
    help: str
    make: Callable[[str], Any]
    optional: bool = False
    uniform: bool = True


@dataclass(frozen=True, slots=True)
class VariantArgument:
    """An option of the command line and its variant, which is None for `--or`."""

    option: Option
    text: str
    variant: Any


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def _one_or_more(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _window(text: str) -> Any:
    sides = [None if word in ("", "none") else int(word) for word in text.split(",")]
    left, right = sides
    return qkv.SlidingWindow(left, right)


def _rope(text: str) -> Any:
    names: dict[str, Callable[[str], Any]] = {"base": float, "rotary_dim": int, "layout": str}
    given = text.split(",")
    if len(given) > len(names):
        raise ValueError
    pairs = zip(names.items(), given, strict=False)
    return qkv.RoPE(**{name: read(word) for (name, read), word in pairs if word})


def _random_blocks(text: str) -> Any:
    numbers = _integers(text)
    size, count, seed = (*numbers, 0) if len(numbers) == 2 else numbers
    return qkv.RandomBlocks(size, count, seed)


def _dropout(text: str) -> Any:
    p, seed = text.split(",")
    return qkv.Dropout(float(p), int(seed))


def _t5(text: str) -> Any:
    file, *rest = text.split(",")
    if len(rest) > 2 or (rest and rest[0] not in ("encoder", "decoder")):
        raise ValueError
    distance = int(rest[1]) if len(rest) > 1 else 128
    return qkv.RelativeBias(_array(file), rest[:1] != ["decoder"], distance)


def _block_sparse(text: str) -> Any:
    file, block_q, block_kv = text.rsplit(",", 2)
    return qkv.BlockSparse(_array(file), int(block_q), int(block_kv))


def _array(path: str) -> NDArray[Any]:
    """An array of numbers out of a .npy file; its size is compared with that of the file."""
    try:
        array = np.load(path, allow_pickle=False, mmap_mode="r")
        if isinstance(array, np.ndarray):
            return np.array(array)
        array.close()
        fact = "holds several arrays"
    except OSError as error:
        fact = f"cannot be read: {error.strerror or 'it is not an array'}"
    except (ValueError, EOFError, TypeError, SyntaxError):
        fact = "is not an array of numbers"
    raise FileError(f"{path!r} {fact}.", action="Save one array with numpy.save.")


OPTIONS = (
    Option("--causal", "", "a query sees no later key", lambda _: qkv.Causal(), True),
    Option("--window", "LEFT,RIGHT", "keys before and after the query's own; none: no bound",
           _window),
    Option("--lengths", "N[,N...]", "real keys of all batch rows, or of each",
           lambda text: qkv.KeyLengths(_one_or_more(_integers(text))), uniform=False),
    Option("--segments", "ID,ID...", "the segment of each row; queries see their own",
           lambda text: qkv.Segments(_integers(text)), uniform=False),
    Option("--prefix", "N[,N...]", "keys before position N",
           lambda text: qkv.Prefix(_one_or_more(_integers(text))), uniform=False),
    Option("--global", "P[,P...]", "positions that see all and are seen by all",
           lambda text: qkv.GlobalTokens(_integers(text))),
    Option("--strided", "N", "every N-th key, counted from the query",
           lambda text: qkv.Strided(int(text))),
    Option("--random-blocks", "SIZE,COUNT[,SEED]", "random blocks of keys, as in BigBird",
           _random_blocks, uniform=False),
    Option("--block-sparse", "FILE,BLOCK_Q,BLOCK_KV", "a boolean for each block, from a .npy file",
           _block_sparse, uniform=False),
    Option("--mask", "FILE", "a boolean array from a .npy file, True may attend",
           lambda text: qkv.Mask(_array(text)), uniform=False),
    Option("--bias", "FILE", "a floating array from a .npy file, added to the scores",
           lambda text: qkv.Bias(_array(text)), uniform=False),
    Option("--alibi", "SLOPE[,SLOPE...]", "a bias linear in the distance; slopes of the paper",
           lambda text: qkv.ALiBi(_one_or_more(_numbers(text)) if text else None), True, False),
    Option("--t5", "FILE[,encoder|decoder[,MAX_DISTANCE]]",
           "T5's bias: its table (num_buckets, num_heads) from a .npy file", _t5,
           uniform=False),
    Option("--softcap", "CAP", "scores kept within CAP by tanh",
           lambda text: qkv.Softcap(float(text))),
    Option("--rope", "BASE[,ROTARY_DIM[,LAYOUT]]",
           "rotary positions; LAYOUT is half_split or interleaved", _rope, True),
    Option("--sinks", "S[,S...]", "a logit in the denominator, of all heads or each",
           lambda text: qkv.Sinks(_one_or_more(_numbers(text))), uniform=False),
    Option("--dropout", "P,SEED", "weights dropped with probability P", _dropout,
           uniform=False),
    Option("--or", "", "join the masks before and after it: either may allow", lambda _: None,
           True),
)  # fmt: skip
"""Every variant that can be written in a line; a `ScoreMod` is a function."""

_BY_FLAG = {option.flag: option for option in OPTIONS}


class _VariantAction(argparse.Action):
    """Keep variants in the order in which they were given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        option = _BY_FLAG[str(option_string)]
        argument = VariantArgument(option, values or "", _make_variant(option, values or ""))
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), argument))


def _make_variant(option: Option, text: str) -> Any:
    takes = f"{option.flag} takes {option.takes or 'no value'}: {option.help}."
    try:
        if text and not option.takes:
            raise ValueError
        return option.make(text)
    except QkvError as error:
        raise type(error)(f"{option.flag} {text}: {error.fact}", error.seen, takes) from error
    except (ValueError, OverflowError) as error:
        raise ArgumentError(f"{option.flag} was given {shown(text, 80)}.", action=takes) from error


def add_variants(parser: argparse.ArgumentParser) -> None:
    """Let a command take every option of the table."""
    group = parser.add_argument_group(
        "variants", "Masks intersect; score variants apply in the order given."
    )
    parser.set_defaults(variants=())
    for option in OPTIONS:
        # `words` has joined each option and its value with an equals sign.
        group.add_argument(
            option.flag, dest="variants", action=_VariantAction, metavar=option.takes or None,
            nargs=None if not option.optional else "?" if option.takes else 0,
            help=option.help, default=argparse.SUPPRESS,
        )  # fmt: skip


def words(argv: Sequence[str]) -> list[str]:
    """The command line with each option of the table and its value as one word.

    A value may begin with a minus, which argparse takes for another option; one that may be left
    out begins with a number, so that a file name after the option is not taken for it.
    """
    done: list[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        option = _BY_FLAG.get(word)
        if option is not None and option.takes and waiting:
            following = waiting[0]
            number = following.lstrip("-").removeprefix(".")[:1]
            if number.isdigit() or not (option.optional or following[:1] == "-"):
                word = f"{word}={waiting.pop(0)}"
        if option is not None and option.optional and option.takes and "=" not in word:
            word += "="
        done.append(word)
    return done


def variants_of(given: Sequence[VariantArgument]) -> tuple[Any, ...]:
    """The variants, with the masks on both sides of each `--or` joined."""
    variants: list[Any] = []
    joining = False
    for entry in given:
        if entry.variant is None:
            if joining or not variants or not isinstance(variants[-1], qkv.MaskVariant):
                raise _or_without_masks()
            joining = True
        elif joining:
            if not isinstance(entry.variant, qkv.MaskVariant):
                raise _or_without_masks()
            variants[-1] = variants[-1] | entry.variant
            joining = False
        else:
            variants.append(entry.variant)
    if joining:
        raise _or_without_masks()
    return tuple(variants)


def _or_without_masks() -> ArgumentError:
    return ArgumentError(
        "--or does not stand between two masks.",
        action="Write it as in --window 4,4 --or --global 0.",
    )


def command_line_of(given: Sequence[VariantArgument]) -> list[str]:
    """The command-line words that give these variants."""
    arguments = []
    for entry in given:
        arguments += [entry.option.flag, entry.text] if entry.text else [entry.option.flag]
    return arguments
