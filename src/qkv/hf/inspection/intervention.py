"""Heads of a transformers model changed while it runs: what a head is for, not where it looks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Literal, TypeAlias

import torch

from qkv.arguments.declarations import is_integer, shown
from qkv.errors import ArgumentError
from qkv.hf.attention import change_outputs, observe
from qkv.hf.inspection.forward_calls import BackwardAfter, LayerNumbers, around_forward, parts_of
from qkv.hf.inspection.switching import (
    inner_model,
    never_called,
    switched,
    uncompiled,
    was_set_inside,
)
from qkv.hf.layer_call import LayerCall
from qkv.interventions import HeadChange, HeadInputs, changed_heads

__all__ = ["Change", "CopyFrom", "intervene"]


class CopyFrom:
    """Weights of another prompt: what the model is called with for it.

    Parameters
    ----------
    *args, **inputs
        As for the model, with as many tokens as the prompt that is run.

    Examples
    --------
    >>> CopyFrom(input_ids=torch.tensor([[1, 2, 3]]))
    CopyFrom(input_ids)
    """

    def __init__(self, *args: Any, **inputs: Any) -> None:
        self.args = args
        self.inputs = inputs

    def __repr__(self) -> str:
        parts = [f"{len(self.args)} arguments"] if self.args else []
        return f"CopyFrom({', '.join([*parts, *self.inputs])})"


Change: TypeAlias = Literal["off", "uniform"] | CopyFrom


@contextmanager
def intervene(model: torch.nn.Module, changes: Mapping[tuple[int, int], Change]) -> Iterator[None]:
    """Run a model with some of its heads switched off, made uniform, or given other weights.

        with qkv.hf.intervene(model, {(5, 1): "off"}):
            logits = model(**inputs).logits

    Parameters
    ----------
    model : transformers.PreTrainedModel, or a module with one inside
        Loaded with any attention implementation. It is switched to qkv inside the `with`, and is as
        it was afterwards, also after an error.
    changes : mapping of (layer, head) to change
        Layers as `qkv.hf.inspect` numbers them, in the order in which the model first calls them,
        and query heads, both from 0. Other models that run meanwhile are not changed.
        "off": the head writes 0. "uniform": equal weights on all keys that its masks allow,
        without biases and sinks. `CopyFrom(**inputs)`: the weights that it has on another prompt
        of the same length, which is run first, unchanged.

    Raises
    ------
    ArgumentError
        There is no such layer or head; that of a layer is known when the model has run.
    ShapeError
        The other prompt has another length, or is a batch of more rows.
    UnsupportedError
        The model computes its attention without asking for an implementation. A backward pass that
        computes layers again (gradient checkpointing) begins after the `with`.

    Notes
    -----
    The output of a head is changed before the layer's output projection. Gradients go through it.
    Weights that `output_attentions=True` returns are those before the change. Cost: one more
    attention of the layer for "uniform", and for each other prompt. Source: `qkv.interventions`.

    Examples
    --------
    >>> import torch, qkv.hf
    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2)).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> before = model(ids).last_hidden_state
    >>> with qkv.hf.intervene(model, {(0, 1): "off"}):
    ...     without = model(ids).last_hidden_state
    >>> torch.equal(before, without), torch.equal(before, model(ids).last_hidden_state)
    (False, True)
    """
    from qkv.hf import enable

    enable()
    inner = inner_model(model)
    wanted = _checked(changes)
    after = BackwardAfter("qkv.hf.intervene", inner)
    layers = LayerNumbers(inner, after.watch)
    with switched(inner), uncompiled(), around_forward(parts_of(inner), layers.around):
        copied = _copied(inner, wanted, layers)
        layers.runs = layers.silent_runs = 0
        try:
            with change_outputs(_Run(layers, wanted, copied).change):
                yield
        finally:
            after.has_ended = True
        _require_layers(inner, wanted, layers)


def _checked(changes: Any) -> dict[tuple[int, int], Change]:
    checked: dict[tuple[int, int], Change] = {}
    try:
        changes = dict(changes)
    except (TypeError, ValueError):
        raise ArgumentError(
            f"changes={shown(changes)} is not a dict by layer and head.",
            action="Pass {(layer, head): change}.",
        ) from None
    for place, change in changes.items():
        pair = isinstance(place, tuple) and len(place) == 2
        if not pair or not all(map(is_integer, place)):
            raise ArgumentError(
                f"{shown(place)} is not a pair of layer and head.",
                action="Pass {(layer, head): ...}.",
            )
        if min(place) < 0:
            # How many layers there are is known when the model has run.
            raise ArgumentError(
                f"{shown(place)} has a negative number; layers and heads count from 0 here.",
                action="Count from 0, as record.heads() does.",
            )
        is_named = isinstance(change, str) and change in ("off", "uniform")
        if not is_named and not isinstance(change, CopyFrom):
            raise ArgumentError(
                f"{shown(change)} is not a change of a head.",
                action='Use "off", "uniform", or qkv.hf.CopyFrom(**inputs).',
            )
        checked[int(place[0]), int(place[1])] = change
    return checked


def _copied(
    model: torch.nn.Module, changes: Mapping[tuple[int, int], Change], layers: LayerNumbers
) -> dict[tuple[int, int], HeadInputs]:
    """The inputs of the layers whose weights are copied, on their own prompts."""
    inputs: dict[tuple[int, int], HeadInputs] = {}
    prompts: dict[int, CopyFrom] = {
        id(change): change for change in changes.values() if isinstance(change, CopyFrom)
    }
    thread = get_ident()
    for prompt in prompts.values():
        places = [place for place, change in changes.items() if change is prompt]

        def keep(call: LayerCall, places: list[tuple[int, int]] = places) -> None:
            layer = layers.number(call.module) if get_ident() == thread else None
            here = [place for place in places if place[0] == layer]
            if here:
                # Copies, because a cache may write to these keys again.
                inputs.update(dict.fromkeys(here, _inputs(call.kept())))

        with torch.no_grad(), observe(keep):
            model(*prompt.args, **prompt.inputs)
    return inputs


def _inputs(call: LayerCall) -> HeadInputs:
    """The inputs of a layer's heads, from a call of plain tensors."""
    return HeadInputs(call.query, call.key, call.variants, call.options)


@dataclass(frozen=True, slots=True)
class _Run:
    """What becomes of the heads of a model."""

    layers: LayerNumbers
    changes: Mapping[tuple[int, int], Change]
    copied: Mapping[tuple[int, int], HeadInputs]

    def change(self, call: LayerCall, output: torch.Tensor) -> torch.Tensor:
        """The output of a layer, (batch, q_len, num_heads, v_head_dim)."""
        layer = self.layers.number(call.module)
        here: dict[int, HeadChange] = {}
        for (index, head), change in self.changes.items():
            if index == layer:
                other = self.copied.get((index, head))
                here[head] = change if not isinstance(change, CopyFrom) else _required(other)
        if not here:
            return output
        plain = call.dense()
        heads_first = output.transpose(1, 2)
        changed: torch.Tensor = changed_heads(heads_first, _inputs(plain), plain.value, here)
        return changed.transpose(1, 2).contiguous()


def _require_layers(
    model: torch.nn.Module, changes: Mapping[tuple[int, int], Change], layers: LayerNumbers
) -> None:
    """Complain of layers that were not called, if the model was."""
    name, count = type(model).__name__, len(layers)
    silent = layers.silent_runs if was_set_inside(model) else 0
    if silent or (layers.runs and not count):
        calls = f" in {silent} of {layers.runs} calls" if silent < layers.runs and silent else ""
        raise never_called(model, f"nothing was changed{calls}")
    missing = sorted({layer for layer, _ in changes if layer >= count})
    if count and missing:
        raise ArgumentError(
            f"layer {missing[0]} does not exist: {name} called {count} layers.",
            action=f"Choose from 0 to {count - 1}.",
        )


def _required(inputs: HeadInputs | None) -> HeadInputs:
    if inputs is None:
        raise ArgumentError(
            "the other prompt did not reach this layer.",
            action="Copy from a prompt that the whole model reads.",
        )
    return inputs
