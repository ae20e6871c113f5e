"""Models whose sizes are published, each with its source."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from qkv.arguments.declarations import checked, shown
from qkv.arguments.spelling import did_you_mean
from qkv.cost.configs.config import read_config
from qkv.cost.model import Model
from qkv.errors import ArgumentError

__all__ = ["model_card", "model_names"]


def model_names() -> tuple[str, ...]:
    """Names that `model_card` knows.

    Examples
    --------
    >>> from qkv.cost import model_names
    >>> "llama-3-8b" in model_names()
    True
    """
    return tuple(_cards())


@checked
def model_card(name: str) -> Model:
    """A model by its name; capitals, spaces, dots and hyphens make no difference.

    Parameters
    ----------
    name : str
        Such as "llama-3-8b" or "LLaMA-3 8B".

    Raises
    ------
    ArgumentError
        If there is no such card.

    Examples
    --------
    >>> from qkv.cost import model_card
    >>> model_card("GPT-3").width
    12288
    """
    for known, card in _cards().items():
        if _plain(str(name)) in (_plain(known), _plain(card["name"])):
            model = read_config(card["config"], name=card["name"], source=card["source"])
            return replace(
                model,
                speculative=card.get("speculative", False),
                notes=(*card.get("notes", ()), *model.notes),
            )
    raise ArgumentError(
        f"there is no card of a model {shown(str(name))}.",
        [("models", ", ".join(model_names()))],
        f"{did_you_mean(str(name), model_names())}Name one of these, or pass the model's "
        "config.json.",
    )


@cache
def _cards() -> dict[str, dict[str, Any]]:
    text = resources.files("qkv.cost").joinpath("models.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
