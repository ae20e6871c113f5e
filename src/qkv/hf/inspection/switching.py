"""A model with qkv as its attention for a while, and with its own again afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from threading import Lock, current_thread, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch

from qkv.arguments.declarations import shown
from qkv.errors import ArgumentError, UnsupportedError

__all__ = [
    "SPREAD", "called_with", "inner_model", "is_in_training", "never_called", "switched",
    "uncompiled", "was_set_inside",
]  # fmt: skip

SPREAD = "qkv_sharded"
"""The implementation of a model inside of `qkv.hf.sharded`."""


def inner_model(
    module: torch.nn.Module, without: str = "Pass a model of transformers."
) -> torch.nn.Module:
    """The model of transformers that a module is, or wraps; `without` says what to do if none."""
    models = list(dict.fromkeys(_models(module)))
    if len(models) == 1:
        return models[0]
    if not models:
        raise ArgumentError(
            f"{type(module).__name__} has 0 models of transformers inside.", action=without
        )
    raise ArgumentError(
        f"{type(module).__name__} has {len(models)} models of transformers inside; "
        "one is looked into at a time.",
        [("inside", type(model).__name__) for model in models[:3]],
        "Pass the PreTrainedModel itself.",
    )


def called_with(module: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.nn.Module:
    """The module if it can be called with inputs of a model, else the model in it."""
    try:
        signature(module.forward).bind(**inputs)
    except TypeError:
        return inner_model(module)
    return module


def is_in_training(model: torch.nn.Module) -> bool:
    """Whether a model, or any part of it, is in training mode."""
    return any(module.training for module in model.modules())


def _models(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost ones."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        yield module
        return
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            f"the model is a {type(module).__name__}, not a torch.nn.Module.",
            action="Pass a model of transformers.",
        )
    for part in module.children():
        yield from _models(part)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Turn torch.compile off inside, because a traced layer has no values to record."""
    # Importing torch's compiler takes seconds, and without it nothing can be compiled.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    global _eager, _times_eager
    # One for all threads: of two, the first to leave would put back its own, and the last one that.
    with _holding:
        _times_eager += 1
        if _times_eager == 1:
            _eager = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        with _holding:
            _times_eager -= 1
            if not _times_eager:
                _eager.__exit__(None, None, None)


_eager: Any = None
_times_eager = 0
_holding = Lock()


@contextmanager
def switched(model: Any, implementation: str = "qkv") -> Iterator[None]:
    """The model with an implementation of attention in every part of it; then with its own.

    Raises
    ------
    UnsupportedError
        The model is spread over ranks, or switched by another thread: each would put back what it
        found, and the last one to leave would leave the model switched.
    """
    with _held(model):
        yield from _switched(model, implementation)


def _switched(model: Any, implementation: str) -> Iterator[None]:
    before = {id(config): (config, config._attn_implementation) for config in _configs(model)}
    if implementation != SPREAD and any(own == SPREAD for _, own in before.values()):
        raise UnsupportedError(
            f"{type(model).__name__} is spread over ranks, and would attend to this rank's rows "
            "alone.",
            action="Leave qkv.hf.sharded(...) first, or start it inside.",
        )
    try:
        model.set_attn_implementation(implementation)
        yield
    finally:
        for config, own in before.values():
            # Setting the property would overwrite the choice of sub-models that have their own.
            config._attn_implementation_internal = own


def never_called(model: Any, nothing: str) -> UnsupportedError:
    """The error of a switched model that ran without calling qkv; `nothing` says what is missing.

    Call it inside of `switched`, which puts the model's own implementation back.
    """
    name = type(model).__name__
    if was_set_inside(model):
        return UnsupportedError(
            f"the attention of {name} was set to {shown(model.config._attn_implementation)} "
            f"inside of the `with`, where it must be qkv: {nothing}.",
            action="Leave set_attn_implementation away; the model has its own again afterwards.",
        )
    return UnsupportedError(
        f"{name} computes its attention itself and never calls qkv: {nothing}.",
        [("implementation", "set to qkv, which this model does not ask for")],
        "Use a model that follows transformers' AttentionInterface.",
    )


def was_set_inside(model: Any) -> bool:
    """Whether a switched model has been given another implementation since."""
    other = model.config._attn_implementation not in ("qkv", SPREAD)
    return other and bool(model._can_set_attn_implementation())


_holders: WeakKeyDictionary[torch.nn.Module, list[int]] = WeakKeyDictionary()
"""The thread of each `with` that a model is switched by."""


@contextmanager
def _held(model: torch.nn.Module) -> Iterator[None]:
    """Keep other threads from switching the model."""
    with _holding:
        threads = _holders.setdefault(model, [])
        if any(thread != get_ident() for thread in threads):
            raise UnsupportedError(
                f"another thread inspects or changes this {type(model).__name__}, or has spread it "
                "over ranks.",
                [("this thread", current_thread().name)],
                "Wait for the end of its `with`, or use a copy of the model in each thread.",
            )
        thread = get_ident()
        threads.append(thread)
    try:
        yield
    finally:
        with _holding:
            threads.remove(thread)


def _configs(model: Any) -> Iterator[Any]:
    """The configurations of a model, of its parts, and those inside them."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    while configs:
        config = configs.pop()
        if not hasattr(config, "_attn_implementation_internal"):
            continue
        yield config
        parts: Mapping[str, Any] = getattr(config, "sub_configs", {})
        configs += [part for name in parts if (part := getattr(config, name, None)) is not None]
