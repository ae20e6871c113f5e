"""Check whether a model computes its attention with qkv."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import unwrap
from threading import get_ident
from typing import Any

import torch

from qkv.arguments.declarations import checked, shown
from qkv.errors import ArgumentError, QkvError, UnsupportedError
from qkv.hf.attention import observe
from qkv.hf.inspection.forward_calls import ThreadHook
from qkv.hf.layer_call import LayerCall

__all__ = [
    "NotUsedWarning", "SilentLayers", "Usage", "check", "computes_itself", "warn_of_silent",
]  # fmt: skip

_ATTENTION = re.compile(r"Attention(?!(Bias|Loss|MLP|Output|Structure)$)")
"""Matches class names of attention layers, but not of their parts."""


class NotUsedWarning(UserWarning):
    """A model, or some of its layers, compute attention without qkv."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The calls of qkv in one run of a model.

    Attributes
    ----------
    calls : dict
        Number of calls for each layer, by module name.
    silent : tuple of str
        Modules called attention that ran without a call of qkv inside.

    Examples
    --------
    >>> import qkv.hf
    >>> qkv.hf.Usage(calls={"layer.0": 1}, silent=("layer.1",)).complete
    False
    """

    calls: dict[str, int]
    silent: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Every layer that ran computes its attention here."""
        return bool(self.calls) and not self.silent


@checked
def check(model: torch.nn.Module, /, *args: Any, **inputs: Any) -> Usage:
    """Run a model once, without gradient, and count its calls of qkv.

    transformers lets any registered name be set for any model, also for those that never look at
    it (Bloom, DeBERTa-v2, Swin-v2): these go on as before, with no error. Such a model is warned
    about here.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With `attn_implementation="qkv"`.
    *args, **inputs
        What it is called with.

    Returns
    -------
    Usage

    Warns
    -----
    NotUsedWarning
        If it never calls qkv, or some of its attention layers do not.

    Raises
    ------
    UnsupportedError
        If a layer asks for what qkv does not compute.
    ArgumentError
        If the model raises an exception, which is the `__cause__` of this one.

    Notes
    -----
    Modules with "Attention" in the name of their class are taken for attention layers, but for
    such parts of them as AttentionOutput and AttentionMLP. Cost: one forward pass.

    Examples
    --------
    >>> import torch, qkv.hf
    >>> from transformers import GPT2Config, GPT2Model
    >>> qkv.hf.enable()
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> model.set_attn_implementation("qkv")
    >>> qkv.hf.check(model, input_ids=ids).complete
    True
    """
    names = {module: name for name, module in model.named_modules()}
    calls: Counter[str] = Counter()
    layers = SilentLayers(names)

    thread = get_ident()

    def count(call: LayerCall) -> None:
        if get_ident() != thread:
            return
        calls[names.get(call.module, type(call.module).__name__)] += 1
        layers.called()

    with torch.no_grad(), layers.followed(), observe(count):
        try:
            model(*args, **inputs)
        except UnsupportedError as error:
            # The model added its mask to scores of its own: the warning below explains that.
            if "mask" not in dict(error.seen) or calls or not layers.running:
                raise
            layers.leave()
        except (QkvError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # The check needs a run to its end; what was raised instead is the cause.
            raise ArgumentError(
                f"{type(model).__name__} raised {type(error).__name__} when it was called.",
                [
                    ("it says", (str(error).splitlines() or [""])[0][:200]),
                    *((f"argument {i}", _kind(value)) for i, value in enumerate(args)),
                    *((name, _kind(value)) for name, value in inputs.items()),
                ],
                "Pass what the model can be called with: model(*args, **inputs).",
            ) from error
    usage = Usage(dict(calls), layers.names)
    _warn(model, usage)
    return usage


def computes_itself(config: Any) -> bool:
    """Whether the models of a configuration have attention layers that ask for no function.

    Their code says so: no layer that writes to a cache names the table of transformers' functions.
    """
    configuration = str(type(config).__module__)
    if ".configuration_" not in configuration:
        return False
    try:
        code = import_module(configuration.replace(".configuration_", ".modeling_"))
    except ImportError:
        return False
    layers: list[Any] = [
        thing
        for name, thing in vars(code).items()
        if _ATTENTION.search(name) and getattr(thing, "__module__", "") == code.__name__
    ]
    names = [unwrap(x.forward).__code__.co_names for x in layers if hasattr(x, "forward")]
    writing = [n for n in names if "update" in n]
    return bool(writing) and not any("ALL_ATTENTION_FUNCTIONS" in n for n in writing)


def _kind(given: Any) -> str:
    if isinstance(given, torch.Tensor):
        return f"{given.dtype} tensor on {given.device}" + (
            "" if given.is_nested else f" {tuple(given.shape)}"
        )
    return f"{type(given).__name__} {shown(given)}"


class SilentLayers:
    """Attention layers that run and never call qkv.

    Parameters
    ----------
    modules : dict of torch.nn.Module to str
        All modules of a model with their names.

    Attributes
    ----------
    names : tuple of str
        The modules called attention that ran without a call of qkv inside.
    running : list
        Those that are running now, each with the number of calls when it began.
    """

    def __init__(self, modules: dict[torch.nn.Module, str]) -> None:
        self.running: list[tuple[str, int]] = []
        self._modules, self._calls = modules, 0
        self._silent: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """See the attributes of the class."""
        return tuple(self._silent)

    def called(self) -> None:
        """Count a call of qkv."""
        self._calls += 1

    def leave(self) -> None:
        """The innermost layer that runs is done."""
        name, before = self.running.pop()
        if before == self._calls and not any(s.startswith(f"{name}.") for s in self._silent):
            self._silent[name] = None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the layers that this thread runs inside the `with`."""

        def enter(module: torch.nn.Module, args: Any) -> None:
            self.running.append((self._modules[module], self._calls))

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            self.leave()

        hooks = []
        for module in self._modules:
            if _ATTENTION.search(type(module).__name__):
                hooks.append(module.register_forward_pre_hook(ThreadHook(enter)))
                hooks.append(module.register_forward_hook(ThreadHook(leave)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def warn_of_silent(model: torch.nn.Module, silent: tuple[str, ...], recorded: int) -> None:
    """Warn that a record lacks layers, if the model has some that never call qkv."""
    if silent:
        fact = _fact(type(model).__name__, silent)
        fact += f" The record has the {recorded} others alone."
        warnings.warn(fact, NotUsedWarning, stacklevel=4)


def _warn(model: Any, usage: Usage) -> None:
    if usage.complete:
        return
    name = type(model).__name__
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if usage.calls:
        fact = _fact(name, usage.silent)
    elif chosen == "qkv":
        fact = f'{name} accepts attn_implementation="qkv" and never calls it.'
    elif not getattr(model, "_can_set_attn_implementation", lambda: True)():
        fact = f"{name} computes attention itself, with no other implementation to choose."
    else:
        fact = f'{name} runs with attn_implementation="{chosen}"; set_attn_implementation("qkv").'
    warnings.warn(fact, NotUsedWarning, stacklevel=3)


def _fact(name: str, silent: tuple[str, ...]) -> str:
    """How many layers go their own way, and the first of them."""
    more = ", ..." if silent[3:] else ""
    return (
        f"{len(silent)} attention layers of {name} do not call qkv ({', '.join(silent[:3])}{more})."
    )
