"""A cache for models of transformers, over the caches of qkv."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.cache_utils import Cache as _LayerCaches

from qkv.arguments.declarations import checked_size, shown
from qkv.bridges.torch.operands import autocast
from qkv.cache import ContiguousCache, PagedCache, RollingCache
from qkv.errors import ArgumentError, UnsupportedError
from qkv.hf.positions import can_be_scaled, positions_of, warn_beyond
from qkv.hf.stored_tensor import as_tensors
from qkv.hf.usage import computes_itself

__all__ = ["Cache"]

_RowCache: TypeAlias = ContiguousCache | PagedCache | RollingCache

_WINDOWS = ("sliding_attention", "chunked_attention")
"""Layer types that never read further back than `sliding_window` tokens."""


class Cache(DynamicCache):
    """Keys and values of a model's layers, in pages or as int8, read in place by "qkv".

    Pass it as `cache` to a model or to `generate`: greedy and beam search, sampling and assisted
    generation work as with `DynamicCache`, whose place it takes. Layers with a sliding window keep
    a `qkv.cache.RollingCache`, others a `PagedCache` or a `ContiguousCache`; layers that hold no
    keys (linear attention) keep what transformers keeps for them.

    Parameters
    ----------
    config : transformers.PreTrainedConfig, optional
        Of the model; it says which layers have a window. Without it no layer forgets.
    page_size : int, optional
        Tokens in a page, for layers without a window. Unless given, they have no pages.
    num_pages : int, optional
        Pages of each layer, for this cache and its copies. Unless given, as many as it takes.
    dtype : "int8", optional
        Keep keys and values as int8 with one scale for each token and kv head. An entry changes
        by at most half a step, `max(abs(row)) / 254`: see `qkv.cache.quantize`. Rows of keys
        are less the mean of the first tokens, if these are 16 or more.

    Raises
    ------
    ArgumentError
        `config` is not a configuration of transformers, or a size is out of its range.
    UnsupportedError
        Pages for a model that computes attention itself (Bloom, Falcon, GPT-Neo), as `config` says.

    Notes
    -----
    A copy (`copy.deepcopy`, or `fork`) of a cache with pages shares them, so that a prompt that
    was computed once serves many requests and takes its memory once. A model whose implementation
    is not "qkv", or on another device than the CPU, gets dense tensors of pages and of int8,
    gathered for each call. With pages a layer's key length is a multiple of `page_size`, as with a
    static cache, so that cross-attention caches must have none. A model with an encoder takes
    `transformers.EncoderDecoderCache(Cache(config), Cache(config))`: in one cache alone, of qkv or
    of transformers, T5 and BART mix the keys of both attentions without an error. Not for
    `torch.compile`, and not while training. Memory: see `qkv.cache.PagedCache` and the others, for
    each layer.

    Examples
    --------
    >>> import torch, qkv.hf
    >>> from transformers import GPT2Config, GPT2Model
    >>> qkv.hf.enable()
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2))
    >>> model.set_attn_implementation("qkv")
    >>> cache = qkv.hf.Cache(model.config, page_size=16)
    >>> with torch.no_grad():
    ...     output = model(torch.tensor([[1, 2, 3]]), cache=cache)
    >>> cache.get_seq_length()
    3
    """

    def __init__(
        self,
        config: Any = None,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        dtype: str | None = None,
    ) -> None:
        full_cache: Callable[[], _RowCache]
        if page_size is None:
            full_cache = partial(ContiguousCache, dtype=dtype)
        else:
            full_cache = partial(PagedCache, page_size, num_pages, dtype=dtype)
        # Made once here, so that wrong arguments raise now and not in the first layer.
        full_cache()
        self._positions, self._can_be_scaled = positions_of(config), can_be_scaled(config)
        # DynamicCache.__init__ would make layers of its own class.
        if config is None:
            replicate: Any = partial(_make_layer, full_cache)
            _LayerCaches.__init__(self, layer_class_to_replicate=replicate)
            return
        if not hasattr(config, "get_text_config"):
            raise ArgumentError(
                f"config={shown(config)} is not a configuration of transformers.",
                action="Pass model.config, or leave it out.",
            )
        decoder = config.get_text_config(decoder=True)
        if page_size is not None and computes_itself(decoder):
            raise UnsupportedError(
                f"{decoder.model_type} models compute attention themselves and never call qkv: "
                f"they do not expect as many keys as pages of {page_size} tokens have room for.",
                action="Leave page_size out: qkv.hf.Cache(config) serves any model.",
            )
        types, options = get_layer_types_and_kwargs(decoder)
        layers: list[Any] = []
        # `layer_types` may be of more layers than `num_hidden_layers`, if some were cut off.
        for kind, layer_options in zip(types, options, strict=False):
            if kind in _WINDOWS:
                layers.append(
                    CacheLayer(RollingCache(layer_options["sliding_window"], dtype=dtype))
                )
            elif kind == "full_attention":
                layers.append(CacheLayer(full_cache()))
            else:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**layer_options))
        _LayerCaches.__init__(self, layers=layers)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """`(kv_len, kv_offset)` of what the next `update` of a layer will give."""
        # transformers makes layers at their first `update`, but asks for their mask sizes before.
        checked_size("layer_idx", layer_idx, 0, 2**20)
        while self.layer_class_to_replicate is not None and len(self.layers) <= layer_idx:
            self.layers.append(self.layer_class_to_replicate())
        if self._positions is not None:
            count = self.get_seq_length(layer_idx) + query_length
            if count > self._positions:
                warn_beyond(count, self._positions, self._can_be_scaled)
                self._positions = None  # Once is enough.
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def fork(self) -> Cache:
        """Another cache with the same tokens; pages are shared until one of them writes."""
        return copy.deepcopy(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every layer; their number comes as a negative one."""
        self._change_every_layer("crop", tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence i what sequence `beam_idx[i]` was, in every layer."""
        self._change_every_layer("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times, in every layer."""
        self._change_every_layer("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these sequences, in every layer."""
        self._change_every_layer("batch_select_indices", indices)

    def reset(self) -> None:
        """Forget all tokens of every layer."""
        self._change_every_layer("reset")

    def _change_every_layer(self, method: str, *arguments: Any) -> None:
        """Change copies of the layers and put them in place at once, when all have succeeded."""
        layers = [
            layer.on_same_rows() if isinstance(layer, CacheLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        for layer in layers:
            getattr(layer, method)(*arguments)
        self.layers = layers

    @property
    def nbytes(self) -> int:
        """Memory that keys and values of all layers take, in bytes."""
        return sum(layer.cache.nbytes for layer in self.layers if isinstance(layer, CacheLayer))


class CacheLayer(CacheLayerMixin):
    """Keys and values of one layer, in a cache of qkv, for sequences of one length.

    Parameters
    ----------
    cache : qkv.cache.Cache
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: _RowCache) -> None:
        self.cache = cache
        self._dtype: torch.dtype | None = None

    def on_same_rows(self) -> CacheLayer:
        """Another layer with the same tokens, for one change; one of the two is then dropped."""
        other = CacheLayer(self.cache.on_same_rows())
        other._dtype = self._dtype
        return other

    @property
    def is_sliding(self) -> bool:
        """Whether old tokens are forgotten."""
        return isinstance(self.cache, RollingCache)

    # transformers declares the next three as attributes that a layer sets; here they follow from
    # the cache.
    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether tokens have come."""
        return self._dtype is not None and self.cache.lengths.ndim > 0

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """All keys that the next token may read, None before the first."""
        return self._held_tensor(0)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """All values that the next token may read, None before the first."""
        return self._held_tensor(1)

    def _held_tensor(self, which: int) -> torch.Tensor | None:
        if self._dtype is None or not self.is_initialized:
            return None
        return as_tensors(self.cache.read().parts[0], self._dtype)[which]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: memory is taken when the first tokens arrive."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; keys and values that they may attend to."""
        # Rotated keys are float32 under autocast, and values are not.
        _, key_states, value_states = autocast(key_states, key_states, value_states)
        if not self.is_initialized:
            self._dtype = key_states.dtype  # before there are tokens that have none
        rows = self.cache.append(key_states, value_states)
        return as_tensors(rows.parts[0], key_states.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(kv_len, kv_offset)` of what the next `update` will give."""
        return self.cache.kv_extent(query_length)

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        return int(self.cache.lengths.max(initial=0))

    def get_max_length(self) -> int:
        """The window of a layer that forgets, else -1: no bound."""
        return self.cache.window if isinstance(self.cache, RollingCache) else -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.cache.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; transformers says how many as a negative number.

        Raises
        ------
        ArgumentError
            For a positive number, as in transformers, and for more tokens than there are.
        """
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"crop({tokens_to_remove}) is given a positive number of tokens.",
                [("tokens held", str(self.get_seq_length()))],
                f"To forget {tokens_to_remove} tokens, call crop(-{tokens_to_remove}).",
            )
        if tokens_to_remove and self.is_initialized:
            self.cache.truncate(self.cache.lengths + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence i what sequence `beam_idx[i]` was."""
        if self.is_initialized:
            self.cache.reorder(beam_idx.cpu())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        if self.is_initialized:
            batch = torch.arange(len(self.cache.lengths), device="cpu")
            self.cache.reorder(batch.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these sequences."""
        if self.is_initialized:
            batch = torch.arange(len(self.cache.lengths), device="cpu")
            self.cache.reorder(batch[indices.cpu()])

    def offload(self) -> None:
        """Refused: rows lie where they came."""
        raise UnsupportedError(
            "qkv.hf.Cache keeps keys and values where they are computed.",
            action="Use DynamicCache with offloading, or int8 to save memory.",
        )

    prefetch = offload


def _make_layer(make: Callable[[], _RowCache]) -> CacheLayer:
    return CacheLayer(make())
