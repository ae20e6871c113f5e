"""What needs a package that is missing names the command that installs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.cli import main
from qkv.extras import install_command
from qkv.mechanisms.base.arrays.namespace import array_namespace

X = np.eye(3)
NEEDS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "a picture in a file": (
        "matplotlib", "plot", lambda path: qkv.inspect(X, X, X).plot(path / "a.svg")
    ),
    "a picture of pyplot": ("matplotlib", "plot", lambda path: qkv.inspect(X, X, X).plot()),
    "a widget": ("anywidget", "lab", lambda path: qkv.lab.widget(qkv.inspect(X, X, X))),
    "mechanisms of tensors": (
        "array_api_compat", "mechanisms", lambda path: array_namespace(torch.eye(3))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDS)
def test_an_extra_is_named_with_its_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, extra, call = NEEDS[name]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(qkv.UnsupportedError, match="is not installed") as caught:
        call(tmp_path)
    assert install_command(extra) in caught.value.action


def test_the_page_needs_a_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("application", "server"):
        monkeypatch.delitem(sys.modules, f"qkv.lab.serving.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert main(["lab", "--no-open"]) == 2
    said = capsys.readouterr().err
    assert "starlette.applications is not installed" in said
    assert install_command("lab") in said


def test_a_module_that_is_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """`qkv.hf` is imported when it is first used."""
    monkeypatch.delattr(qkv, "hf")  # This imports it, if nothing did before.
    for name in [name for name in sys.modules if f"{name}.".startswith("qkv.hf.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        qkv.hf  # noqa: B018  the attribute imports the module
    assert "qkv.hf needs transformers, which is not installed." in str(caught.value)
    assert str(caught.value).endswith(install_command("hf"))
