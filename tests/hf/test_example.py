"""The example runs, and prints what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

REASON = "the example needs transformers: pip install transformers"
pytest.importorskip("torch", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging_face_model.py"


@pytest.mark.slow
def test_it_prints_small_differences(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    differences = re.findall(r"difference to \w+ +(\S+), of logits up to (\S+)", printed)
    assert len(differences) == 2
    for difference, largest in differences:
        assert float(difference) < 1e-4 < float(largest)
    assert "same 16 tokens generated    True" in printed
    assert re.search(r"layers that call qkv +4\n", printed)
    assert "LayerWeights(shape=(1, 8, 4096, 4096), dtype=torch.float32)\n" in printed
