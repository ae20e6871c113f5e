"""The benchmark on a GPU, run in Triton's interpreter: what it checks, and what it prints."""

import pytest
import torch

from benchmarks import gpu

ARGS = ["gpu", "--device", "cpu", "--tokens", "40", "--head-dims", "16", "--repeats", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("row", gpu.ROWS)
def test_a_row_is_checked_and_printed(row: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", [*ARGS, "--dtype", "float32", "--rows", row])
    gpu.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines] == ["forward", "gradients"]
    assert all(line.startswith(row) and " ms" in line for line in lines)


def test_a_wrong_result_ends_it() -> None:
    tensors = [torch.randn(1, heads, 8, 4) for heads in (gpu.HEADS, gpu.KV_HEADS, gpu.KV_HEADS)]
    out = torch.zeros(1, gpu.HEADS, 8, 4)
    with pytest.raises(SystemExit, match=r"flex, causal is .* off, allowed is"):
        gpu.check("flex, causal", out, gpu.ROWS["causal"], tensors, torch.zeros(8))
