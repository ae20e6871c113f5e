"""A record that was saved and loaded answers every question with the bits of the one saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import qkv
from qkv.backends import backends, register, unregister
from qkv.problem.building.builder import Shape
from qkv.variants import ALL

RNG = np.random.default_rng(0)
Q = RNG.normal(size=(2, 4, 30, 8)).astype(np.float32)
K = RNG.normal(size=(2, 2, 30, 8)).astype(np.float32)
INT8 = RNG.integers(-9, 9, size=(2, 2, 30, 8)).astype(np.int8)
SCALES = RNG.random((2, 2, 30)).astype(np.float32)
PAGES = RNG.normal(size=(6, 2, 10, 8)).astype(np.float32)
BIAS = RNG.normal(size=(30, 30)).astype(np.float32)

Case = tuple[tuple[Any, Any, Any], tuple[Any, ...], dict[str, Any]]


def _torch(dtype: torch.dtype) -> tuple[Any, Any, Any]:
    query, key = (torch.from_numpy(array).to(dtype) for array in (Q, K))
    return query, key, key


def _numpy(dtype: Any) -> tuple[Any, Any, Any]:
    return Q.astype(dtype), K.astype(dtype), K.astype(dtype)


CASES: dict[str, Case] = {
    "float32": (_numpy(np.float32), (qkv.Causal(),), {}),
    "float64": (_numpy(np.float64), (qkv.Causal(), qkv.Sinks(np.arange(4.0))), {}),
    "float16": (_numpy(np.float16), (qkv.ALiBi(), qkv.Softcap(5.0)), {}),
    "bfloat16": (_numpy(ml_dtypes.bfloat16), (qkv.RoPE(), qkv.Causal()), {"scale": 0.3}),
    "two dimensions": ((Q[0, 0], K[0, 0], K[0, 0]), (qkv.Causal(),), {}),
    "blhd": (
        tuple(np.ascontiguousarray(a.swapaxes(1, 2)) for a in (Q, K, K)),
        (qkv.RoPE(), qkv.SlidingWindow(5, 0)),
        {"layout": "blhd", "q_offset": np.array([3, 1]), "kv_offset": 1},
    ),
    "keys across": (
        (np.asfortranarray(Q), K.swapaxes(2, 3).copy().swapaxes(2, 3), K),
        (BIAS, BIAS > -1, qkv.KeyLengths(np.array([25, 30]))),
        {"q_offset": "start"},
    ),
    "torch": (_torch(torch.float32), (torch.from_numpy(BIAS), qkv.Sinks(torch.arange(4.0))), {}),
    "torch bfloat16": (_torch(torch.bfloat16), (qkv.Causal(), qkv.Dropout(0.3, 1)), {}),
    "torch's backend": (_torch(torch.float16), (qkv.Causal(),), {"backend": "torch"}),
    "blocked": (_numpy(np.float32), (qkv.Causal(),), {"backend": "blocked"}),
    "JAX": (tuple(jnp.asarray(a) for a in (Q, K, K)), (qkv.Causal(),), {}),
    "int8": (
        (
            Q[:, :, :1],
            qkv.Quantized(INT8, SCALES, np.ones((2, 8), np.float32)),
            qkv.Quantized(INT8, SCALES),
        ),
        (),
        {},
    ),
    "pages": ((Q[:, :, :1], *[qkv.Paged(PAGES, np.array([[0, 1], [3, 2]]))] * 2), (), {}),
}


def answers(record: qkv.Record) -> dict[str, Any]:
    """All that a record says of numbers."""
    keys, weights = record.top(3)
    many, of_many = record.top(300)
    return {
        "output": record.output,
        "lse": record.lse,
        "entropy": record.entropy,
        "max_weight": record.max_weight,
        "received": record.received,
        "top": keys,
        "weights of top": weights,
        "more than kernels find": many,
        "their weights": of_many,
        "mass": record.mass([0, 2]),
        "whole mass": record.mass(slice(None)),
        "mass_at": record.mass_at(-1),
        "weights": record.weights[...],
        "part of the weights": record.weights[..., :1, :7],
        "sum over queries": record.weights.sum(-2),
        "non_finite": record.non_finite.rows,
    }


def bits(array: Any) -> bytes:
    if isinstance(array, torch.Tensor) and array.dtype is torch.bfloat16:
        array = array.view(torch.int16)
    return np.asarray(array).tobytes()


def require_same(loaded: qkv.Record, saved: qkv.Record) -> None:
    there = answers(loaded)
    for name, expected in answers(saved).items():
        found = there[name]
        about = (type(found), found.dtype, tuple(found.shape))
        assert about == (type(expected), expected.dtype, tuple(expected.shape)), name
        assert bits(found) == bits(expected), name
    assert loaded.backend == saved.backend
    assert repr(loaded) == repr(saved)
    assert loaded.summary(batch=0) == saved.summary(batch=0)


@pytest.mark.slow
@pytest.mark.sampled("name", list(CASES), one_in=3)
def test_a_loaded_record_answers_with_the_same_bits(name: str, tmp_path: Path) -> None:
    operands, variants, options = CASES[name]
    record = qkv.inspect(*operands, *variants, **options)
    record.save(tmp_path / "r.safetensors")
    loaded = qkv.Record.load(tmp_path / "r.safetensors")
    require_same(loaded, record)
    # What was read can be written and read again.
    loaded.save(tmp_path / "s.safetensors")
    assert (tmp_path / "s.safetensors").read_bytes() == (tmp_path / "r.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        (qkv.Softcap(np.array(5.0)), {}),
        (qkv.Softcap(torch.tensor(5.0)), {}),
        (qkv.Sinks(np.array(0.5)), {}),
        (qkv.ALiBi(np.array(0.25)), {}),
        (qkv.Causal(), {"scale": np.array(0.3), "q_offset": np.array(1)}),
    ],
    ids=repr,
)
def test_an_array_without_dimensions_has_none_when_it_is_read(
    variant: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    record = qkv.inspect(Q[0], K[0], K[0], variant, **options)
    record.save(tmp_path / "r.safetensors")
    loaded = qkv.Record.load(tmp_path / "r.safetensors")
    assert bits(loaded.weights[...]) == bits(record.weights[...])
    model = qkv.ModelRecord("one layer", keep="weights")
    kept = model.add(Q[0], K[0], variant, name="layer 0", **options).weights[...]
    model.save(tmp_path / "m.safetensors")
    again = qkv.ModelRecord.load(tmp_path / "m.safetensors")
    assert bits(again[0].weights[...]) == bits(kept)


def test_a_record_of_a_prepared_call_is_that_of_a_checked_one(tmp_path: Path) -> None:
    for _ in range(3):
        record = qkv.inspect(Q[0, 0], K[0, 0], K[0, 0], qkv.Causal())
        record.save(tmp_path / "r.safetensors")
        require_same(qkv.Record.load(tmp_path / "r.safetensors"), record)


@pytest.mark.slow
def test_pictures_and_pages_are_the_same(tmp_path: Path) -> None:
    record = qkv.inspect(Q, K, K, qkv.Causal())
    record.save(tmp_path / "r.safetensors")
    loaded = qkv.Record.load(tmp_path / "r.safetensors")
    record.plot(tmp_path / "saved.svg", head=2, batch=1)
    loaded.plot(tmp_path / "loaded.svg", head=2, batch=1)
    record.plot_tiles(tmp_path / "saved tiles.svg")
    loaded.plot_tiles(tmp_path / "loaded tiles.svg")
    for picture in ("", " tiles"):
        pictures = [(tmp_path / f"{which}{picture}.svg") for which in ("saved", "loaded")]
        assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert loaded.to_html() == record.to_html()


@pytest.mark.slow
@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_variant_that_is_data_can_be_saved(cls: Any, tmp_path: Path) -> None:
    shape, path = Shape((2,), 4, 2, 30, 30, 8, 8), tmp_path / "r.safetensors"
    for variant in cls.examples(shape, np.random.default_rng(0)):
        record = qkv.inspect(Q, K, K, variant, backend="blocked")
        if cls is qkv.ScoreMod:
            with pytest.raises(qkv.UnsupportedError, match="ScoreMod cannot be kept"):
                record.save(path)
            assert list(tmp_path.iterdir()) == []
            continue
        record.save(path)
        loaded = qkv.Record.load(path)
        assert bits(loaded.weights[...]) == bits(record.weights[...])
        assert loaded.summary() == record.summary()


class FirstKeyOnly:
    """A variant of a caller's own."""

    def lower(self, builder: Any) -> None:
        builder.mask(builder.kv_index < 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "named"),
    [
        (qkv.ScoreMod(lambda s, b, h, i, j: s * 2), "ScoreMod"),
        (qkv.Mask(lambda b, h, i, j: i > j), "Mask of a function"),
        (qkv.Causal() | qkv.Mask(lambda b, h, i, j: i > j), "Mask of a function"),
        (FirstKeyOnly(), "FirstKeyOnly"),
    ],
)
def test_code_is_not_kept_and_the_file_stays_as_it_was(
    variant: Any, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.safetensors"
    path.write_bytes(b"something else")
    with pytest.raises(qkv.UnsupportedError, match=named) as raised:
        qkv.inspect(Q, K, K, variant).save(path)
    assert "qkv.Mask(array)" in raised.value.action
    assert path.read_bytes() == b"something else"
    assert list(tmp_path.iterdir()) == [path]


def test_a_backend_that_is_missing_is_named_and_another_answers(tmp_path: Path) -> None:
    path = tmp_path / "r.safetensors"
    here = next(backend for backend in backends() if backend.name == "blocked")
    elsewhere = type("Elsewhere", (type(here),), {"name": "elsewhere", "priority": -1000})()
    register(elsewhere)
    try:
        record = qkv.inspect(Q, K, K, qkv.Causal(), backend="elsewhere")
        record.save(path)
        require_same(qkv.Record.load(path), record)
    finally:
        unregister("elsewhere")
    loaded = qkv.Record.load(path)
    assert loaded.backend == "elsewhere"
    np.testing.assert_allclose(loaded.received, record.received, rtol=1e-5)
    assert bits(loaded.output) == bits(record.output)


def test_a_library_that_is_missing_is_replaced_by_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.safetensors"
    record = qkv.inspect(*_torch(torch.bfloat16), qkv.Causal())
    record.save(path)
    monkeypatch.delitem(qkv.arrays._LIBRARIES, "torch")
    monkeypatch.setitem(qkv.arrays._LAZY_LIBRARIES, "torch", _not_installed)
    loaded = qkv.Record.load(path)
    assert loaded.output.dtype == ml_dtypes.bfloat16
    assert loaded.output.tobytes() == bits(record.output)
    assert loaded.received.tobytes() == bits(record.received)


def _not_installed() -> Any:
    raise ImportError("No module named 'torch'")


# --- files of others -------------------------------------------------------------------------


def changed(path: Path, change: Any) -> None:
    """The file with other arrays or another header."""
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    arrays = load_file(path)
    with safe_open(path, "numpy") as file:
        about = json.loads(file.metadata()["qkv"])
    change(about, arrays)
    dense = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(dense, path, {"qkv": json.dumps(about)})


CHANGES: dict[str, Any] = {
    "a variant that is none": lambda a, _: a.update(variants={"items": [{"variant": "Record"}]}),
    "code": lambda a, _: a.update(
        variants={"items": [{"variant": "ScoreMod", "fields": {"fn": "print"}}]}
    ),
    "no variants": lambda a, _: a.update(variants=7),
    "a variant with a wrong number": lambda a, _: a.update(
        variants={"items": [{"variant": "Softcap", "fields": {"cap": -1.0}}]}
    ),
    "an unknown library": lambda a, _: a.update(library="os"),
    "no library": lambda a, _: a.pop("library"),
    "no options": lambda a, _: a.update(options={}),
    "a scale of text": lambda a, _: a["options"].update(scale="large"),
    "a layout that is none": lambda a, _: a["options"].update(layout="lbhd"),
    "operands that are none": lambda a, _: a.update(operands=[]),
    "axes twice": lambda a, _: a["operands"]["query"].update(order=[0, 0, 2, 3]),
    "axes of text": lambda a, _: a["operands"]["query"].update(order="0123"),
    "storage that is none": lambda a, _: a["operands"].update(
        key={"storage": "Path", "fields": {}}
    ),
    "an array that is missing": lambda a, _: a["operands"]["key"].update(array="nothing"),
    "fewer queries": lambda _, arrays: arrays.update(query=arrays["query"][:, :, :20]),
    "no queries": lambda _, arrays: arrays.update(query=arrays["query"][:, :, :0]),
    "fewer values": lambda _, arrays: arrays.update(value=arrays["value"][:, :, :20]),
    "narrower values": lambda _, arrays: arrays.update(value=arrays["value"][..., :3]),
    "another lse": lambda _, arrays: arrays.update(lse=arrays["lse"][..., :20]),
    "a wider lse": lambda _, arrays: arrays.update(lse=arrays["lse"].astype(np.float64)),
    "another output": lambda _, arrays: arrays.update(output=arrays["output"][:, :1]),
    "an output of integers": lambda _, arrays: arrays.update(
        output=arrays["output"].astype(np.int32)
    ),
    "no lse": lambda _, arrays: arrays.pop("lse"),
    "one statistic of three": lambda _, arrays: arrays.pop("rows.entropy"),
    "a statistic of another shape": lambda _, arrays: arrays.update(
        {"rows.entropy": arrays["rows.entropy"][0]}
    ),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "r.safetensors"
    qkv.inspect(Q, K, K, qkv.Causal()).save(path)
    return path


@pytest.mark.parametrize("name", CHANGES)
def test_files_that_do_not_fit_are_refused(name: str, saved: Path) -> None:
    changed(saved, CHANGES[name])
    with pytest.raises(qkv.FileError, match=r"is not a record of qkv\.inspect \("):
        qkv.Record.load(saved)


def test_a_newer_file_says_so(saved: Path) -> None:
    changed(saved, lambda about, _: about.update(version=2))
    with pytest.raises(qkv.FileError, match="has version 2; this reads 1 to 1"):
        qkv.Record.load(saved)


def test_broken_and_foreign_files_are_refused(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    other = tmp_path / "other.safetensors"
    for data in (b"", whole[:7], whole[:300], whole[:-1], whole + b"0", b"PK" + whole, b"0" * 99):
        other.write_bytes(data)
        with pytest.raises(qkv.FileError):
            qkv.Record.load(other)
    qkv.files.write_arrays(other, Q, K, K)
    with pytest.raises(qkv.FileError, match=r"but not a record of qkv\.inspect"):
        qkv.Record.load(other)
    model = qkv.ModelRecord("m")
    model.add(Q, K, name="layer 0")
    model.save(other)
    with pytest.raises(qkv.FileError, match=r"ModelRecord\.load"):
        qkv.Record.load(other)
    with pytest.raises(qkv.FileError, match=r"qkv\.Record\.load"):
        qkv.ModelRecord.load(saved)
    with pytest.raises(qkv.FileError, match="cannot be read"):
        qkv.Record.load(tmp_path / "missing.safetensors")
    with pytest.raises(qkv.FileError, match="is a folder"):
        qkv.Record.load(tmp_path)
    with pytest.raises(qkv.FileError, match="is a folder"):
        qkv.ModelRecord.load(tmp_path)
    with pytest.raises(qkv.FileError, match="cannot be written"):
        qkv.inspect(Q, K, K).save(tmp_path / "missing" / "r.safetensors")


def test_its_arrays_are_not_taken_for_those_of_a_plain_call(saved: Path) -> None:
    """Read as arrays, the causal mask would be lost."""
    with pytest.raises(qkv.FileError, match=r"qkv\.Record\.load"):
        qkv.files.read_arrays(saved)
