"""A folder with what is kept of the texts of a corpus: one file for each chunk that is done.

`corpus.json` says what the files are of. A chunk is written whole under another name and then
moved, so that a process that is killed leaves nothing half-written under a chunk's name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qkv.errors import FileError
from qkv.files.writing import replace_file
from qkv.inspection.heads.score_rows import SCORES
from qkv.inspection.models.corpus import LayerSums

__all__ = ["Chunk", "CorpusFolder"]

SCHEMA, VERSION = "qkv-corpus", 1


class Chunk(NamedTuple):
    """Some neighbouring texts.

    Attributes
    ----------
    texts : sequence of tuple of LayerSums
    digests : sequence of str
        Of the inputs that the model was called with.
    """

    texts: Sequence[tuple[LayerSums, ...]]
    digests: Sequence[str]


@dataclass(frozen=True, slots=True)
class CorpusFolder:
    """The files of one corpus.

    Attributes
    ----------
    path : Path
    texts : int
        How many texts the corpus has.
    size : int
        Texts of a chunk.
    """

    path: Path
    texts: int
    size: int

    @property
    def chunks(self) -> range:
        """Numbers of all chunks."""
        return range(-(-self.texts // self.size))

    def members(self, chunk: int) -> range:
        """The texts of a chunk."""
        return range(chunk * self.size, min((chunk + 1) * self.size, self.texts))

    def is_done(self, chunk: int) -> bool:
        """Whether its file is there."""
        return self._file(chunk).exists()

    def is_begun(self) -> bool:
        """Whether the folder says what it is of."""
        return (self.path / "corpus.json").exists()

    def begin(self, described: Mapping[str, Any]) -> None:
        """Say what the folder is of, or compare it with what it says.

        Raises
        ------
        FileError
            If it is of something else, or cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"{str(self.path)!r} cannot be made: {error.strerror or error}.",
                action="Name a folder that can be written to.",
            ) from error
        said = {"schema": SCHEMA, "version": VERSION, "texts": self.texts, "chunk": self.size}
        said |= described
        head = self.path / "corpus.json"
        if not head.exists():
            replace_file(head, (json.dumps(said, indent=2) + "\n").encode())
            return
        stored = _read_json(head)
        for name, value in said.items():
            if stored.get(name) != value:
                raise FileError(
                    f"{str(self.path)!r} holds another corpus: {name} differs.",
                    [("folder", str(stored.get(name))[:200]), ("this run", str(value)[:200])],
                    "Name another folder, or delete this one.",
                )

    def write(self, chunk: int, done: Chunk) -> None:
        """Keep a chunk.

        Raises
        ------
        FileError
            If it cannot be written.
        """
        from safetensors.numpy import save

        first = done.texts[0]
        for n, text in enumerate(done.texts):
            if [layer.name for layer in text] != [layer.name for layer in first]:
                raise FileError(
                    f"text {self.members(chunk)[n]} ran other layers than text "
                    f"{self.members(chunk)[0]}, so that one file cannot hold both.",
                    action="Call the model in the same way for every text.",
                )
        arrays = {}
        for index in range(len(first)):
            for part in ("sums", "counts"):
                stacked = np.stack([getattr(text[index], part) for text in done.texts])
                arrays[f"layers.{index}.{part}"] = stacked
        header = {"layers": [layer.name for layer in first], "digests": list(done.digests)}
        replace_file(self._file(chunk), save(arrays, {"qkv": json.dumps(header)}))

    def read(self, chunk: int) -> Chunk:
        """A chunk that is done.

        Raises
        ------
        FileError
            If its file is broken.
        """
        from safetensors import SafetensorError, safe_open

        file = self._file(chunk)
        try:
            with safe_open(file, "numpy") as opened:
                header = json.loads(opened.metadata()["qkv"])
                names, digests = header["layers"], header["digests"]
                sides = [
                    [opened.get_tensor(f"layers.{n}.{part}") for n in range(len(names))]
                    for part in ("sums", "counts")
                ]
            number = len(self.members(chunk))
            _require_fit(number, digests, *sides)
            texts = [
                tuple(LayerSums(name, s[n], c[n]) for name, s, c in zip(names, *sides, strict=True))
                for n in range(number)
            ]
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            raise FileError(
                f"{str(file)!r} is not a chunk of a corpus ({str(error)[:200]}).",
                action="Delete it; its texts are then computed anew.",
            ) from error
        return Chunk(texts, digests)

    def all_texts(self) -> Iterator[tuple[LayerSums, ...]]:
        """The sums of all texts, chunk by chunk in order."""
        for chunk in self.chunks:
            yield from self.read(chunk).texts

    def _file(self, chunk: int) -> Path:
        texts = self.members(chunk)
        return self.path / f"texts-{texts[0]:08}-{texts[-1]:08}.safetensors"

    # --- ranks that failed ----------------------------------------------------------------------

    def forget_failures(self) -> None:
        """Delete what ranks of an earlier run said."""
        for file in self.path.glob("failed-*.json"):
            file.unlink(missing_ok=True)

    def note_failure(self, rank: int, error: BaseException) -> None:
        """Tell the others that a rank will do no more."""
        said = {"rank": rank, "error": f"{type(error).__name__}: {error}"[:400]}
        replace_file(self.path / f"failed-{rank}.json", json.dumps(said).encode())

    def failures(self) -> dict[int, str]:
        """The errors of ranks, by rank."""
        failed = [_read_json(file) for file in sorted(self.path.glob("failed-*.json"))]
        return {int(of["rank"]): str(of["error"]) for of in failed}


def _require_fit(number: int, digests: Any, sums: list[Any], counts: list[Any]) -> None:
    """Refuse arrays and digests that are not those of so many texts."""
    if not isinstance(digests, list) or len(digests) != number:
        raise ValueError(f"it has no list of {number} digests")
    for index, (of, count) in enumerate(zip(sums, counts, strict=True)):
        if of.shape[:-1] != (number, len(SCORES)) or count.shape != (number, len(SCORES)):
            raise ValueError(f"layer {index} has sums {of.shape} and counts {count.shape}")


def _read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(
            f"{os.fspath(path)!r} cannot be read ({str(error)[:200]}).",
            action="Delete it, or name another folder.",
        ) from error
    if not isinstance(content, dict):
        raise FileError(f"{os.fspath(path)!r} holds no object.", action="Name another folder.")
    return content
