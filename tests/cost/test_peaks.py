"""The machine's ceilings: what their code does, never how fast."""

import numpy as np
import pytest

from qkv.backends.cpu.compiler.compile import parsed
from qkv.backends.cpu.machine.host import host
from qkv.cost import peaks


def test_a_peak_counts_the_multiply_adds_that_it_runs() -> None:
    has = peaks._features()
    families = [family for kind in peaks.PRODUCTS.values() for family in kind]
    for product in {product for family in families for product in family}:
        if product.feature not in has:
            continue
        tiles = not product.total
        source = peaks._tile_source(product) if tiles else peaks._product_source(product)
        module, _ = parsed(source, host())
        calls = str(module).count(f"@{product.call}(") - 1
        assert calls == (peaks._TILE_CHAINS if tiles else peaks._CHAINS) * peaks._REPEATS
        assert peaks._of(product, 2).measure() > 1e8


@pytest.mark.slow
def test_a_read_takes_every_byte_once() -> None:
    """What the job leaves is the last of its eight sums over the last chunk."""
    words = np.random.default_rng(0).integers(-(2**62), 2**62, (3, peaks._CHUNK // 512, 8, 8))
    block = peaks._Block(3, words)
    peaks._compiled(peaks._read_source()).run(block, 0)
    left = block._kept[0]
    assert left[0] == 4, "three tasks, and one question too many"
    left_sum = left[peaks._UNUSED : peaks._UNUSED + 8]
    np.testing.assert_array_equal(left_sum, words[2, :, 7].sum(axis=0))
    assert peaks.read_ceiling(2**22, 2).measure() > 1e8
