"""What kernels of `qkv.backends.torch.triton` become on GPUs, which is found without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "triton_kernels.py"

WARNS = "triton.language.core"

SHARED_KIB = {80: 163, 90: 227}


def compiled(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of the tool. Triton reads at import whether it interprets, so that the tool has a
    process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", f"error::UserWarning:{WARNS}", TOOL, "--json", *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=180 * int(os.environ.get("QKV_TEST_PATIENCE", "1")),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_the_kernels_fit_into_a_card_and_multiply_by_its_matrix_units(
    capability: int, tmp_path: Path
) -> None:
    forms = "causal", "six"
    rows = compiled(tmp_path, "--capability", str(capability), "--form", *forms, "--head-dim", "64")
    large = [row for row in rows if row["tile"]]
    found = {(row["form"], row["kernel"], row["selects"]) for row in large}
    kernels = "forward", "gradients_of_queries", "gradients_of_keys"
    assert found == {(f, k, selects) for f in forms for k in kernels for selects in (False, True)}
    unit = "wgmma.mma_async" if capability == 90 else "mma.sync"
    for row in large:
        assert list(row["matrix_instructions"]) == [unit], row
        assert row["shared_bytes"] <= SHARED_KIB[capability] * 1024, row
        # The runs that select may spill, since they hardly ever have work.
        assert row["selects"] or row["spilled"] == 0, row


@pytest.mark.slow
def test_a_small_seed_of_dropout_is_shifted_as_64_bits(tmp_path: Path) -> None:
    # Shifted by 32 bits as the 32 bits in which Triton passes it, it would be undefined.
    rows = compiled(tmp_path, "--capability", "80", "--form", "dropout", "--head-dim", "16")
    assert {row["kernel"] for row in rows if row["tile"]} >= {"forward", "gradients_of_keys"}
