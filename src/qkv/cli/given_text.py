"""The text that a model is to read: words of the command line, a file, standard input."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path

from qkv.errors import ArgumentError, FileError
from qkv.files.contents import shown
from qkv.samples.shipped_models import LANGUAGE

__all__ = ["given_text", "sentence_is_text"]

_ARRAYS = (".safetensors", ".npz", ".npy")
_MAX_BYTES = 1 << 26


def sentence_is_text(options: argparse.Namespace) -> None:
    """A sentence in the place of FILE is what the model reads, `language` if none is named."""
    said = options.file
    if said is None or not any(map(str.isspace, said.strip())):
        return
    if said.endswith(_ARRAYS) or os.path.exists(said):
        return
    if options.text is not None:
        raise ArgumentError(
            f"{said!r:.80} and --text are two texts.", action="Leave one of them out."
        )
    options.file, options.text = None, said
    options.model = options.model or LANGUAGE


def given_text(said: str) -> str:
    """The text of `--text`: standard input for "-", a file if it is one, else what was said."""
    if said == "-":
        text = sys.stdin.read(_MAX_BYTES)
        if not text.strip():
            raise ArgumentError("standard input held no text.", action="Pipe a text into it.")
        return text
    # A word with an ending or a folder was meant as a file, also where there is none.
    names_a_file = not any(map(str.isspace, said)) and (os.sep in said or "." in said[:-1])
    if said.strip() and not names_a_file and not os.path.exists(said):
        return said
    return _read_text(said)


def _read_text(path: str) -> str:
    """A text file, whole."""
    name = shown(path)
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise FileError(f"{name} is no regular file.", action="Pass a file of text.")
        if found.st_size > _MAX_BYTES:
            raise FileError(
                f"{name} has {found.st_size} bytes; at most {_MAX_BYTES} are read.",
                action="Cut the text.",
            )
        text = Path(path).read_text(encoding="utf-8")
    except FileError:
        raise
    except UnicodeDecodeError as error:
        raise FileError(
            f"{name} is not UTF-8 text: byte {error.start} is none.", action="Convert it to UTF-8."
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(
            f"{name} cannot be read: {reason}.", action="Check the path of --text."
        ) from error
    if not text.strip():
        raise FileError(f"{name} holds no text.", action="Write a sentence into it.")
    return text
