"""What is kept of earlier calls is forgotten, for tests that count it or that change the code."""

import sys

from qkv import _pull_back, _recall


def forget_prepared_calls() -> None:
    """As in a process that has made no call yet."""
    tables = [
        _recall._prepared, _recall._growing, _recall._seen, _pull_back._prepared, _pull_back._seen,
    ]  # fmt: skip
    tensors = sys.modules.get("qkv.bridges.torch_recall")  # not there before qkv meets a tensor
    if tensors is not None:
        tables += [tensors._known, tensors._latest]
    for table in tables:
        table.clear()
