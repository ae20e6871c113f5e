"""Kernels of matrix tiles that only some processors run, emitted and assembled everywhere."""

from dataclasses import replace

import numpy as np
import pytest
from test_assembly import LINUX, compiled, number_of, straight_lines

import qkv
from qkv.backends.cpu.backward.layout import BackwardKey, TableGradient
from qkv.backends.cpu.machine.host import Host
from qkv.backends.cpu.machine.tiling import TileShape
from qkv.backends.cpu.plan.kernel_spec import kernel_spec
from qkv.backends.cpu.replay.layout import ReplayKey
from qkv.backends.cpu.split_bf16.backward import emit_split_backward
from qkv.backends.cpu.split_bf16.choice import split_shape
from qkv.backends.cpu.split_bf16.replay import emit_split_replay
from qkv.problem.building.check import check
from qkv.problem.spec import Spec
from qkv.testing import DTYPES

CPU = "sapphirerapids"
VARIANTS = {
    "nothing": (),
    "causal": (qkv.Causal(),),
    "softcap": (qkv.Softcap(9.0), qkv.SlidingWindow(5, 0)),
    "dropout": (qkv.Dropout(0.5, seed=1), qkv.Mask(np.eye(4, dtype=bool))),
}


def tile_shape(dtype: str) -> TileShape:
    here = Host(CPU, "", "amx")
    shape = here.bfloat16_shape if dtype == "bfloat16" else split_shape(here, dtype)
    assert shape
    return replace(shape, q_blocks_per_task=1)


def spec_of(dtype: str, *variants: object) -> Spec:
    array = np.zeros((1, 4, 4), DTYPES[dtype])
    return check(array, array, array, variants).spec


def products_and_loads(text: str) -> list[tuple[int, int]]:
    """The products and the loads in each stretch without a label that multiplies tiles."""
    lines = straight_lines(text)
    found = [(number_of(line, "tdpbf16ps"), number_of(line, "tileloadd")) for line in lines]
    return [pair for pair in found if pair[0]]


@pytest.mark.slow
@pytest.mark.sampled("variants", list(VARIANTS.values()), one_in=4)
@pytest.mark.parametrize(
    ("dtype", "scores", "sums"),
    [("float32", 6, 6), ("float16", 4, 3), ("bfloat16", 1, 1)],
)
def test_products_of_the_backward_pass_share_tiles(dtype, scores, sums, variants) -> None:
    """Two by two tiles of each pair of parts, and no tile for less than one product."""
    spec = spec_of(dtype, *variants)
    shape = replace(tile_shape(dtype), vectors=4)
    key = BackwardKey(kernel_spec(spec), shape, 32, False, "float32", dtype)
    text = compiled(emit_split_backward(key), LINUX, CPU)
    found = products_and_loads(text)
    assert {4 * scores, 4 * sums} <= {products for products, _ in found}
    assert all(products % 4 == 0 and loads <= products for products, loads in found)
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1


def test_a_table_in_the_backward_pass_of_tiles() -> None:
    spec = spec_of("bfloat16", qkv.Bias(np.zeros((4, 4), np.float32)))
    (table,) = spec.tables
    key = BackwardKey(
        kernel_spec(spec), replace(tile_shape("bfloat16"), vectors=4), 32, False, "bfloat16",
        "bfloat16", (TableGradient(table.name, wide=True),),
    )  # fmt: skip
    assert products_and_loads(compiled(emit_split_backward(key), LINUX, CPU))


@pytest.mark.slow
@pytest.mark.parametrize("question", ["sums", "top", "received"])
@pytest.mark.parametrize(("dtype", "scores"), [("float32", 6), ("float16", 4)])
def test_products_of_a_replay_share_tiles(question, dtype, scores) -> None:
    spec = replace(kernel_spec(spec_of(dtype, qkv.Causal())), dropout=False)
    key = ReplayKey(question, spec, tile_shape(dtype), 32, False, False)
    text = compiled(emit_split_replay(key), LINUX, CPU)
    found = products_and_loads(text)
    assert found
    assert all(4 * scores == products > loads for products, loads in found)
