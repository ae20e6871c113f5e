"""The examples for torch do what they say, with few steps."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import qkv

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small do not pay for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    qkv.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    qkv.set_num_threads(None)


@pytest.mark.slow
def test_a_training_step() -> None:
    example = runpy.run_path(str(EXAMPLES / "torch_training_step.py"))
    first, last = example["main"](steps=30)
    assert last < first - 0.2


@pytest.mark.slow
def test_a_vision_transformer(tmp_path: Path) -> None:
    example = runpy.run_path(str(EXAMPLES / "vision_transformer.py"))
    page = tmp_path / "page.svg"
    right, on_disc = example["main"](steps=160, path=str(page))
    assert right > 0.5  # of four colours
    assert 0 < on_disc <= 1
    tags = [element.tag.rpartition("}")[2] for element in ElementTree.parse(page).iter()]
    assert tags.count("image") == 4
    assert tags.count("rect") > 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch_training_step", "train_tiny_model"])
def test_small_models_train_on_one_thread(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that wait for each other take several times as long beside other work."""
    seen = []

    def stop(*_: object, **__: object) -> None:
        seen.append((torch.get_num_threads(), qkv.get_num_threads()))
        raise InterruptedError

    monkeypatch.setattr(sys, "argv", ["train", "--into", str(tmp_path)])
    monkeypatch.setattr(torch.optim.Adam, "step", stop)
    torch.set_num_threads(2)
    qkv.set_num_threads(2)
    with pytest.raises(InterruptedError):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert seen == [(1, 1)]
