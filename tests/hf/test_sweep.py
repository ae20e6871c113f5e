"""Some of all causal model types of transformers; `tests/hf/sweep.py` compares all of them."""

from __future__ import annotations

import warnings

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
pytest.importorskip("torch", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

from model_types import CAUSAL  # noqa: E402
from sweep import LARGE, compared, failed  # noqa: E402


@pytest.mark.slow
@pytest.mark.sampled("model_type", [name for name in CAUSAL if name not in LARGE], one_in=24)
def test_a_model_type(model_type: str) -> None:
    with warnings.catch_warnings():
        # Some of transformers' models warn of their own code.
        warnings.simplefilter("ignore")
        row = compared(model_type)
    assert not failed(model_type, row), row
