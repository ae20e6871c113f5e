"""Groups of two, three and four ranks, started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """`group(n)` is a group of n ranks, the same one each time."""
    known: dict[int, Ranks] = {}
    with ExitStack() as stack:

        def of_size(count: int) -> Ranks:
            if count not in known:
                ranks = Ranks(count, tmp_path_factory.mktemp("ranks"))
                known[count] = stack.enter_context(closing(ranks))
            return known[count]

        yield of_size
