"""Every head of a model over many texts, which ranks share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from qkv.arguments.declarations import checked_size, shown
from qkv.distributed.messages.agreement import compare, in_words, tell
from qkv.distributed.messages.links import TIMEOUT, Links, group_of
from qkv.errors import ArgumentError, DistributedError, FileError, QkvError
from qkv.hf.inspection.record import inspect
from qkv.hf.inspection.rotary_lengths import forget_longer_texts
from qkv.hf.inspection.switching import called_with, inner_model, is_in_training
from qkv.hf.inspection.text_inputs import inputs_of_text
from qkv.inspection.heads.unknown_tokens import unknown_id_of
from qkv.inspection.models.corpus import CorpusRecord, LayerSums, sums_of
from qkv.inspection.models.corpus_folder import Chunk, CorpusFolder

__all__ = ["inspect_corpus"]

Progress = Callable[[int, int], None]


def inspect_corpus(
    model: torch.nn.Module,
    texts: Sequence[Any],
    folder: str | os.PathLike[str],
    *,
    tokenizer: Callable[..., Any] | None = None,
    chunk: int = 1,
    mesh: Any = None,
    dim: str | None = None,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
) -> CorpusRecord:
    """Scores of every head of a model over many texts, with confidence intervals.

    The texts are shared out to the ranks of torch.distributed, where there are some. What is done
    is kept in `folder`: after an interruption, the same call with any number of ranks goes on.

    Parameters
    ----------
    model : transformers.PreTrainedModel, or a module with one inside
        On every rank, in evaluation mode.
    texts : sequence
        With a length, and read by index, as data sets are. Each is a mapping of the model's inputs
        to tensors (batch, length), a tensor or list of token ids, or a string.
    folder : path
        All ranks see it. Of one corpus and one model.
    tokenizer : callable, optional
        For strings: called as `tokenizer(text, return_tensors="pt")`. The decoder of a model of
        two sequences reads its start token alone; a mapping of inputs can give it more.
    chunk : int
        Texts of one file; what a killed process has begun is lost.
    mesh : DeviceMesh or ProcessGroup, optional
        All processes unless given, or this one alone if torch.distributed is not initialised.
    dim : str, optional
        Dimension of the mesh along which texts are shared out.
    timeout : float
        Seconds in which some rank must finish a chunk.
    progress : callable (done, total), optional
        Told of each text of this rank that is done.

    Returns
    -------
    CorpusRecord
        Of all texts, on every rank.

    Raises
    ------
    ArgumentError
        The model is in training mode, there is no text, or one is of another kind, or `texts` is
        one string.
    DistributedError
        Ranks were called with different things, one of them failed, or none finished a chunk within
        the timeout; the message names the rank.
    FileError
        The folder cannot be written, or holds another model or other texts.

    Notes
    -----
    Numbers have the same bits for any number of ranks, and after any interruption, since each text
    is computed by itself and texts are merged in their order; "dynamic" rotary frequencies are
    those of each text, where transformers keeps those of the longest text so far. Products of
    matrices of torch may depend on the number of threads: give each rank as many.

    Of what is done before, the inputs of each text are compared with those that were computed, and
    every entry of the model's parameters and stored buffers (about a second for each GB). One
    finished text is computed again, which tells hooks, `qkv.hf.intervene` or another configuration,
    if they change its scores. Memory: that of `qkv.hf.inspect` for one text, and a chunk's sums.

    Examples
    --------
    >>> import tempfile, torch, qkv.hf
    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)).eval()
    >>> texts = [torch.tensor([[1, 2, 3, n]]) for n in range(4)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     qkv.hf.inspect_corpus(model, texts, folder)
    CorpusRecord('GPT2Model', 4 texts, 1 layer, 2 heads)
    """
    if not isinstance(folder, str | os.PathLike) or folder == "":
        raise ArgumentError(
            f"folder={shown(folder)} is not a path.",
            action="Name the folder that keeps the scores.",
        )
    links = Links(None, timeout)
    if mesh is not None or (dist.is_available() and dist.is_initialized()):
        links = Links(group_of(mesh, dim), timeout)
    run = _Run(model, texts, Path(folder), tokenizer, chunk, links, progress)
    run.agree()
    run.share()
    run.wait_for_others()
    return CorpusRecord.of(run.name, run.folder.all_texts)


class _Run:
    """One rank's part of a corpus."""

    def __init__(
        self,
        model: torch.nn.Module,
        texts: Sequence[Any],
        path: Path,
        tokenizer: Callable[..., Any] | None,
        chunk: int,
        links: Links,
        progress: Progress | None,
    ) -> None:
        self.model = model
        self.texts = texts
        self.tokenizer = tokenizer
        self.links = links
        self.progress = progress
        inner = inner_model(model)
        config = getattr(inner, "config", None)
        self.name = getattr(config, "_name_or_path", "") or type(inner).__name__
        self.folder = CorpusFolder(path, _number_of(texts), checked_size("chunk", chunk))
        self.missing: list[int] = []

    def agree(self) -> None:
        """Compare what ranks were called with, and begin the folder."""
        error = self._unfit()
        described = {"model": self.name, "parameters": _digest_of_parameters(self.model)}
        self._tell({"texts": self.folder.texts, "chunk": self.folder.size, **described}, error)
        if self.links.rank == 0:
            try:
                self.folder.begin(described)
                self.folder.forget_failures()
            except QkvError as caught:
                error = caught
        self._tell({}, error)
        # Every rank looks before any of them computes, so that all find the same.
        self.missing = [n for n in self.folder.chunks if not self.folder.is_done(n)]
        error = self._unlike_before()
        if error is None and self.links.rank == 0:
            error = self._computes_otherwise()
        self._tell({"chunks to do": len(self.missing)}, error)

    def share(self) -> None:
        """Compute this rank's chunks, and write each when it is done."""
        links = self.links
        own = self.missing[links.rank :: links.ranks]
        total, done = sum(len(self.folder.members(n)) for n in own), 0
        try:
            for number in own:
                sums: list[tuple[LayerSums, ...]] = []
                digests = []
                for text in self.folder.members(number):
                    inputs = self._inputs(text)
                    digests.append(_digest(inputs))
                    sums.append(self._scored(text, inputs))
                    done += 1
                    if self.progress is not None:
                        self.progress(done, total)
                self.folder.write(number, Chunk(sums, digests))
        except BaseException as error:
            if links.ranks > 1:
                self.folder.note_failure(links.rank, error)
            raise

    def wait_for_others(self) -> None:
        """Return when all chunks are done."""
        owner = {n: place % self.links.ranks for place, n in enumerate(self.missing)}
        waiting, since, pause = self.missing, time.monotonic(), 0.01
        while still := [n for n in waiting if not self.folder.is_done(n)]:
            if len(still) < len(waiting):
                since = time.monotonic()
            waiting = still
            failed = self.folder.failures()
            if failed:
                raise DistributedError(
                    f"rank {min(failed)} could not finish its texts.",
                    [(f"rank {rank}", error) for rank, error in failed.items()],
                    "Mend it there and start all ranks anew; what is done is kept.",
                )
            if time.monotonic() - since > self.links.timeout:
                late = sorted({owner[n] for n in still})
                raise DistributedError(
                    f"rank {', '.join(map(str, late))} finished no chunk within "
                    f"{self.links.timeout:g} s.",
                    [("chunks missing", f"{len(still)} of {self.folder.chunks[-1] + 1}")],
                    "Look at the error there and start all ranks anew; what is done is kept. If a "
                    "chunk takes longer, pass timeout=.",
                )
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _scored(self, number: int, inputs: Mapping[str, Any]) -> tuple[LayerSums, ...]:
        """The sums of one text."""
        forget_longer_texts(self.model)
        try:
            with torch.no_grad(), inspect(self.model, top=1) as record:
                record.unknown_id = unknown_id_of(self.tokenizer)
                called_with(self.model, inputs)(**inputs)
        except QkvError as error:
            seen = [("number of the text", str(number)), *error.seen]
            raise type(error)(error.fact, seen, error.action) from error
        except Exception as error:
            error.add_note(f"This is text {number}, with inputs {', '.join(map(str, inputs))}.")
            raise
        return sums_of(record)

    def _tell(self, said: Mapping[str, Any], error: QkvError | None) -> None:
        """Compare what ranks say; raise this rank's error, or that of another."""
        reported = "" if error is None else in_words(error)
        everyone = tell(self.links, {**said, "own error": reported}, torch.device("cpu"))
        if error is not None:
            raise error
        compare(everyone)

    def _unfit(self) -> QkvError | None:
        """What is wrong with the arguments of this rank."""
        if is_in_training(self.model):
            return ArgumentError(
                f"{type(self.model).__name__} or a part of it is in training mode, where dropout "
                "changes numbers.",
                action="Call model.eval().",
            )
        by_index = hasattr(self.texts, "__len__") and hasattr(self.texts, "__getitem__")
        if not by_index or isinstance(self.texts, Mapping):
            return ArgumentError(
                f"texts is a {type(self.texts).__name__}, which has no length or no text 0.",
                action="Pass a list of texts.",
            )
        if isinstance(self.texts, str):
            return ArgumentError(
                f"texts is one str of {len(self.texts)} characters, each of which would be a text.",
                action="Pass a list of texts.",
            )
        if not self.folder.texts:
            return ArgumentError("there is no text.", action="Pass one or more.")
        if self.tokenizer is not None and not callable(self.tokenizer):
            return ArgumentError(
                f"tokenizer={shown(self.tokenizer)} is not a tokenizer.",
                action="Pass what AutoTokenizer.from_pretrained returns.",
            )
        if self.progress is not None and not callable(self.progress):
            return ArgumentError(
                f"progress={shown(self.progress)} cannot be called.",
                action="Pass a function of the number of texts that are done, and of all.",
            )
        return None

    def _unlike_before(self) -> QkvError | None:
        """What is wrong with the folder, as this rank sees it."""
        if not self.folder.is_begun():
            return FileError(
                f"rank {self.links.rank} does not see what rank 0 wrote to "
                f"{str(self.folder.path)!r}.",
                action="Name a folder that all ranks share.",
            )
        missing = set(self.missing)
        done = [n for n in self.folder.chunks if n not in missing]
        try:
            for number in done[self.links.rank :: self.links.ranks]:
                digests = self.folder.read(number).digests
                for text, digest in zip(self.folder.members(number), digests, strict=True):
                    if digest != _digest(self._inputs(text)):
                        return FileError(
                            f"text {text} is another one than that of {str(self.folder.path)!r}.",
                            action="Name another folder for other texts.",
                        )
        except QkvError as error:
            return error
        return None

    def _computes_otherwise(self) -> FileError | None:
        """Whether the model gives other scores than those that the folder holds of one text."""
        done = sorted({*self.folder.chunks} - {*self.missing})
        if not done:
            return None
        kept, text = self.folder.read(done[0]).texts[0], self.folder.members(done[0])[0]
        now = self._scored(text, self._inputs(text))
        # Another number of threads rounds otherwise.
        dtypes = {p.dtype for p in self.model.parameters() if p.is_floating_point()}
        near = max((torch.finfo(dtype).eps for dtype in dtypes), default=1e-7) ** 0.5
        if [layer.name for layer in now] == [layer.name for layer in kept] and all(
            np.allclose(ours.sums, theirs.sums, near, near, equal_nan=True)
            for ours, theirs in zip(now, kept, strict=True)
        ):
            return None
        return FileError(
            f"the model computes other scores of text {text} than {str(self.folder.path)!r} "
            "holds, with the same parameters.",
            action="Name another folder for a model with hooks, changed heads or another "
            "configuration.",
        )

    def _inputs(self, number: int) -> dict[str, Any]:
        """What the model is called with for one text."""
        inputs = self._read(number)
        ids = inputs.get("input_ids")
        if ids is None:
            return inputs
        if not isinstance(ids, torch.Tensor):
            raise ArgumentError(
                f"text {number} has input_ids that are a {type(ids).__name__} and no tensor.",
                action='Pass tensors (batch, length), as tokenizer(text, return_tensors="pt") '
                "makes them.",
            )
        if not ids.numel():
            raise ArgumentError(f"text {number} has no tokens.", action="Leave it out.")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise self._no_ids(number)
        # An embedding takes no other integers than those of 32 and 64 bits.
        return {**inputs, "input_ids": ids.long()}

    def _no_ids(self, number: int) -> ArgumentError:
        text = self.texts[number]
        dtype = getattr(text, "dtype", None)
        of = "" if dtype is None else f" of {dtype}"
        return ArgumentError(
            f"text {number} is a {type(text).__name__}{of}, of no token ids.",
            action="Pass a mapping of inputs, token ids (length,) or (batch, length), or a "
            "string and a tokenizer.",
        )

    def _read(self, number: int) -> dict[str, Any]:
        text = self.texts[number]
        if isinstance(text, str):
            if self.tokenizer is None:
                raise ArgumentError(
                    f"text {number} is a string, and there is no tokenizer.",
                    action="Pass tokenizer=, or token ids.",
                )
            return inputs_of_text(inner_model(self.model), text, self.tokenizer)
        if isinstance(text, Mapping):
            return dict(text)
        try:
            # torch refuses arrays with negative strides, which a copy does not have.
            ids = torch.as_tensor(text.copy() if isinstance(text, np.ndarray) else text)
        except (TypeError, ValueError, RuntimeError):
            ids = None
        if ids is None or ids.ndim not in (1, 2):
            raise self._no_ids(number)
        return {"input_ids": ids[None] if ids.ndim == 1 else ids}


def _number_of(texts: Any) -> int:
    """How many there are; 0 for what has no length, which `_unfit` refuses on every rank."""
    return len(texts) if hasattr(texts, "__len__") else 0


def _digest(inputs: Mapping[str, Any]) -> str:
    """A digest of the tensors of one text."""
    digest = blake2b(digest_size=8)
    for name, given in sorted(inputs.items()):
        if isinstance(given, torch.Tensor):
            digest.update(f"{name} {given.dtype} {tuple(given.shape)}".encode())
            digest.update(_bytes(given))
    return digest.hexdigest()


def _digest_of_parameters(model: torch.nn.Module) -> str:
    """A digest of all parameters and buffers that are stored with a model.

    Others, such as rotary frequencies for the length of the last text, change while it runs.
    """
    digest = blake2b(digest_size=8)
    stored = model.state_dict(keep_vars=True)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    for name, tensor in [*model.named_parameters(), *buffers]:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    entries = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return entries.numpy().data
