"""The models that come with qkv, by the names that commands and pages take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qkv.inspection.models.model_record import ModelRecord
from qkv.samples.decoder import Decoder
from qkv.samples.language import language_model
from qkv.samples.tiny import tiny_model

__all__ = ["LANGUAGE", "SHIPPED_MODELS", "ShippedModel"]

LANGUAGE = "language"

_FIRST_SENTENCE = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife."
)


@dataclass(frozen=True, slots=True, eq=False)
class ShippedModel:
    """What loads a model, and what it reads unless a text is given.

    Attributes
    ----------
    title : str
        For a list to choose from.
    load : callable () -> Decoder
    first : callable (model) -> ids
    about : str
        What is read first, in a sentence or two.
    """

    title: str
    load: Callable[[], Decoder]
    first: Callable[[Any], Sequence[int]]
    about: str

    def inspect(
        self, model: Decoder, text: str | None, count: int | None = None, **options: Any
    ) -> ModelRecord:
        """Every head on the first `count` tokens of a text, or of what is read unless one is given.

        Of more tokens than the model was trained on, the last are read, as in the lab's page.
        """
        ids = list(self.first(model) if text is None else model.encode(text))[:count]
        read = ids if model.context is None else ids[-model.context :]
        # What is read first is made of ids, and the one of unknown tokens may be among them.
        unknown_id = None if text is None else model.unknown_id
        record = model.inspect(read, unknown_id=unknown_id, **options)
        if len(read) < len(ids):
            record.notes.append(
                f"The model reads the last {len(read)} of {len(ids)} tokens, as many as it was "
                "trained on."
            )
        return record


SHIPPED_MODELS = {
    "tiny": ShippedModel(
        "a model of two layers that reads characters twice",
        tiny_model,
        lambda model: model.repeated_sequence(),
        "The model reads random characters, and then the same ones again. No language helps with "
        "the first half; the second can be predicted by a head that finds the character before "
        "and reads what followed it.",
    ),
    LANGUAGE: ShippedModel(
        "a language model of four layers that reads a sentence",
        language_model,
        lambda model: model.encode(_FIRST_SENTENCE),
        "The model reads the first sentence of Pride and Prejudice, which it was trained on.",
    ),
}
