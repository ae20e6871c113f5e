"""Each token of a text as a person can read it: with its spaces, parts of characters as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["token_texts"]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token stands for.

    Decoding one token alone loses the space before it in some tokenizers, and gives "\\ufffd" where
    a character takes several tokens. Such a token is shown as its bytes, `<0xE2 0x80>`.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    ids : sequence of int
    """
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    special = set(getattr(tokenizer, "all_special_ids", ()))
    decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
    of_bytes = "ByteLevel" in decoder
    texts = []
    for index, piece in zip(ids, pieces, strict=True):
        if index in special or piece is None:
            texts.append(str(piece))
        elif of_bytes:
            texts.append(_from_bytes(piece))
        elif piece.startswith("\u2581"):
            texts.append(piece.replace("\u2581", " "))
        else:
            texts.append(_decoded(tokenizer, index, piece))
    return texts


def _decoded(tokenizer: Any, index: int, piece: str) -> str:
    """The decoded token, or the piece where a part of a character cannot be decoded."""
    text = str(tokenizer.decode([index]))
    return piece if "\ufffd" in text or not text else text


def _from_bytes(piece: str) -> str:
    """A piece of a byte-level tokenizer, in which every character stands for a byte."""
    table = _bytes_of_characters()
    if not all(character in table for character in piece):
        return piece
    raw = bytes(table[character] for character in piece)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "<" + " ".join(f"0x{byte:02X}" for byte in raw) + ">"


@cache
def _bytes_of_characters() -> dict[str, int]:
    """The table of GPT-2: printable characters stand for themselves, other bytes for 256 and on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    table = {chr(byte): byte for byte in kept}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
