"""`qkv compare --plot`, which needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import pytest

from qkv.cli import main


def test_compare_draws_every_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["causal", "differential", "cross"]
    file = tmp_path / "picture.svg"
    assert main(["compare", *names, "--plot", str(file)]) == 0
    assert "causal" in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    assert text.count("<image") == 3
    for name in names:
        # Letters are drawn as paths, beside a comment that says what they are.
        assert f"<!-- {name} -->" in text
    picture = tmp_path / "picture.png"
    assert main(["compare", "causal", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
