"""Hypothesis draws the same examples everywhere, and keeps no database."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "laws",
    derandomize=True,
    max_examples=10,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("laws")


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend, once more where masks are read although problems are small."""
    name, _, masks_read = str(request.param).partition(", ")
    if masks_read:
        request.getfixturevalue("masks_of_few_pairs_are_read")
    return name
