"""Query, key and value of one layer of a real model on a real paragraph.

Captured by `tools/capture_sample.py`. Model and licence are named in `minilm.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from numpy.typing import NDArray

from qkv.files import read_arrays

__all__ = ["RealSample", "real_sample"]


@dataclass(frozen=True, slots=True, eq=False)
class RealSample:
    """Arrays (num_heads, length, head_dim), float32, with the tokens and where they are from."""

    q: NDArray[Any]
    k: NDArray[Any]
    v: NDArray[Any]
    tokens: tuple[str, ...]
    title: str
    source: str
    licence: str
    layer: int
    paragraph: str


def real_sample() -> RealSample:
    """The twelve heads of layer 1 of all-MiniLM-L6-v2, reading a paragraph full of pronouns.

    Returns
    -------
    RealSample
        q, k, v float32 (12, 106, 32): 12 heads, 106 tokens, head_dim 32.

    Notes
    -----
    0.5 MB, read from the package. Source: sentence-transformers/all-MiniLM-L6-v2, Apache-2.0.

    Examples
    --------
    >>> import qkv, qkv.samples
    >>> sample = qkv.samples.real_sample()
    >>> indices, weights = qkv.inspect(sample.q, sample.k, sample.v).top(1)
    >>> he = sample.tokens.index("he", 60)
    >>> sample.tokens[indices[3, he, 0]]
    'policeman'
    """
    folder = resources.files("qkv.samples")
    about = json.loads(folder.joinpath("minilm.json").read_text(encoding="utf-8"))
    with resources.as_file(folder.joinpath("minilm.safetensors")) as path:
        arrays = read_arrays(path)
    return RealSample(
        q=arrays.query,
        k=arrays.key,
        v=arrays.value,
        tokens=arrays.tokens or (),
        title=about["title"],
        source=about["source"],
        licence=about["licence"],
        layer=about["layer"],
        paragraph=about["paragraph"],
    )
