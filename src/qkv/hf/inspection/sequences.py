"""Which tokens the queries and keys of each layer are, from what modules are called with.

Names of modules do not say it: a layer whose keys are another sequence is called by many names, and
pictures may have as many rows as the text has tokens. A layer's own arguments tell whether its keys
come from its queries' sequence, and the arguments of the modules around it tell which sequence.
"""

from __future__ import annotations

import inspect as signatures
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qkv.hf.inspection.forward_calls import ThreadHook

__all__ = ["CallArguments", "Sequence"]

Array = NDArray[Any]

_OTHER_INPUT = re.compile(
    r"pixel|image|video|audio|feature|patch|grid|query_embeds|latent|waveform|input_values|spectro"
)
"""Arguments of modules that read something else than tokens."""
_NO_SEQUENCE = re.compile(r"position|residual|mask|bias|emb|alibi|rope|cos|sin|freq|value$")
"""Arguments of attention layers that are not a sequence that keys are made of.

Values are left out because some models add positions to queries and keys alone.
"""
_NAMED_CROSS = re.compile(r"cross_?att|encoder_attn|EncDecAttention", re.IGNORECASE)
"""Names of layers that certainly read another sequence, also when its keys are cached."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """The tokens of a layer's queries.

    Attributes
    ----------
    name : str or None
        The input of the model that they are: "input_ids", "decoder_input_ids"; None for pictures,
        sounds, learned queries, and where nothing says it.
    ids : integer array (batch, length) or None
    real : array (batch, length) or None
        0 where a row is padding.
    """

    name: str | None
    ids: Array | None
    real: Array | None


@dataclass(frozen=True, slots=True)
class _Given:
    """What one module was called with."""

    ids: dict[str, Array]
    masks: dict[str, Array]
    other_input: bool
    other_keys: bool

    @classmethod
    def of(
        cls, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Given:
        parameters = list(signatures.signature(type(module).forward).parameters)[1:]
        given = {**dict(zip(parameters, args, strict=False)), **kwargs}
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        ids = _rows(tensors, "input_ids")
        others = any(_OTHER_INPUT.search(name) for name in tensors)
        return cls(ids, _rows(tensors, "attention_mask"), others and not ids, _other_keys(tensors))


@dataclass(slots=True)
class CallArguments:
    """The arguments of the modules of a model, as far as they say what layers read."""

    model: torch.nn.Module
    names: dict[torch.nn.Module, str]
    _given: dict[torch.nn.Module, _Given] = field(default_factory=dict)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Look at this thread's calls of modules that have parts, inside the `with`."""
        enter = ThreadHook(self.enter)
        hooks = [
            module.register_forward_pre_hook(enter, with_kwargs=True)
            for module in self.names
            if next(module.children(), None) is not None
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def enter(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Read what a module is called with."""
        self._given[module] = _Given.of(module, args, kwargs)

    def same_sequence(self, module: torch.nn.Module) -> bool:
        """Whether the keys of an attention layer are made of what its queries are made of."""
        if _NAMED_CROSS.search(self.names[module]):
            return False
        given = self._given.get(module)
        return given is None or not given.other_keys

    def sequence_of(self, module: torch.nn.Module) -> Sequence:
        """What the nearest module around a layer that was called with tokens, or others, reads."""
        name = self.names[module]
        root = self._given.get(self.model)
        real = None
        for around in _around(name):
            given = self._given.get(self.model.get_submodule(around))
            if given is None or not around:
                continue
            if real is None:
                real = given.masks.get("attention_mask")
            if given.other_input:
                return Sequence(None, None, real)
            if "input_ids" in given.ids:
                ids = given.ids["input_ids"]
                return Sequence(self._input_named(ids, name), ids, real)
        if root is None or root.other_input:
            return Sequence(None, None, _first(real, root and root.masks.get("attention_mask")))
        prefix = "decoder_" if self._in_decoder(name) else ""
        input_name = f"{prefix}input_ids"
        return Sequence(
            input_name if input_name in root.ids else None,
            root.ids.get(input_name),
            _first(real, root.masks.get(f"{prefix}attention_mask")),
        )

    def mask_of_other_keys(self, module: torch.nn.Module) -> Array | None:
        """The mask (batch, length) of another sequence that keys are made of, 0 for padding."""
        for around in _around(self.names[module]):
            given = self._given.get(self.model.get_submodule(around))
            if given is not None and "encoder_attention_mask" in given.masks:
                return given.masks["encoder_attention_mask"]
        root = self._given.get(self.model)
        both = root is not None and self._in_decoder(self.names[module])
        return root.masks.get("attention_mask") if root is not None and both else None

    def _in_decoder(self, name: str) -> bool:
        config = getattr(self.model, "config", None)
        both = getattr(config, "is_encoder_decoder", False)
        return bool(both and re.search(r"(^|\.)decoder\.", name))

    def _input_named(self, ids: Array, name: str) -> str:
        """Which input of the model some ids are; those it made itself are the decoder's."""
        root = self._given.get(self.model)
        for input_name, theirs in (root.ids if root is not None else {}).items():
            other = input_name == "input_ids" and self._in_decoder(name)
            if not other and np.array_equal(theirs, ids):
                return input_name
        return "decoder_input_ids" if self._in_decoder(name) else "input_ids"


def _around(name: str) -> Iterator[str]:
    """Names of the modules around one, from the nearest to the whole model, which is ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _first(*masks: Any) -> Any:
    return next((one for one in masks if one is not None), None)


def _rows(tensors: dict[str, torch.Tensor], ending: str) -> dict[str, Array]:
    """Arguments (batch, length) of a kind, such as `input_ids` and `decoder_input_ids`."""
    names = {f"{prefix}{ending}" for prefix in ("", "decoder_", "encoder_")}
    return {
        name: np.array(x.detach().cpu().numpy())
        for name, x in tensors.items()
        if name in names and x.ndim == 2
    }


def _other_keys(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a layer is given a second sequence of rows, which its keys are made of."""
    rows = [
        x
        for name, x in tensors.items()
        if x.ndim == 3 and x.is_floating_point() and not _NO_SEQUENCE.search(name)
    ]
    if not rows:
        return False
    first, *others = rows
    return not all(
        x is first or (x.shape == first.shape and bool(torch.equal(x, first))) for x in others
    )
