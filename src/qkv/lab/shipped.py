"""What the panel Inspect shows without a file or a model of the reader: both come with qkv."""

from __future__ import annotations

from qkv.backends import Progress
from qkv.files import Arrays
from qkv.lab.heads import heads_of_model
from qkv.lab.sources import Source, open_arrays
from qkv.lab.what_if import tiny_what_if

__all__ = ["TINY_ABOUT", "sample_source", "tiny_source"]

TINY_ABOUT = (
    "The model reads random characters, and then the same ones again. No language helps with the "
    "first half; the second can be predicted by a head that finds the character before and reads "
    "what followed it."
)


def sample_source() -> Source:
    """One layer of a real model on a paragraph: `qkv.samples.real_sample`."""
    from qkv.samples import real_sample

    sample = real_sample()
    arrays = Arrays(sample.q, sample.k, sample.v, sample.tokens, {})
    about = f"From {sample.source} ({sample.licence})."
    return open_arrays(arrays, sample.title, about=about)


def tiny_source(
    text: str | None = None, count: int | None = None, progress: Progress | None = None
) -> Source:
    """The small model that comes with qkv, on a text or on random characters, twice.

    Parameters
    ----------
    text : str, optional
    count : int, optional
        Only so many of the characters are read.
    progress : callable (done, all), optional
    """
    from qkv.samples import tiny_model

    model = tiny_model()
    ids = (model.repeated_sequence() if text is None else model.encode(text))[:count]
    record = model.inspect(ids, keep="weights", progress=progress)
    return Source(
        record.model,
        heads=heads_of_model(record, TINY_ABOUT if text is None else ""),
        intervene=tiny_what_if(ids),
        read=tiny_source,
    )
