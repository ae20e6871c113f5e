"""Every parameter of a public class or function is described."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import pytest

MODULES = (
    "qkv",
    "qkv.cache",
    "qkv.torch",
    "qkv.hf",
    "qkv.jax",
    "qkv.distributed",
    "qkv.mechanisms",
)


def undescribed(thing: Any) -> list[str]:
    """Parameters that are missing from a docstring which has a section of parameters."""
    parts = re.split(r"\n\n(\w[\w ]*)\n---+\n", inspect.getdoc(thing) or "")
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    if "Parameters" not in sections:
        return []
    text = sections["Parameters"] + "\n" + sections.get("Attributes", "")
    lines = [line for line in text.splitlines() if line[:1].strip()]
    described = {name.strip(" *") for line in lines for name in line.split(" : ")[0].split(",")}
    return [name for name in inspect.signature(thing).parameters if name not in described]


def test_a_parameter_that_is_left_out_is_found() -> None:
    def function(a: int, b: int) -> None:
        """Do it.

        Parameters
        ----------
        a : int
            One number.

        Notes
        -----
        b : int
        """

    assert undescribed(function) == ["b"]


@pytest.mark.parametrize("module", MODULES)
def test_every_parameter_is_described(module: str) -> None:
    public = import_module(module)
    for name in public.__all__:
        thing = getattr(public, name)
        if callable(thing) and inspect.getdoc(thing):
            assert undescribed(thing) == [], f"{module}.{name}"
