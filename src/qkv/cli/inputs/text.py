"""The text that a model is to read: words of the command line, a file, standard input."""

from __future__ import annotations

import argparse
import codecs
import os
import shlex
import stat
import sys
from pathlib import Path

from qkv.errors import ArgumentError, FileError
from qkv.files.contents import shown
from qkv.inspection.rendering.tokens import printable
from qkv.samples.shipped_models import LANGUAGE

__all__ = ["given_text", "sentence_is_text"]

_ARRAYS = (".safetensors", ".npz", ".npy")
_MAX_BYTES = 1 << 26
_PEEKED = 1 << 12
_LONGEST = 80
"""The most characters of a text that an error repeats."""


def sentence_is_text(options: argparse.Namespace) -> None:
    """A sentence in the place of FILE is what the model reads, `language` if none is named.

    So is "-", which means standard input, and, where a model is named, a word that does not name a
    file.

    Raises
    ------
    FileError
        A word names no file, or it names a text; the message has the `--text` to pass.
    ArgumentError
        There is nothing in the place of FILE, or two texts are given.
    """
    said = options.file
    if said is not None and _is_text(said, options.model):
        if options.text is not None:
            raise ArgumentError(
                f"{shown(said)} and --text are two texts.", action="Leave one of them out."
            )
        options.file, options.text = None, said
    if options.file is None and options.text is not None:
        options.model = options.model or LANGUAGE


def _is_text(said: str, model: str | None) -> bool:
    """Whether what stands in the place of FILE is a text itself."""
    if said == "-":
        return True
    if not said.strip():
        raise ArgumentError("the text is empty.", action="Write a sentence, or name a file.")
    as_text = f"Pass --text {shlex.quote(printable(said, _LONGEST))} for a model to read it."
    if os.path.exists(said):
        if _holds_text(said):
            raise FileError(
                f"{shown(said)} is a text, not a file of arrays.",
                action=as_text,
            )
        return False
    if any(map(str.isspace, said.strip())):
        return not said.endswith(_ARRAYS)
    if _names_a_file(said):
        return False
    if model is None:
        raise FileError(f"there is no file {shown(said)}.", action=as_text)
    return True


def _holds_text(path: str) -> bool:
    """Whether a file begins with printable text, as no file of arrays does."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            # A character may be cut at the end.
            begin = codecs.getincrementaldecoder("utf-8")().decode(file.read(_PEEKED))
    except (OSError, ValueError):
        return False
    return bool(begin.strip()) and all(c.isprintable() or c.isspace() for c in begin)


def given_text(options: argparse.Namespace) -> str | None:
    """The text of `--text`, if there is one; read once, since standard input can be read once."""
    if "whole_text" not in options:
        options.whole_text = None if options.text is None else _whole_text(options.text)
    text: str | None = options.whole_text
    return text


def _whole_text(said: str) -> str:
    """Standard input for "-", a file if it is one, else what was said."""
    if said == "-":
        return _piped_text()
    if not said.strip():
        raise ArgumentError("the text is empty.", action="Write a sentence.")
    if not _names_a_file(said) and not os.path.exists(said):
        return said
    return _read_text(said)


def _piped_text() -> str:
    """Standard input, whole."""
    if sys.stdin is None:
        raise ArgumentError("standard input is closed.", action="Pipe a text into it.")
    try:
        text = sys.stdin.read(_MAX_BYTES + 1)
        # Where the locale has no encoding, bytes that are no text come as surrogates.
        size = len(text.encode("utf-8"))
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        at = f"byte {error.start}" if isinstance(error, UnicodeDecodeError) else "one of its bytes"
        raise ArgumentError(
            f"standard input is not {error.encoding} text: {at} is invalid.",
            action="Convert it, as with iconv.",
        ) from error
    if size > _MAX_BYTES:
        raise ArgumentError(
            f"standard input has more than {_MAX_BYTES} bytes; no more are read.",
            action="Cut the text.",
        )
    if not text.strip():
        raise ArgumentError("standard input held no text.", action="Pipe a text into it.")
    return text


def _names_a_file(said: str) -> bool:
    """Whether a word has an ending or a folder: it was meant as a file, also if there is none."""
    return not any(map(str.isspace, said)) and (os.sep in said or "." in said[:-1])


def _read_text(path: str) -> str:
    """A text file, whole."""
    name = shown(path)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"{name} is not a regular file.", action="Pass a file of text.")
        if status.st_size > _MAX_BYTES:
            raise FileError(
                f"{name} has {status.st_size} bytes; at most {_MAX_BYTES} are read.",
                action="Cut the text.",
            )
        text = Path(path).read_text(encoding="utf-8")
    except FileError:
        raise
    except UnicodeDecodeError as error:
        raise FileError(
            f"{name} is not UTF-8 text: byte {error.start} is invalid.",
            action="Convert it to UTF-8.",
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(
            f"{name} cannot be read: {reason}.", action="Check the path of --text."
        ) from error
    if not text.strip():
        raise FileError(f"{name} holds no text.", action="Write a sentence into it.")
    return text
