"""Results become pages through a writer from above, which is there as soon as qkv is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.inspection.rendering import pages

X = np.eye(3)


@pytest.mark.slow
def test_the_lab_is_imported_with_the_first_page() -> None:
    program = (
        "import sys, numpy as np, qkv; x = np.eye(3); record = qkv.inspect(x, x, x)\n"
        "assert not [name for name in sys.modules if name.startswith('qkv.lab')]\n"
        "assert record.to_html(['a', 'b', 'c']).startswith('<!doctype html>')\n"
        "assert 'qkv.lab' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_writer_gets_the_result_and_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_writer", pages._writer)
    seen: list[Any] = []

    def writer(shown: Any, tokens: Sequence[str] | None) -> str:
        seen.append((shown, tokens))
        return "a page"

    pages.write_pages_with(writer)
    record, trace, model = qkv.inspect(X, X, X), qkv.explain(X, X, X), qkv.ModelRecord("none")
    assert {record.to_html(["a", "b", "c"]), trace.to_html(), model.to_html()} == {"a page"}
    assert seen == [(record, ["a", "b", "c"]), (trace, None), (model, None)]
    pages.write_pages_with(None)
    with pytest.raises(qkv.UnsupportedError, match="nothing writes pages"):
        record.to_html()
