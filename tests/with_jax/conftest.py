"""Everything here needs JAX; 64 bits are switched on for single tests, never for the process."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def x64() -> Iterator[None]:
    """64-bit JAX for one test."""
    import jax

    with jax.enable_x64(True):
        yield
