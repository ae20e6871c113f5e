"""What a model predicts with some of its heads changed, and what it costs to predict a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from qkv.errors import ArgumentError
from qkv.lab.parameters import Parameters, TooLongError
from qkv.lab.sources.heads import shown
from qkv.samples.decoder import Decoder

__all__ = ["WhatIf", "shipped_what_if", "transformer_what_if"]

Array = NDArray[Any]
Changes: TypeAlias = Mapping[tuple[int, int], str | Sequence[int]]

_WHATS = ("off", "uniform", "copy")
_MOST_CHANGES = 4096
_SHOWN = 5


@dataclass(frozen=True, slots=True, eq=False)
class WhatIf:
    """Answers the method `intervene`: the model before and after.

    Attributes
    ----------
    encode : callable (text) -> ids
    decode : callable (id) -> text
    logits : callable (ids, changes) -> array (length, vocabulary)
        Scores of each next token; a change is "off", "uniform", or the ids to copy weights from.
    ids : sequence of int
        What is read where the request has no prompt.
    most : int
        The longest prompt.
    """

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[int], str]
    logits: Callable[[Sequence[int], Changes], Array]
    ids: Sequence[int]
    most: int

    def __call__(self, given: Parameters) -> dict[str, Any]:
        """Losses of a prompt and predictions after it, as the model is and with changes.

        Parameters
        ----------
        given : Parameters
            prompt, source: texts, optional; changes: layer, head and kind of change of each.
        """
        ids = self._ids(given.text("prompt"))
        source = given.text("source")
        changes: dict[tuple[int, int], str | Sequence[int]] = {}
        for change in given.items("changes", _MOST_CHANGES):
            place = change.integer("layer", 0, 10**6), change.integer("head", 0, 10**6)
            what = change.choice("what", _WHATS, "off")
            if what == "copy" and not source:
                raise ArgumentError(
                    "there is no other prompt to copy weights from.",
                    action="Write one of as many tokens.",
                )
            changes[place] = self._ids(source) if what == "copy" else what
        return {
            "tokens": [shown(self.decode(index)) for index in ids],
            "before": self._said(ids, {}),
            "after": self._said(ids, changes),
        }

    def _ids(self, text: str | None) -> list[int]:
        ids = list(self.ids if not text else self.encode(text))
        if not ids:
            raise ArgumentError("the prompt has no tokens.", action="Write a sentence.")
        if len(ids) > self.most:
            raise TooLongError(
                f"the prompt has {len(ids)} tokens; at most {self.most} are read here.",
                action="Shorten it.",
            )
        return ids

    def _said(self, ids: Sequence[int], changes: Changes) -> dict[str, Any]:
        logits = np.asarray(self.logits(ids, changes), np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        losses = -log_probabilities[np.arange(len(ids) - 1), ids[1:]]
        last = log_probabilities[-1]
        best = np.argsort(-last, kind="stable")[:_SHOWN]
        return {
            # The first token has no earlier token from which it could be predicted.
            "losses": [np.nan, *losses.tolist()],
            "loss": float(losses.mean()) if len(losses) else np.nan,
            "prediction": [
                {"token": shown(self.decode(int(i))), "probability": float(np.exp(last[i]))}
                for i in best
            ],
        }


def shipped_what_if(model: Decoder, ids: Sequence[int]) -> WhatIf:
    """A model that comes with qkv.

    Parameters
    ----------
    model : Decoder
    ids : sequence of int
        What it reads where a request has no prompt.
    """
    return WhatIf(
        model.encode, lambda index: model.tokens([index])[0], model.logits, ids, most=4096
    )


def transformer_what_if(model: Any, tokenizer: Any, ids: Sequence[int], most: int) -> WhatIf:
    """A transformers model that predicts the next token.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its output has logits (1, length, vocabulary).
    tokenizer : transformers.PreTrainedTokenizerBase
    ids : sequence of int
    most : int
        Positions that the model has.
    """
    import torch

    from qkv.hf import CopyFrom, intervene

    def inputs(some: Sequence[int]) -> dict[str, Any]:
        return {"input_ids": torch.tensor([list(some)]), "use_cache": False}

    def logits(some: Sequence[int], changes: Changes) -> Array:
        said: dict[tuple[int, int], Any] = {
            place: change if isinstance(change, str) else CopyFrom(**inputs(change))
            for place, change in changes.items()
        }
        with torch.no_grad(), intervene(model, said):
            rows: Array = model(**inputs(some)).logits[0].double().numpy()
        return rows

    return WhatIf(
        lambda text: tokenizer(text, verbose=False)["input_ids"],
        lambda index: str(tokenizer.decode([index])),
        logits,
        ids,
        min(most, 4096),
    )
