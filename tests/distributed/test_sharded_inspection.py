"""Heads of a model whose sequence no rank holds, beside those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.test_sharded_models import LENGTH, inputs, made


def ids_that_repeat(given: dict[str, Any]) -> dict[str, Any]:
    """Tokens among which there are duplicates and repetitions."""
    generator = torch.Generator().manual_seed(5)
    given = {name: of for name, of in given.items() if name != "labels"}
    given["input_ids"] = torch.randint(1, 7, (2, LENGTH), generator=generator)
    return given


def recorded(rank: int, ranks: int, name: str, case: str) -> Any:
    """The table of heads, and what each layer has of the rank's rows."""
    import qkv.hf
    from qkv.distributed import Order

    order = Order.zigzag(LENGTH, ranks)
    model, given = made(name).eval(), ids_that_repeat(inputs(case))
    own = {
        k: order.shard(v, rank, axis=-1) for k, v in given.items() if isinstance(v, torch.Tensor)
    }
    with (
        torch.no_grad(),
        qkv.hf.sharded(model, order=order, timeout=60),
        qkv.hf.inspect(model) as record,
    ):
        model(**{**given, **own})
    assert model.config._attn_implementation == made(name).config._attn_implementation
    layers = [
        (layer.rows, layer.scores.counted, layer.received, *layer.top) for layer in record.layers
    ]
    return record.rows(), layers, record.summary()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("Llama", "plain"),
        ("Llama", "packed"),
        ("Mistral", "padded left"),
        ("Gemma2", "padded"),
        ("GptOss", "packed"),
    ],
)
@pytest.mark.one_in(5)
def test_heads_over_ranks_are_those_of_one_process(group: Any, name: str, case: str) -> None:
    import qkv.hf
    from qkv.distributed import Order

    model, given = made(name).eval(), ids_that_repeat(inputs(case))
    with torch.no_grad(), qkv.hf.inspect(model) as right:
        model(**given)
    found = group(2)(recorded, name, case)
    order = Order.zigzag(LENGTH, 2)
    for table, layers, summary in found:
        assert len(layers) == len(right)
        assert "induction" in summary
        for row, its in zip(table, right.rows(), strict=True):
            assert (row["kind"], row["also"]) == (its["kind"], its["also"])
            for score, mean in its.items():
                if isinstance(mean, float):
                    assert row[score] == pytest.approx(mean, rel=1e-7, abs=1e-9), score
    for n, layer in enumerate(right.layers):
        shards = [layers[n] for _, layers, _ in found]

        def whole(at: int, axis: int, name: str = "", shards: Any = shards) -> Any:
            parts = [shard[at][name] if name else shard[at] for shard in shards]
            return order.unshard(parts, axis=axis)

        for score, rows in layer.rows.items():
            np.testing.assert_allclose(whole(0, -1, score), rows, rtol=1e-7, atol=1e-9)
            np.testing.assert_array_equal(whole(1, -1, score), layer.scores.counted[score])
        np.testing.assert_allclose(whole(2, -1), layer.received, rtol=1e-7, atol=1e-9)
        numbers, weights = layer.top
        np.testing.assert_allclose(whole(4, -2), weights, rtol=1e-7, atol=1e-9)
        np.testing.assert_array_equal(whole(3, -2), numbers)


def recorded_under_autocast(rank: int, ranks: int) -> Any:
    """The table of heads of a float32 model, and the observed call of its first layer, used."""
    import qkv.hf
    from qkv.distributed import Order
    from qkv.hf.sharding.layers import sharding_of

    order, calls = Order.contiguous(LENGTH, ranks), []
    model = made("Llama").float().eval()
    own = order.shard(ids_that_repeat(inputs("plain"))["input_ids"], rank, axis=-1)
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        qkv.hf.sharded(model, order=order, timeout=60),
    ):
        with qkv.hf.inspect(model) as record:
            model(own)
        sharding = sharding_of(model)
        assert sharding is not None
        with sharding.observed(calls.append):
            model(own)
    call = calls[0]
    return record.rows(), {each.dtype for each in (call.query, call.key, call.value)}, call.output()


def test_a_model_under_autocast(group: Any) -> None:
    """Rotated queries and keys are float32 there, and values bfloat16."""
    import qkv.hf

    model, given = made("Llama").float().eval(), ids_that_repeat(inputs("plain"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), qkv.hf.inspect(model) as right:
        model(**given)
    for table, dtypes, output in group(2)(recorded_under_autocast):
        assert dtypes == {torch.bfloat16}
        assert torch.isfinite(output).all()
        for row, its in zip(table, right.rows(), strict=True):
            assert row["entropy"] == pytest.approx(its["entropy"], abs=0.02)
            assert row["previous"] == pytest.approx(its["previous"], abs=0.02)


def refused(rank: int, ranks: int, what: str, folder: str) -> str:
    import qkv.hf
    from qkv.distributed import Order

    order = Order.contiguous(LENGTH, ranks)
    model = made("Llama").eval()
    own = order.shard(inputs("plain")["input_ids"], rank, axis=-1)
    try:
        if what == "changed outside":
            with qkv.hf.intervene(model, {(0, 0): "off"}), qkv.hf.sharded(model, order=order):
                model(own)
        with qkv.hf.sharded(model, order=order, timeout=60):
            if what == "changed inside":
                with qkv.hf.intervene(model, {(0, 0): "off"}):
                    model(own)
            keep: Any = "weights" if what == "kept" else None
            with torch.no_grad(), qkv.hf.inspect(model, keep=keep) as record:
                model(own)
        if what == "saved":
            record.save(Path(folder) / "record.safetensors")
        if what == "page":
            record.to_html()
        if what == "weights":
            _ = record[0].weights
    except qkv.QkvError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("kept", "asks for weights of a sequence that no rank holds"),
        ("weights", "kept no query and key"),
        ("saved", "cannot be written as that of a whole sequence"),
        ("page", "cannot be shown as a page as that of a whole sequence"),
        ("changed inside", "is spread over ranks, and would attend to this rank's rows alone"),
        ("changed outside", "has heads that qkv.hf.intervene changes"),
    ],
)
@pytest.mark.one_in(3)
def test_what_no_rank_can_give_is_said(group: Any, what: str, words: str, tmp_path: Path) -> None:
    for said in group(2)(refused, what, str(tmp_path)):
        assert words in said, said
