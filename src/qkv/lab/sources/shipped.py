"""What comes with qkv: a sample and small models, which the panel Inspect can show."""

from __future__ import annotations

from qkv.backends import Progress
from qkv.files import Arrays
from qkv.lab.sources.heads import heads_of_model
from qkv.lab.sources.source import Source, open_arrays
from qkv.lab.sources.what_if import shipped_what_if
from qkv.samples.shipped_models import SHIPPED_MODELS

__all__ = ["sample_source", "shipped_source"]


def sample_source() -> Source:
    """One layer of a real model on a paragraph: `qkv.samples.real_sample`."""
    from qkv.samples import real_sample

    sample = real_sample()
    arrays = Arrays(sample.q, sample.k, sample.v, sample.tokens, {})
    about = f"From {sample.source} ({sample.licence})."
    return open_arrays(arrays, sample.title, about=about)


def shipped_source(
    name: str, text: str | None = None, count: int | None = None, progress: Progress | None = None
) -> Source:
    """A model that comes with qkv, on a text or on what it reads without one.

    Parameters
    ----------
    name : str
        A key of `SHIPPED_MODELS`.
    text : str, optional
    count : int, optional
        Only so many of the tokens are read.
    progress : callable (done, all), optional
    """
    shipped = SHIPPED_MODELS[name]
    model = shipped.load()
    record = shipped.inspect(model, text, count, keep="weights", progress=progress)
    assert record.tokens is not None  # The model reads tokens.
    ids = record.tokens[0].tolist()
    if text is not None and count is not None:
        text = "".join(model.tokens(ids))
    return Source(
        record.model,
        heads=heads_of_model(record, shipped.about if text is None else ""),
        text=text,
        intervene=shipped_what_if(model, ids),
        read=lambda another: shipped_source(name, another),
    )
