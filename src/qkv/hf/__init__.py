"""qkv inside Hugging Face transformers.

    import qkv.hf

    qkv.hf.enable()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="qkv")

or, for a model that is there already, `model.set_attn_implementation("qkv")`.

attention       the function that models call; what each keyword with a meaning becomes
ignored_keywords
                keywords without one; a name in neither file is refused
layer_call      the call that comes of it, as arguments of `qkv.attention`
positions       how many positions a model has
layer_weights   its weights, a tensor that is computed where it is read
prepared_layers decoding steps: prepared calls, one for each kind of layer
packed_rows     sequences in one row, stated by their cumulative lengths
masks           masks without storage; mask_functions: functions read as masks
cache           caches of qkv in a model; stored_tensor: their pages and int8 rows as tensors
usage           whether a model uses qkv at all
inspection      every head of a model while it runs, and heads that are changed
sharding        models whose sequence is spread over ranks
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from qkv.hf.attention import attend, observe
from qkv.hf.cache import Cache
from qkv.hf.inspection.corpus import inspect_corpus
from qkv.hf.inspection.intervention import CopyFrom, intervene
from qkv.hf.inspection.record import inspect
from qkv.hf.layer_call import LayerCall
from qkv.hf.layer_weights import LayerWeights
from qkv.hf.masks import StatedMask, state_mask
from qkv.hf.sharding import sharded
from qkv.hf.usage import NotUsedWarning, Usage, check

__all__ = [
    "Cache",
    "CopyFrom",
    "LayerCall",
    "LayerWeights",
    "NotUsedWarning",
    "StatedMask",
    "Usage",
    "check",
    "enable",
    "inspect",
    "inspect_corpus",
    "intervene",
    "observe",
    "sharded",
]


def enable() -> None:
    """Make "qkv" an attention implementation of transformers.

    Registers the attention function and the mask function under that name; to call it again
    changes nothing. Models then take `attn_implementation="qkv"`, with padding, sliding windows,
    softcap, sinks, position bias, static and dynamic caches, packed rows and training. Masks take
    no memory of the size q_len * kv_len. `output_attentions=True`, given with the inputs, returns
    weights that are computed where they are read. Before this call, transformers says that
    `attn_implementation="qkv"` is not supported.

    Notes
    -----
    `check(model, **inputs)` tells whether a model uses it: a few families accept any name and
    compute attention themselves. Layers that hand over what is not computed here (keys chosen for
    each query, sinks of each query) raise `UnsupportedError`, which names it.

    Examples
    --------
    >>> import torch, qkv.hf
    >>> from transformers import GPT2Config, GPT2Model
    >>> qkv.hf.enable()
    >>> model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> model.set_attn_implementation("qkv")
    >>> model(ids).last_hidden_state.shape
    torch.Size([1, 3, 8])
    """
    AttentionInterface.register("qkv", attend)
    AttentionMaskInterface.register("qkv", state_mask)
