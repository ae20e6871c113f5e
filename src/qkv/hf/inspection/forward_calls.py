"""Calls of a model's `forward`, and the numbers of the layers that are called in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import update_wrapper
from threading import Lock, get_ident, local
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from qkv.errors import UnsupportedError

__all__ = [
    "BackwardAfter",
    "LayerNumbers",
    "ThreadHook",
    "around_forward",
    "in_backward",
    "parts_of",
]

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
    """Run every `forward` of some models inside of `around(model, args, kwargs)`, which may give a
    function that is then called with what `forward` returned.

    Hooks would not do: some callers, such as sentence-transformers, call `model.forward` itself,
    which runs none.
    """
    before = [(model, vars(model).get("forward")) for model in models]
    try:
        for model, _ in before:
            setattr(model, "forward", _Surrounded(model, around))  # noqa: B010
        yield
    finally:
        for model, own in before:
            if own is None:
                vars(model).pop("forward", None)
            else:
                setattr(model, "forward", own)  # noqa: B010


class _Surrounded:
    """The `forward` of a model inside of `around_forward`.

    Copies of the model, and what is pickled of it, have the `forward` that it had before: this one
    would call the model that was copied.
    """

    def __init__(self, model: torch.nn.Module, around: Around) -> None:
        update_wrapper(self, model.forward)  # It takes over the attributes of another such one.
        self._inner, self._model, self._around = model.forward, model, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._around(self._model, args, kwargs) as told:
            output = self._inner(*args, **kwargs)
        if told is not None:
            told(output)
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        return _unchanged, (self._inner,)


def _unchanged(forward: Any) -> Any:
    return forward


class ThreadHook:
    """A function as a hook of a module, called in the thread that made it and in no other.

    Copies of the module, and what is pickled of it, have a hook that does nothing.

    Parameters
    ----------
    function : callable
        With the arguments of the hook; it changes none of them.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function, self._thread = function, get_ident()

    def __call__(self, *arguments: Any) -> None:
        if get_ident() == self._thread:
            self._function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadHook, (_nothing,)


def _nothing(*arguments: Any) -> None:
    pass


class BackwardAfter:
    """Raises an error in a backward pass that begins after a `with` and computes layers again.

    With gradient checkpointing it would compute them as they are outside of the `with`: gradients
    of another function, or an error of torch about shapes.
    """

    def __init__(self, name: str, model: torch.nn.Module) -> None:
        self.name, self.model, self.has_ended = name, model, False

    def watch(self, output: Any) -> None:
        """Look at what a model returned; the hook runs before the layers are computed again."""
        checkpointed = torch.is_grad_enabled() and any(
            getattr(module, "gradient_checkpointing", False) and module.training
            for module in self.model.modules()
        )
        for tensor in tree_leaves(output) if checkpointed else ():
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._require_open)

    def _require_open(self, _: torch.Tensor) -> None:
        if self.has_ended:
            raise UnsupportedError(
                f"backward runs after the `with` of {self.name}, and with gradient checkpointing "
                "it computes the layers again, without what the `with` did.",
                action="Call backward inside of the `with`, or "
                "model.gradient_checkpointing_disable().",
            )


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
    silent_runs : int
        How often none of its layers has called qkv then.
    """

    def __init__(self, model: torch.nn.Module, told: Callable[[Any], None] | None = None) -> None:
        self.runs = self.silent_runs = 0
        self._told = told
        self._names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
        self._numbers: dict[tuple[torch.nn.Module, int], int] = {}
        self._in_thread = _InThread()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._numbers)

    @contextmanager
    def around(self, model: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        """Surround a forward pass, as `around_forward` asks: the outermost call is a run."""
        here = self._in_thread
        if in_backward():
            yield
            return
        if not here.depth:
            here.calls.clear()
            self.runs += 1
        here.depth += 1
        try:
            yield self._told if here.depth == 1 else None
            self.silent_runs += here.depth == 1 and not here.calls
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
