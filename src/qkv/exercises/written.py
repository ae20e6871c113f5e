"""An answer as a person writes it: numbers, rows of them, sums to be worked out, yes and no.

The page of the lab reads the same, in `lab/src/exercises/written.js`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

__all__ = ["UnreadableError", "readings"]

_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt, "log": math.log, "ln": math.log, "exp": math.exp, "log2": math.log2,
    "log10": math.log10,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}
_PIECES = re.compile(
    r"( *)([0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?|\.[0-9]+(?:e[-+]?[0-9]+)?|log(?:2|10)(?=\()"
    r"|[a-z]+(?:_[a-z]+)*|\*\*|[-+*/^%()\[\],;\n])"
)
_SIGNS = (
    ("[−–‐‑‒﹣－]", "-"), ("[×·⋅∙∗]", "*"), ("[÷∕⁄]", "/"), ("√", "sqrt "), ("π", "pi"),
    ("[σς]", " sigma"), ("[≈~]", "="), ("、", ","), (r"[^\S\n]", " "), (r"per ?cent\b", "%"),
    (r"(?<=[0-9.)%]) *x *(?=[0-9.(])", "*"),
)  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_WIDE = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}
"""Digits and signs as keyboards for Chinese and Japanese write them."""
_PRINTED = (
    r"\b(?:np|numpy|math|torch|jnp)\.|\b(?:array|asarray|matrix|tensor|b?float[0-9]*|int[0-9]*)"
    r"(?= *\()|, *(?:dtype|device|requires_grad|grad_fn) *=[^,)]*|(?<=e)_\b"
)
"""What libraries print around numbers and truth values, such as np.float64(0.5) and np.True_."""
_WITH_THOUSANDS = (
    r"[-+]?[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?:'[0-9]{3})+|(?: [0-9]{3})+)(?:\.[0-9]+)?"
    r"|[-+]?[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}"
)
_THOUSANDS_COMMAS = r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])"
_DECIMAL_COMMA = r"([0-9]),(?=[0-9])"
_WORDS = (
    r"yes|no|y|n|true|false|t|f|not|symmetric|scores?|weights?|is|are|the|matrix|and|but|they|it|of"
)
_YES = ("yes", "y", "true", "t", "symmetric")
_NO = ("no", "n", "not", "false", "f")
_DEEPEST = 40
"""Brackets, functions and signs inside of one another."""


class UnreadableError(Exception):
    """A text cannot be read as an answer; the message says why."""


def readings(text: str, letters: Mapping[str, float] = {}, before: Sequence[str] = ()) -> list[Any]:
    """What a text may mean, the likeliest first: numbers, truth values, or lists of them.

    A comma may stand between numbers, before thousands, or before decimals.

    Parameters
    ----------
    text : str
    letters : mapping of str to float
        What the letters of the question stand for, such as n in "4 n^2".
    before : sequence of str
        Words or signs that may stand before the number, such as "divide by".

    Raises
    ------
    UnreadableError
        There is no meaning.

    Examples
    --------
    >>> readings("c = 2log(2) + np.exp(0)"), readings("1 0.5; 1 0.75"), readings("y, n")
    ([2.386294361119891], [[[1.0, 0.5], [1.0, 0.75]]], [[True, False]])
    >>> readings("4 n² × 2", {"n": 10.0}), readings("÷ 32", before=["/"])
    ([800.0], [32.0])
    >>> readings("1,234")
    [1234.0, [1.0, 234.0], 1.234]
    """
    written = re.sub(
        "[⁰¹²³⁴-⁹⁺⁻]+", lambda match: f"^({match[0].translate(_RAISED)})", text.lower()
    ).translate(_WIDE)
    for sign, plain in _SIGNS:
        written = re.sub(sign, plain, written)
    written = written.strip()
    if not written:
        raise UnreadableError("nothing is written.")
    written = written[max((len(word) for word in before if written.startswith(word)), default=0) :]
    written = re.sub(_PRINTED, "", written)
    # Where letters have values, n is one of them and not a short no.
    said = None if letters else _truths(written)
    if said is not None:
        return [said]
    plain = re.sub("([0-9])_(?=[0-9])", r"\1", written)
    plain = "".join(map(_unnamed, re.split("([\n;,])", plain))).strip()
    found: list[Any] = []
    if re.fullmatch(_WITH_THOUSANDS, plain):
        apart = r"\." if re.match(r"[-+]?[0-9]+(?:\.[0-9]{3}){2}", plain) else "[,' ]"
        found.append(float(re.sub(apart, "", plain)))
    may_be = [plain]
    if not re.search(r"[0-9]\.[0-9]", plain):
        may_be.append(re.sub(_DECIMAL_COMMA, r"\1.", plain))
    if not found:
        may_be.append(re.sub(_THOUSANDS_COMMAS, lambda match: match[0].replace(",", ""), plain))
    reason = None
    for each in dict.fromkeys(may_be):
        try:
            found.append(_Reader(each, letters).value())
        except UnreadableError as error:
            reason = reason or error
    if not found:
        assert reason is not None  # one of the texts was read, or it says why not
        raise reason
    return found


def _unnamed(part: str) -> str:
    """A part without what it is called, as in "c = 11.39" or "row 1: 0.5 0.5"."""
    return part[1 + max(part.rfind("="), part.rfind(":")) :]


def _truths(text: str) -> list[bool | None] | None:
    """The truth values of words such as "yes no", or "weights: no, scores: yes"."""
    plain = re.sub("n['’]t\\b", " not", text)
    words = re.findall("[a-z]+", plain)
    if not words or re.search("[0-9]", plain):
        return None
    if not all(re.fullmatch(_WORDS, word) for word in words):
        return None
    parts = re.split(r"[,;\n.]|\band\b|\bbut\b", plain)
    clauses = [clause for part in parts if (clause := re.findall("[a-z]+", part))]
    said = [_truth(clause) for clause in clauses]
    labels = [
        next((word[0] for word in clause if re.match("score|weight", word)), "")
        for clause in clauses
    ]
    if sorted(labels) == ["s", "w"]:
        return said if labels[0] == "s" else said[::-1]
    if len(clauses) > 1:
        return said
    return [word in _YES for word in words if word in (*_YES[:-1], *_NO)]


def _truth(clause: list[str]) -> bool | None:
    if any(word in _NO for word in clause):
        return False
    return True if any(word in _YES for word in clause) else None


def _unclear() -> UnreadableError:
    return UnreadableError(
        "this could not be read as a number or a list of numbers; write it like 2 * 3^2, or like "
        "0.5, 0.25."
    )


class _Reader:
    """The value of a sum such as 2 * log(297), or of rows of them."""

    def __init__(self, text: str, letters: Mapping[str, float]) -> None:
        self.letters = letters
        self.pieces: list[str] = []
        self.apart: list[bool] = []
        end = 0
        for match in _PIECES.finditer(text):
            if match.start() != end:
                raise _unclear()
            end = match.end()
            some = self.letters_of(match[2])
            self.apart += [bool(match[1]), *[False] * (len(some) - 1)]
            self.pieces += some
        if not self.pieces or end != len(text):
            raise _unclear()
        self.at = self.depth = self.percents = 0
        self.kinds: set[bool] = set()
        """Whether there are numbers of a list with %, and such without."""

    def letters_of(self, piece: str) -> list[str]:
        """The letters of a product such as nd; other pieces as they are."""
        is_product = piece not in self.letters and all(each in self.letters for each in piece)
        return list(piece) if is_product else [piece]

    def value(self) -> Any:
        found = self.rows("")
        if self.at != len(self.pieces) + 1:
            raise _unclear()
        if len(self.kinds) > 1:
            raise UnreadableError(
                "some of the numbers have % and others have not; write all of them in one way."
            )
        return found if len(found) > 1 else found[0]

    @property
    def here(self) -> str:
        return self.pieces[self.at] if self.at < len(self.pieces) else ""

    def takes(self, *wanted: str) -> bool:
        taken = self.here in wanted
        self.at += taken
        return taken

    def is_signed(self) -> bool:
        """Whether a sign begins a number: "1 -2" are two, "1 - 2" and "1-2" are one."""
        after = self.at + 1
        return self.apart[self.at] and not (after < len(self.apart) and self.apart[after])

    def begins(self) -> bool:
        """Whether another item begins here, without a comma before it."""
        here = self.here
        if _is_number(here):
            return self.apart[self.at]
        if here in ("-", "+"):
            return self.is_signed()
        return here in ("(", "[") or _is_name(here)

    def rows(self, end: str) -> list[Any]:
        """Rows of items up to a bracket or the end: numbers and lists; single ones stand alone."""
        lines: list[list[list[Any]]] = [[[]]]
        while True:
            if self.takes(","):
                continue
            if self.takes(";"):
                lines[-1].append([])
            elif self.takes("\n"):
                if not end:
                    lines.append([[]])
            elif self.here == end:
                break
            else:
                row = lines[-1][-1]
                # Between two items stands something, a blank at least.
                if row and self.pieces[self.at - 1] not in (",", "\n") and not self.begins():
                    raise _unclear()
                row.append(self.item())
        self.at += 1
        full = [some for line in lines if (some := [row for row in line if row])]
        # Of several lines each is a row; of one the parts between semicolons are.
        found = [list(chain(*line)) for line in full] if len(full) > 1 else list(chain(*full))
        if not found:
            raise _unclear()
        if len(found) > 1 and any(len(row) > 1 for row in found):
            return found
        return list(chain(*found))

    def item(self) -> Any:
        percents = self.percents
        found = self.sum()
        if isinstance(found, float):
            self.kinds.add(self.percents > percents)
        return found

    def nested(self, part: Callable[..., Any], *given: str) -> Any:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise _unclear()
        found = part(*given)
        self.depth -= 1
        return found

    def primary(self) -> Any:
        piece = self.here
        self.at += 1
        if piece in ("(", "["):
            kinds = self.kinds.copy()
            found: list[Any] = self.nested(self.rows, ")" if piece == "(" else "]")
            if piece == "[" or len(found) > 1:
                return found
            if isinstance(found[0], float):
                self.kinds = kinds  # a part of a number, and none of a list
            return found[0]
        if piece in _FUNCTIONS:
            return _computed(_FUNCTIONS[piece], self.nested(self.primary))
        if piece in _CONSTANTS:
            return _CONSTANTS[piece]
        if piece in self.letters:
            return float(self.letters[piece])
        if _is_name(piece):
            raise UnreadableError(f'"{piece[:20]}" has no value here; write its number.')
        if not _is_number(piece):
            raise _unclear()
        return _computed(float, float(piece))

    def power(self) -> Any:
        value = self.primary()
        if self.takes("^", "**"):
            value = _computed(math.pow, value, self.nested(self.signed))
        if self.takes("%"):
            self.percents += 1
            value = _computed(lambda x: x / 100, value)
        return value

    def signed(self) -> Any:
        if self.takes("-"):
            return _computed(lambda x: -x, self.nested(self.signed))
        if self.takes("+"):
            return _computed(float, self.nested(self.signed))
        return self.power()

    def product(self) -> Any:
        value = self.signed()
        while True:
            if self.takes("*"):
                value = _computed(lambda x, y: x * y, value, self.signed())
            elif self.takes("/"):
                value = _computed(lambda x, y: x / y, value, self.signed())
            elif isinstance(value, float) and (self.here == "(" or _is_name(self.here)):
                value = _computed(lambda x, y: x * y, value, self.power())
            else:
                return value

    def sum(self) -> Any:
        value = self.product()
        while self.here in ("-", "+") and not self.is_signed():
            if self.takes("+"):
                value = _computed(lambda x, y: x + y, value, self.product())
            else:
                self.at += 1
                value = _computed(lambda x, y: x - y, value, self.product())
        return value


def _is_number(piece: str) -> bool:
    return re.match(r"[0-9.]", piece) is not None


def _is_name(piece: str) -> bool:
    return re.match("[a-z]", piece) is not None


def _computed(function: Callable[..., float], *given: Any) -> float:
    """A finite number of finite numbers."""
    if not all(isinstance(x, float) for x in given):
        raise _unclear()
    try:
        found = function(*given)
    except (ValueError, OverflowError, ZeroDivisionError):
        found = math.nan
    if not math.isfinite(found):
        raise UnreadableError("not everything in this has a value that is a finite number.")
    return found
