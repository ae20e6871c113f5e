"""Train the small language model that comes with qkv, on the novels of Jane Austen.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb novels
    pip install -e ".[torch]"
    python tools/train_language_model.py novels --into src/qkv/samples

The novels are in the public domain; Debian's package r-cran-janeaustenr (MIT) has the texts of
Project Gutenberg. The last twentieth of each novel is held out. The vocabulary is made by
byte-pair encoding (Sennrich et al., 2016) on words of the rest, and a text is read by the longest
piece that fits, from left to right. The same text and pieces count a trigram model with
Kneser-Ney smoothing (Kneser and Ney, 1995), beside which the language model is measured.

Some ten minutes of one core. Writes `language.safetensors`, with 8 bits for each weight and what
was measured. The seed is fixed: the same versions on the same machine make the same bytes. With
`--checkpoint`, training goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor, nn

import qkv
import qkv.torch

VOCABULARY = 1024
WIDTH, NUM_HEADS, NUM_LAYERS, HIDDEN = 128, 4, 4, 512
CONTEXT = 128
BATCH = 16
STEPS, WARM_UP, DECAY = 1300, 100, 200
"""All steps, those in which the rate rises, and those at the end in which it falls to 0."""
LEARNING_RATE = 3e-3
SEED = 0
LOOK_EVERY, SAVE_EVERY = 50, 100
EPSILON = 1e-6

Ids = NDArray[np.int64]

# --- the text ------------------------------------------------------------------------------------


def r_objects(data: bytes) -> Iterator[list[str]]:
    """The character vectors of an R database: compressed streams, each after four bytes of length,
    in R's XDR form, version 3."""
    at = 0
    while at < len(data):
        stream = zlib.decompressobj()
        content = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        # "X\n", three versions, the length of the name of an encoding, and that name.
        place = 18 + struct.unpack_from(">i", content, 14)[0]
        kind, count = struct.unpack_from(">ii", content, place)
        if kind != 16:
            raise SystemExit(f"the database holds an object of type {kind}, not strings (16).")
        place += 8
        lines = []
        for _ in range(count):
            _, length = struct.unpack_from(">ii", content, place)
            lines.append(content[place + 8 : place + 8 + length].decode("utf-8"))
            place += 8 + length
        yield lines


def novels(folder: Path) -> list[str]:
    """The text of each novel, a paragraph a line."""
    [path] = folder.rglob("janeaustenr/data/Rdata.rdb")
    found = []
    for lines in r_objects(path.read_bytes()):
        text = "\n".join(lines).partition("A NOTE ON THE TEXT")[0].replace("_", "")
        paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
        found.append("\n".join(part for part in paragraphs if part) + "\n")
    return found


# --- the vocabulary ------------------------------------------------------------------------------


def byte_pair_pieces(text: str, count: int) -> list[str]:
    """Pieces of words, a space before a word belonging to it; the first is for what is unknown."""
    pieces = ["\ufffd", *sorted(set(text))]
    words = Counter(re.findall(r" ?[A-Za-z]+| ?[^A-Za-z\s]+|\s", text))
    split = [(list(word), times) for word, times in words.items() if len(word) > 1]
    while len(pieces) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for parts, times in split:
            for pair in pairwise(parts):
                pairs[pair] += times
        # Of equal counts the first in the alphabet, so that the order of words decides nothing.
        (left, right), _ = min(pairs.items(), key=lambda item: (-item[1], item[0]))
        pieces.append(left + right)
        for parts, _ in split:
            for i in range(len(parts) - 2, -1, -1):
                if i + 1 < len(parts) and parts[i] == left and parts[i + 1] == right:
                    parts[i : i + 2] = [left + right]
        split = [(parts, times) for parts, times in split if len(parts) > 1]
    return pieces


def encoded(text: str, pieces: list[str]) -> Ids:
    """The longest piece that fits, from left to right, as `LanguageModel.encode` reads."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    longest = max(map(len, pieces))
    found, at = [], 0
    while at < len(text):
        for length in range(longest, 0, -1):
            if text[at : at + length] in ids:
                break
        found.append(ids.get(text[at : at + length], 0))
        at += length
    return np.array(found)


# --- the trigram model ---------------------------------------------------------------------------


class Trigrams:
    """Interpolated Kneser-Ney: of each count `discount` is given to the shorter context, in which
    a piece counts by how many pieces it has followed."""

    def __init__(self, ids: Ids, discount: float = 0.75) -> None:
        self.discount = discount
        threes = Counter(zip(ids.tolist(), ids[1:].tolist(), ids[2:].tolist(), strict=False))
        self.threes = threes
        self.contexts: Counter[tuple[int, int]] = Counter()
        self.kinds: Counter[tuple[int, int]] = Counter()
        self.twos: Counter[tuple[int, int]] = Counter()
        for (a, b, c), times in threes.items():
            self.contexts[a, b] += times
            self.kinds[a, b] += 1
            self.twos[b, c] += 1
        self.ones, self.followers = np.zeros(VOCABULARY), np.zeros(VOCABULARY)
        self.followed = np.zeros(VOCABULARY)
        for (b, c), times in self.twos.items():
            self.ones[c] += 1
            self.followers[b] += 1
            self.followed[b] += times

    def probability(self, a: int, b: int, c: int) -> float:
        d = self.discount
        kinds = np.count_nonzero(self.ones)
        one = (max(self.ones[c] - d, 0) + d * kinds / VOCABULARY) / self.ones.sum()
        two = one
        if self.followed[b]:
            two = max(self.twos[b, c] - d, 0) + d * self.followers[b] * one
            two /= self.followed[b]
        if not self.contexts[a, b]:
            return float(two)
        three = max(self.threes[a, b, c] - d, 0) + d * self.kinds[a, b] * two
        return float(three / self.contexts[a, b])

    def loss(self, ids: Ids) -> float:
        """Mean of `-log p`, in nats for each piece from the third on."""
        rows = zip(ids.tolist(), ids[1:].tolist(), ids[2:].tolist(), strict=False)
        return -float(np.mean([np.log(self.probability(*row)) for row in rows]))


# --- the language model --------------------------------------------------------------------------


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPSILON)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = norm(x)
        split = (*x.shape[:-1], NUM_HEADS, WIDTH // NUM_HEADS)
        heads = (
            each(rows).view(split).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = qkv.attention(*heads, qkv.Causal(), qkv.RoPE())
        x = x + self.out_proj(out.transpose(1, 2).reshape(x.shape))
        wide: Tensor = self.up_proj(norm(x))
        written: Tensor = x + self.down_proj(wide.relu().square())
        return written


class Transformer(nn.Module):
    """The model of `qkv.samples.LanguageModel`, in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        nn.init.normal_(self.embedding.weight, std=0.05)
        for name, weight in self.layers.named_parameters():
            # What writes to the sum begins small, and all else with rows of length one.
            writes = "out_proj" in name or "down_proj" in name
            small = (2 * NUM_LAYERS) ** -0.5 if writes else 1.0
            nn.init.normal_(weight, std=small * weight.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = norm(self.embedding(ids))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = norm(x) @ self.embedding.weight.T
        return logits


def rate(step: int, steps: int) -> float:
    """The share of the learning rate: it rises, stays, and falls to 0."""
    return min(1.0, (step + 1) / WARM_UP, (steps - step) / DECAY)


def train(ids: Ids, steps: int, checkpoint: Path | None) -> Transformer:
    """The trained model."""
    torch.set_num_threads(1)  # sums in one order: the same bits on any number of cores
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model, text = Transformer(), torch.from_numpy(ids)
    matrices = [each for name, each in model.named_parameters() if name != "embedding.weight"]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [model.embedding.weight], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    first = 0
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint)
        first = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
    since: list[float] = []
    for step in range(first, steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        rows = text[starts + torch.arange(CONTEXT + 1)]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate(step, steps)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        since.append(loss.item())
        if (step + 1) % LOOK_EVERY == 0:
            print(
                f"step {step + 1}  loss {np.mean(since):.4f}  {time.process_time():.0f} s",
                flush=True,
            )
            since = []
        if checkpoint is not None and (step + 1) % SAVE_EVERY == 0:
            state = {"step": step + 1, "model": model.state_dict()}
            state |= {"optimizer": optimizer.state_dict(), "generator": generator.get_state()}
            torch.save(state, checkpoint)
    return model


@torch.no_grad()
def held_out_loss(model: Transformer, ids: Ids, every: int = 1) -> float:
    """Mean of `-log p` in nats for each piece after at least half a context, of some rows."""
    half = CONTEXT // 2
    rows = torch.from_numpy(ids).unfold(0, CONTEXT + 1, half)[::every]
    losses = [
        F.cross_entropy(
            model(some[:, :-1])[:, half:].flatten(0, 1), some[:, 1 + half :].flatten()
        ).item()
        * len(some)
        for some in rows.split(BATCH)
    ]
    return sum(losses) / len(rows)


@torch.no_grad()
def loss_without(model: Transformer, ids: Ids) -> list[list[float]]:
    """How much more is lost on a quarter of the text when a head is off, by layer and head."""
    with_all = held_out_loss(model, ids, every=4)
    found = []
    for layer in range(NUM_LAYERS):
        out: Tensor = model.get_parameter(f"layers.{layer}.out_proj.weight")
        kept, row = out.clone(), []
        for columns in torch.arange(WIDTH).chunk(NUM_HEADS):
            out[:, columns] = 0.0  # what this head writes
            row.append(round(held_out_loss(model, ids, every=4) - with_all, 4))
            out.copy_(kept)
        found.append(row)
    return found


# --- eight bits ----------------------------------------------------------------------------------


def quantized(model: Transformer) -> dict[str, NDArray[Any]]:
    """Each matrix as int8 and a float32 scale for each row: the largest of a row is 127."""
    found: dict[str, NDArray[Any]] = {}
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
        found[name] = np.rint(weight / scale).astype(np.int8)
        found[f"{name}.scale"] = scale[:, 0].astype(np.float32)
    return found


def dequantized(arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(array * arrays[f"{name}.scale"][:, None])
        for name, array in arrays.items()
        if f"{name}.scale" in arrays
    }


def written(arrays: dict[str, NDArray[Any]], about: dict[str, Any]) -> bytes:
    """The file. What is said about the model is one entry, since safetensors orders several by
    chance, and the same training makes the same bytes."""
    return save(arrays, {"about": json.dumps(about)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("novels", type=Path, help="folder into which the package was unpacked")
    parser.add_argument("--into", type=Path, default=Path(), help="folder to write to")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, if training stops")
    options = parser.parse_args()
    qkv.set_num_threads(1)  # rows of 128 are too short to share

    texts = novels(options.novels)
    cuts = [text.rindex("\n", 0, len(text) * 19 // 20) + 1 for text in texts]
    train_text = "".join(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    held_out_text = "".join(text[cut:] for text, cut in zip(texts, cuts, strict=True))
    pieces = byte_pair_pieces(train_text, VOCABULARY)
    train_ids, held_out = encoded(train_text, pieces), encoded(held_out_text, pieces)
    measured: dict[str, Any] = {
        "training characters": len(train_text),
        "training tokens": len(train_ids),
        "held-out characters": len(held_out_text),
        "held-out tokens": len(held_out),
        "trigram loss": round(Trigrams(train_ids).loss(held_out), 4),
    }
    print(measured, flush=True)

    model = train(train_ids, options.steps, options.checkpoint)
    measured["loss before rounding"] = round(held_out_loss(model, held_out), 4)
    arrays = quantized(model)
    model.load_state_dict(dequantized(arrays))
    measured["loss"] = round(held_out_loss(model, held_out), 4)
    measured["more without"] = loss_without(model, held_out)
    measured["weights"] = sum(weight.numel() for weight in model.parameters())
    measured["steps"] = options.steps
    about = {
        "pieces": pieces,
        "num_heads": NUM_HEADS,
        "context": CONTEXT,
        "measured": measured,
    }
    (options.into / "language.safetensors").write_bytes(written(arrays, about))
    print(measured, f"{time.process_time():.0f} s of CPU")


if __name__ == "__main__":
    main()
