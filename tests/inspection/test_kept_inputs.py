"""Weights of a saved record are those that the record had, wherever it is opened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.inspection.models.model_record import ModelRecord, load
from qkv.inspection.records.variant_data import from_data, to_data
from qkv.problem.building.builder import Shape
from qkv.variants import ALL

RNG = np.random.default_rng(0)
Q = RNG.normal(size=(2, 4, 30, 8)).astype(np.float32)
K = RNG.normal(size=(2, 2, 30, 8)).astype(np.float32)
REAL = np.ones((2, 30), bool)
REAL[0, 25:] = False
LAYERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "causal": ((qkv.Causal(),), {}),
    "rotated": ((qkv.RoPE(), qkv.Causal(), qkv.SlidingWindow(9, None)), {"scale": 0.2}),
    "biased": ((qkv.ALiBi(), qkv.Sinks(np.arange(4.0)), qkv.Softcap(5.0)), {}),
    "joined": (((qkv.Causal() & qkv.SlidingWindow(4, 0)) | ~qkv.Prefix(3),), {}),
    "padded": ((qkv.KeyLengths(np.array([25, 30])),), {"real": REAL}),
    "dense": ((RNG.random((30, 30)) < 0.6, RNG.normal(size=(4, 30, 30))), {}),
    "dropped": ((qkv.Dropout(0.3, 1), qkv.Causal()), {"q_offset": 3, "kv_offset": 1}),
}


@pytest.mark.slow
@pytest.mark.sampled("name", list(LAYERS), one_in=3)
def test_weights_are_replayed_from_the_file(name: str, tmp_path: Path) -> None:
    variants, keywords = LAYERS[name]
    record = ModelRecord("m", keep=[1])
    record.add(Q, K, *variants, name="not kept", **keywords)
    record.add(Q, K, *variants, name=name, **keywords)
    record.save(tmp_path / "r.safetensors")
    again = load(tmp_path / "r.safetensors")
    np.testing.assert_array_equal(again[1].weights[...], record[1].weights[...])
    with pytest.raises(qkv.ArgumentError, match="kept no query and key"):
        again[0].weights  # noqa: B018
    # What was read can be written and read again.
    again.save(tmp_path / "s.safetensors")
    assert (tmp_path / "s.safetensors").read_bytes() == (tmp_path / "r.safetensors").read_bytes()


def test_weights_elsewhere_are_those_of_the_definition(tmp_path: Path) -> None:
    """The weights are those in another process too, from the file alone."""
    record = ModelRecord("m", keep="weights")
    record.add(Q, K, qkv.Causal(), name="layer 0")
    path = tmp_path / "r.safetensors"
    record.save(path)
    program = (
        "import sys, json\nfrom qkv.inspection.models.model_record import load\n"
        "print(json.dumps(load(sys.argv[1])[0].weights[1, 3, 7].tolist()))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    scores = Q[1, 3, 7].astype(float) @ K[1, 1].astype(float).T / 8**0.5
    exp = np.where(np.arange(30) <= 7, np.exp(scores), 0)
    np.testing.assert_allclose(json.loads(ran.stdout), exp / exp.sum(), rtol=1e-5)


def test_every_variant_is_data_and_an_object_again() -> None:
    shape = Shape((2,), 4, 2, 12, 12, 8, 8)
    kept = 0
    for cls in ALL:
        for variant in cls.examples(shape, np.random.default_rng(0)):
            arrays: dict[str, Any] = {}
            if cls is qkv.ScoreMod:
                with pytest.raises(qkv.UnsupportedError, match="ScoreMod cannot be kept"):
                    to_data(variant, arrays, "v")
                continue
            data = json.loads(json.dumps(to_data(variant, arrays, "v"), allow_nan=False))
            assert repr(from_data(data, arrays)) == repr(variant)
            kept += 1
    assert kept > 20


@pytest.mark.parametrize(
    "variants",
    [
        {"items": [{"variant": "ScoreMod", "fields": {"fn": "print"}}]},
        {"items": [{"variant": "Record", "fields": {}}]},
        {"items": [{"variant": "Causal", "fields": {"unknown": 1}}]},
        {"items": [{"variant": "Mask", "fields": {"array": {"array": "nothing"}}}]},
        {"items": [{"variant": "Softcap", "fields": {"cap": -1.0}}]},
        {"items": [[]]},
        {"items": "text"},
        7,
        None,
    ],
)
def test_hostile_files_are_refused(variants: Any, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    record = ModelRecord("m", keep="weights")
    record.add(Q, K, qkv.Causal(), name="layer 0")
    path = tmp_path / "r.safetensors"
    record.save(path)
    arrays = load_file(path)
    with safe_open(path, "numpy") as file:
        about = json.loads(file.metadata()["qkv"])
    about["kept"]["0"]["variants"] = variants
    save_file(arrays, path, {"qkv": json.dumps(about)})
    with pytest.raises(qkv.FileError):
        load(path)


@pytest.mark.parametrize("name", ["layers.0.q", "layers.0.k", "layers.0.lse"])
def test_arrays_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    record = ModelRecord("m", keep="weights")
    record.add(Q, K, qkv.Causal(), name="layer 0")
    path = tmp_path / "r.safetensors"
    record.save(path)
    arrays = load_file(path)
    with safe_open(path, "numpy") as file:
        about = file.metadata()["qkv"]
    for wrong in (arrays[name][:, :, :20], arrays[name][:, :0], arrays[name].reshape(-1)):
        save_file({**arrays, name: np.ascontiguousarray(wrong)}, path, {"qkv": about})
        with pytest.raises(qkv.FileError):
            load(path)
