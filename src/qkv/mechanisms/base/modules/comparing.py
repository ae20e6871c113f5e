"""Mechanisms beside the module of transformers that they were read from, on random input."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from qkv.errors import UnsupportedError
from qkv.mechanisms.base.attention import AttentionMechanism
from qkv.mechanisms.base.mechanism import Mechanism
from qkv.variants import RoPE

if TYPE_CHECKING:
    import torch

__all__ = ["causal_mask", "closest", "decoder_run", "largest_difference", "rotary_embeddings"]

TOKENS = 48
SIZES_OF_SCORES = (1.0, 40.0, 1000.0)
"""Root mean squares of scores: a soft cap, or limits of queries, only show when these are large."""
TOLERANCE = 2e-3
"""The largest difference that counts as rounding, as a share of the largest output. Rounding to
float32 stays below a tenth of it where scores are 1,000."""

_Read = TypeVar("_Read", bound=Mechanism)
Run = Callable[[Any, "torch.Tensor"], Any]
"""The output of a module, or a tuple that begins with it, for an input (2, n, embed_dim)."""


def closest(
    module: torch.nn.Module, candidates: Sequence[tuple[str, _Read]], run: Run, width: int
) -> _Read:
    """The first of the candidates whose outputs are those of the module.

    Parameters
    ----------
    module : torch.nn.Module
        It is copied, in float32 (or float64) and in evaluation, and not changed.
    candidates : sequence of (what distinguishes it, mechanism)
    run : callable
        Calls the copy.
    width : int
        embed_dim.

    Raises
    ------
    UnsupportedError
        The module computes something else than every candidate, or cannot be called by itself.

    Notes
    -----
    Source of the input: torch.Generator with seed 0; 2 sequences of 48 tokens at three scales.
    """
    differences = []
    for what, mechanism in candidates:
        difference = largest_difference(mechanism, module, run, width)
        if difference <= TOLERANCE:
            return mechanism
        differences.append((what, f"differs by up to {difference:.2g} of the largest output"))
    raise UnsupportedError(
        f"{type(module).__name__} computes something that {candidates[0][1].name} does not, as a "
        "comparison of both on random input shows.",
        differences,
        "Call the module itself, or qkv.attention with the variants that its forward applies.",
    )


def largest_difference(
    mechanism: Mechanism, module: torch.nn.Module, run: Run, width: int
) -> float:
    """The largest difference of outputs, relative to the module's largest; inf if not finite."""
    import torch

    own_dtype = next((p.dtype for p in module.parameters()), torch.float32)
    dtype = torch.float64 if own_dtype == torch.float64 else torch.float32
    copied = deepcopy(module).to("cpu", dtype).eval()
    for part in copied.modules():
        # What the caller's hooks see are calls of the module itself.
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    config = getattr(copied, "config", None)
    if config is not None:
        config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TOKENS, width, generator=generator, dtype=torch.float64).to(dtype)
    worst = 0.0
    with torch.no_grad():
        for gain in _gains(mechanism, x):
            theirs = _called(run, copied, x * gain)
            theirs = theirs[0] if isinstance(theirs, tuple) else theirs
            ours = mechanism(x * gain)
            if ours.shape != theirs.shape or not torch.isfinite(theirs).all():
                return math.inf
            difference = float((ours - theirs).abs().max()) / float(theirs.abs().max() or 1.0)
            worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def _called(run: Run, module: Any, x: torch.Tensor) -> Any:
    try:
        return run(module, x)
    except (TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"{type(module).__name__} cannot be called as modules of its kind are, so that it "
            "cannot be compared.",
            [(type(error).__name__, str(error)[:200])],
            "Call the module itself, or pass one of the class that the loader names.",
        ) from error


def _gains(mechanism: Mechanism, x: torch.Tensor) -> list[float]:
    """Factors of x, for attention those at which scores have the sizes that are wanted."""
    if not isinstance(mechanism, AttentionMechanism):
        return [1.0, 8.0]
    q, k, _ = mechanism.heads(x, x, x)
    groups = q.shape[-3] // k.shape[-3]
    scores = q @ k.repeat_interleave(groups, -3).transpose(-1, -2)
    scale = q.shape[-1] ** -0.5 if mechanism.scale is None else mechanism.scale
    size = float(scores.square().mean().sqrt()) * abs(scale)
    if not 0 < size < math.inf:
        return [1.0]
    return [math.sqrt(wanted / size) for wanted in SIZES_OF_SCORES]


def decoder_run(
    rope: RoPE | None, layer_type: str | None, left: int | None = None, *, causal: bool = True
) -> Run:
    """How the decoder layers of transformers call their attention modules.

    Parameters
    ----------
    rope, layer_type
        As for `rotary_embeddings`.
    left : int, optional
        Window, as in `causal_mask`.
    causal : bool
        Whether there is a mask.
    """

    def run(module: Any, x: torch.Tensor) -> Any:
        import torch

        given = {
            "attention_mask": causal_mask(x.shape[1], left, x.dtype) if causal else None,
            "position_ids": torch.arange(x.shape[1])[None],
            "position_embeddings": rotary_embeddings(module, x, rope, layer_type),
        }
        taken = signature(type(module).forward).parameters
        return module(x, **{name: value for name, value in given.items() if name in taken})

    return run


def causal_mask(n: int, left: int | None, dtype: Any) -> torch.Tensor:
    """0 where key j <= i, and i - left <= j with a `left`, else the lowest number; (1, 1, n, n).

    Examples
    --------
    >>> import torch
    >>> (causal_mask(3, 1, torch.float32)[0, 0] == 0).int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    import torch

    seen = torch.ones(n, n, dtype=torch.bool).tril()
    if left is not None:
        seen = seen.triu(-left)
    lowest = torch.finfo(dtype).min
    return torch.zeros(n, n, dtype=dtype).masked_fill(~seen, lowest)[None, None]


def rotary_embeddings(
    module: Any, x: torch.Tensor, rope: RoPE | None, layer_type: str | None
) -> Any:
    """What the model of an attention module passes as `position_embeddings`; None if it has none.

    They come from the rotary class beside the class of the module, which lays them out as the
    module reads them.

    Parameters
    ----------
    module : transformers attention module
    x : torch.Tensor (batch, n, embed_dim)
    rope : qkv.RoPE, optional
        Frequencies and factor to use instead of those of the configuration.
    layer_type : str, optional
        Which layers, in models whose layers differ.
    """
    import torch

    rotary = _rotary_module(module)
    if rotary is None:
        return None
    positions = torch.arange(x.shape[1])[None]
    if rope is not None:
        for name, buffer in dict(rotary.named_buffers()).items():
            if name.endswith("inv_freq") and (layer_type is None or layer_type in name
                                              or name == "inv_freq"):  # fmt: skip
                frequencies = rope.frequencies(2 * len(buffer))
                setattr(rotary, name, torch.as_tensor(frequencies.copy(), dtype=torch.float32))
        of_layers = isinstance(getattr(rotary, "rope_type", None), dict)
        prefix = f"{layer_type}_" if of_layers else ""
        setattr(rotary, f"{prefix}attention_scaling", rope.attention_factor)
        # So that it keeps these.
        rotary.rope_type = dict.fromkeys(rotary.rope_type, "default") if of_layers else "default"
    taken = signature(type(rotary).forward).parameters
    more = {"layer_type": layer_type} if "layer_type" in taken else {}
    return rotary(x, positions, **more)


def _rotary_module(module: Any) -> Any:
    beside = vars(sys.modules[type(module).__module__])
    for name, cls in beside.items():
        if name.endswith("RotaryEmbedding") and "Vision" not in name and isinstance(cls, type):
            try:
                return cls(config=module.config)
            except (TypeError, AttributeError, KeyError, ValueError):
                continue
    return None
