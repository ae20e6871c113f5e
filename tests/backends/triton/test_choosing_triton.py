"""When calls get kernels in Triton, and why others do not."""

from dataclasses import replace

import numpy as np
import pytest

import qkv
import qkv.backends as registry
from qkv.backends import choose
from qkv.problem.building.check import check
from qkv.problem.spec import Spec
from qkv.testing import DTYPES


def spec_on_gpu(dtype: str = "bfloat16", head_dim: int = 8) -> Spec:
    """The structure of a causal call of tensors on a GPU, which need not be there."""
    rows = np.zeros((1, 2, 5, head_dim), DTYPES[dtype])
    spec = check(rows, rows, rows, (qkv.Causal("end"),)).spec
    return replace(spec, library="torch", device="cuda")


@pytest.fixture
def chosen_for_all(monkeypatch):
    """The registry as of a process that was started with QKV_TRITON=1."""
    monkeypatch.setenv("QKV_TRITON", "1")
    registry._found.cache_clear()
    yield
    monkeypatch.undo()
    registry._found.cache_clear()


def test_calls_have_to_ask_for_it() -> None:
    assert choose(spec_on_gpu()).backend.name == "torch"
    assert choose(spec_on_gpu(), "triton").backend.name == "triton"


@pytest.mark.usefixtures("chosen_for_all")
def test_a_process_may_ask_for_all_calls() -> None:
    assert choose(spec_on_gpu()).backend.name == "triton"
    assert choose(spec_on_gpu("float64")).backend.name == "torch"
    assert choose(replace(spec_on_gpu(), library="numpy", device="cpu")).backend.name == "cpu"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (spec_on_gpu("float64"), "dtype=float64"),
        (spec_on_gpu(head_dim=264), "rows of 264"),
        (replace(spec_on_gpu(), device="mps"), "tensors on mps"),
        (replace(spec_on_gpu(), library="numpy"), "arrays of numpy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_refuses(spec: Spec, reason: str) -> None:
    with pytest.raises(qkv.UnsupportedError, match=reason):
        choose(spec, "triton")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (12, 0)])
def test_older_gpus_are_refused(capability: tuple[int, int], monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    if capability >= (8, 0):
        assert choose(spec_on_gpu(), "triton").backend.name == "triton"
        return
    with pytest.raises(qkv.UnsupportedError, match=r"compute capability 7\.5"):
        choose(spec_on_gpu(), "triton")


def test_gpus_of_another_maker_are_refused(monkeypatch) -> None:
    monkeypatch.setattr("torch.version.hip", "7.0")
    with pytest.raises(qkv.UnsupportedError, match="a GPU of AMD"):
        choose(spec_on_gpu(), "triton")


def test_without_the_package_a_call_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("qkv.backends.torch.triton._is_installed", lambda: False)
    with pytest.raises(qkv.UnsupportedError, match="triton is not installed"):
        choose(spec_on_gpu(), "triton")
