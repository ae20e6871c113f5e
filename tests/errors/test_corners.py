"""Calls from far corners: an error of qkv's own, or the right result."""

import copy
import os
import pickle
import sys
from types import ModuleType

import numpy as np
import pytest

import qkv
from qkv.backends.cpu.machine import stored_files
from qkv.errors import ArgumentError, ShapeError

ROW = np.eye(3)


@pytest.mark.parametrize("ndim", [33, 63, 64])
def test_more_dimensions_than_numpy_broadcasts(ndim) -> None:
    array = np.ones((1,) * (ndim - 2) + (3, 4), np.float32)
    for call in (qkv.attention, qkv.inspect, qkv.vjp, qkv.plan, qkv.explain):
        with pytest.raises(ShapeError, match=f"query has {ndim} dimensions; .* at most 32"):
            call(array, array, array)
    narrow = array.reshape(-1, 1, 3, 4)
    assert qkv.attention(narrow, narrow, narrow).shape == narrow.shape


@pytest.mark.slow
def test_as_many_dimensions_as_there_may_be() -> None:
    array = np.ones((1,) * 29 + (2, 3, 4), np.float32)
    record = qkv.inspect(array, array, array, np.ones((3, 3), bool), qkv.Bias(np.zeros((3, 3))))
    assert record.top(2)[0].shape == (*array.shape[:-1], 2)
    assert qkv.vjp(array, array, array)[1](array).query.shape == array.shape


def test_more_dimensions_than_numpy_has() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones((1,) * 64 + (3, 4))
    with pytest.raises(ShapeError, match="query has 66 dimensions"):
        qkv.attention(tensor, tensor, tensor)


@pytest.mark.parametrize("call", [qkv.attention, qkv.inspect])
def test_qkv_inside_a_score_mod(call) -> None:
    """The message spoke of a `symbols.Table`."""
    array = np.ones((3, 3))
    inner = qkv.ScoreMod(lambda s, b, h, q, k: s + call(array, array, array)[0, 0])
    with pytest.raises(ArgumentError, match="called inside a score mod"):
        qkv.attention(ROW, ROW, ROW, inner)


VARIANTS = [
    qkv.SlidingWindow(3, 0), qkv.SlidingWindow(None, 2), qkv.Causal(), qkv.Causal(align="end"),
    qkv.RoPE(), qkv.RoPE(rotary_dim=4), qkv.Softcap(3.0), qkv.Dropout(0.1, 3), qkv.ALiBi(),
    qkv.RandomBlocks(4, 2), qkv.RandomBlocks(4, 2, seed=1), qkv.Sinks(1.0), qkv.KeyLengths([3]),
    qkv.RelativeBias(np.zeros((8, 2)), True, 16), qkv.Segments(np.zeros(3, int)), qkv.Prefix(3),
    qkv.Strided(2), qkv.GlobalTokens([1]), qkv.Causal() | qkv.Prefix(2), ~qkv.Prefix(2),
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=repr)
def test_a_copy_looks_like_the_variant(variant) -> None:
    """One that was pickled showed its defaults."""
    assert repr(pickle.loads(pickle.dumps(variant))) == repr(variant)
    assert repr(copy.deepcopy(variant)) == repr(variant)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_named_pipe_among_the_kernels(tmp_path, monkeypatch) -> None:
    """Opening one waits for a writer."""
    monkeypatch.setenv("QKV_CACHE_DIR", str(tmp_path))
    os.chmod(tmp_path, 0o700)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert stored_files.read_file("pipe") is None


@pytest.mark.parametrize("name", ["numpy.ma", "torch"])
def test_a_library_that_another_thread_is_importing(name, monkeypatch) -> None:
    """A module without its names was asked for one of them, an AttributeError."""
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    out, pullback = qkv.vjp(ROW, ROW, ROW, qkv.Causal())
    assert (out[0] == ROW[0]).all()
    assert (pullback(np.zeros_like(out)).value == 0).all()
    assert (qkv.RoPE(rotary_dim=2).rotate(ROW, 0) == ROW).all()
