"""Calls of a model's `forward`, and the numbers of the layers that are called in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from threading import Lock, local
from typing import Any

import torch

from qkv.errors import UnsupportedError

__all__ = ["LayerNumbers", "around_forward", "in_backward", "parts_of"]

Around = Callable[
    [torch.nn.Module, tuple[Any, ...], Mapping[str, Any]], AbstractContextManager[Any]
]


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def parts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model and the models of transformers in it, which may also be called alone."""
    from transformers import PreTrainedModel

    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


@contextmanager
def around_forward(models: Iterable[torch.nn.Module], around: Around) -> Iterator[None]:
    """Run every `forward` of some models inside of `around(model, args, kwargs)`.

    Hooks would not do: some callers, such as sentence-transformers, call `model.forward` itself,
    which runs none.
    """
    before = [(model, vars(model).get("forward")) for model in models]
    try:
        for model, _ in before:
            setattr(model, "forward", _surrounded(model, around))  # noqa: B010
        yield
    finally:
        for model, own in before:
            if own is None:
                vars(model).pop("forward", None)
            else:
                setattr(model, "forward", own)  # noqa: B010


def _surrounded(model: torch.nn.Module, around: Around) -> Callable[..., Any]:
    inner = model.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with around(model, args, kwargs):
            return inner(*args, **kwargs)

    return forward


class _InThread(local):
    """What one thread is in."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: Counter[torch.nn.Module] = Counter()


class LayerNumbers:
    """Numbers of a model's layers, in the order in which they are first called.

    A layer is a module, or the nth call of a module that one run of the model calls several times,
    as ALBERT does. Its number stays what it is in later runs, those of parts of the model, and
    those in other threads.

    Attributes
    ----------
    runs : int
        How often the model, or a part of it alone, has been called.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.runs = 0
        self._names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
        self._numbers: dict[tuple[torch.nn.Module, int], int] = {}
        self._in_thread = _InThread()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._numbers)

    @contextmanager
    def around(self, model: Any, args: Any, kwargs: Any) -> Iterator[None]:
        """For `around_forward`: the outermost call is a run."""
        here = self._in_thread
        if in_backward():
            yield
            return
        if not here.depth:
            here.calls.clear()
            self.runs += 1
        here.depth += 1
        try:
            yield
        finally:
            here.depth -= 1

    def number(self, module: torch.nn.Module) -> int | None:
        """The number of a layer that is being called; None if it is no layer of this model.

        Raises
        ------
        UnsupportedError
            The module is called several times in a run, and which of these calls this is cannot be
            told: in a backward pass, or outside of the model.
        """
        if module not in self._names:
            return None
        here = self._in_thread
        if in_backward() or not here.depth:
            with self._lock:
                calls = sum(of is module for of, _ in self._numbers)
            if calls > 1 or self._names[module] > 1:
                raise UnsupportedError(
                    f"{type(module).__name__} is called several times in a run, and here by "
                    f"{'a backward pass' if in_backward() else 'none'}; which call that is cannot "
                    "be told.",
                    action="Switch activation checkpointing off, and call the model itself.",
                )
            nth = 0
        else:
            nth = here.calls[module]
            here.calls[module] += 1
        with self._lock:
            return self._numbers.setdefault((module, nth), len(self._numbers))
