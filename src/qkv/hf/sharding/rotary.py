"""Rotary frequencies that depend on the length of the sequence, of which a rank holds some rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch

from qkv.errors import UnsupportedError
from qkv.hf.sharding.inputs import ShardedInputs

__all__ = ["rotated_as_whole"]

Tensor = torch.Tensor


@contextmanager
def rotated_as_whole(model: torch.nn.Module, inputs: ShardedInputs) -> Iterator[None]:
    """Let "dynamic" and "longrope" frequencies be chosen for the sequence of all ranks.

    transformers chooses them by the largest position that a rotary module is called with. So each
    is called with the last position of all ranks as one row more, which is taken off again.
    """

    def before(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given = {**dict(zip(("x", "position_ids"), args, strict=False)), **kwargs}
        positions = given.get("position_ids")
        if not isinstance(positions, Tensor) or positions.ndim != 2 or len(args) > 2:
            _refuse(module)
        last = positions.new_full((positions.shape[0], 1), inputs.last_position)
        longer = torch.cat([positions, last], 1)
        if len(args) > 1:
            return (args[0], longer), kwargs
        return args, {**kwargs, "position_ids": longer}

    def after(module: torch.nn.Module, _args: Any, found: Any) -> Any:
        if isinstance(found, Tensor):
            return found[..., :-1, :]
        if not isinstance(found, tuple):
            _refuse(module)
        return tuple(of[..., :-1, :] for of in found)

    with ExitStack() as stack:
        for part in model.modules():
            if _depends_on_length(part):
                stack.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(part.register_forward_hook(after).remove)
        yield


def _depends_on_length(part: torch.nn.Module) -> bool:
    kinds = getattr(part, "rope_type", None)
    every = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(of, str) and ("dynamic" in of or of == "longrope") for of in every)


def _refuse(module: torch.nn.Module) -> NoReturn:
    raise UnsupportedError(
        f"{type(module).__name__} chooses frequencies by the length of the sequence, in a way that "
        "is not known.",
        action="Run it in one process.",
    )
