"""Arguments as they are meant, by the names of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import qkv
import qkv.cache
import qkv.cost

__all__ = ["good"]


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def heads() -> np.ndarray:
    return rows(2, 2, 5, 8)


def tensor() -> torch.Tensor:
    return torch.from_numpy(heads())


GOOD: dict[str, Callable[[], Any]] = {
    # Sizes.
    "embed_dim": lambda: 8,
    "num_heads": lambda: 2,
    "num_kv_heads": lambda: 2,
    "head_dim": lambda: 8,
    "kv_lora_rank": lambda: 4,
    "qk_nope_head_dim": lambda: 4,
    "qk_rope_head_dim": lambda: 2,
    "v_head_dim": lambda: 8,
    "block": lambda: 2,
    "stride": lambda: 2,
    "left": lambda: 2,
    "right": lambda: 1,
    "num_devices": lambda: 2,
    "d_k": lambda: 8,
    "window": lambda: 2,
    "capacity": lambda: 16,
    "num_pages": lambda: 4,
    "page": lambda: 0,
    "count": lambda: 2,
    "block_size": lambda: 2,
    "num_random_blocks": lambda: 1,
    "block_q": lambda: 2,
    "block_kv": lambda: 3,
    "length": lambda: 4,
    "cap": lambda: 5.0,
    "p": lambda: 0.1,
    "n": lambda: 5,
    "new": lambda: 1,
    "q_len": lambda: 5,
    "kv_len": lambda: 5,
    "rows": lambda: 5,
    "pairs": lambda: 25,
    "inner": lambda: 4,
    "columns": lambda: 4,
    "size": lambda: 1000,
    "seed": lambda: 0,
    "factor": lambda: 2.0,
    "original_max_len": lambda: 16,
    "max_len": lambda: 32,
    "num_random": lambda: 1,
    "layer": lambda: 0,
    "head": lambda: 0,
    "row": lambda: 0,
    # Arrays.
    "x": lambda: rows(5, 8),
    "query": heads,
    "key": heads,
    "value": heads,
    "array": lambda: rows(5, 5),
    "rotated": heads,
    "pages": lambda: rows(4, 2, 2, 8),
    "page_table": lambda: np.zeros((2, 1), int),
    "values": lambda: np.ones((2, 2), np.float32),
    "scales": lambda: np.ones((2, 2)),
    "slopes": lambda: np.ones(2),
    "mask": lambda: np.ones((3, 2), bool),
    "positions": lambda: np.array([0]),
    "kv_lens": lambda: np.array([3]),
    "table": lambda: rows(32, 2),
    "q_ids": lambda: np.zeros(5, int),
    "cu_seqlens": lambda: np.array([0, 2, 5]),
    "indices": lambda: np.array([0, 0]),
    "lengths": lambda: 1,
    "grad_out": heads,
    "w_q": lambda: rows(8, 8),
    "w_k": lambda: rows(8, 8),
    "w_v": lambda: rows(8, 8),
    "tangents": lambda: qkv.Tangents(query=heads()),
    # Others.
    "fn": lambda: lambda score, q_pos, kv_pos: score,
    "parts": lambda: (),
    "path": lambda: "picture.svg",
    "name": lambda: "causal",
    "tokens": lambda: list("abcde"),
    "method": lambda: "count",
    "mechanism": lambda: "causal",
    "model": lambda: "gpt2",
    "config": lambda: {"model_type": "gpt2"},
    "answer": lambda: 1.0,
    "data": lambda: b"PK",
    "text": lambda: "The cat",
    "texts": lambda: ["The cat"],
    "folder": lambda: "records",
    "ids": lambda: [1, 2, 3],
    "host": lambda: "server",
    "source": lambda: None,
    "symbol": lambda: "n",
    "cache": lambda: None,
    "module": lambda: torch.nn.MultiheadAttention(8, 2),
    "peak": lambda: {"float32": 1e12},
    "bandwidth": lambda: 1e11,
    "shape": lambda: (2, 2, 5, 5),
    "device": lambda: "cpu",
    "rope": lambda: qkv.RoPE(),
    "mask_": lambda: qkv.Causal(),
    "masks": lambda: (qkv.Causal(),),
    "Q": lambda: rows(5, 8),
    "K": lambda: rows(5, 8),
    "V": lambda: rows(5, 8),
    "scores": lambda: rows(5, 5),
    "scaled_scores": lambda: rows(5, 5),
    "weights": lambda: rows(5, 5),
    "keys": lambda: [0],
    "offset": lambda: 1,
    "k": lambda: 2,
    "leading": lambda: (0, 0),
    "index": lambda: 0,
    "layer_idx": lambda: 0,
    "rotary_dim": lambda: 8,
    "max_positions": lambda: 16,
    "num_threads": lambda: 1,
    "context": lambda: 5,
    "operations": lambda: 10,
    "machine": lambda: qkv.cost.machine(qkv.cost.machine_names()[0]),
    "query_length": lambda: 1,
    "maps": lambda: rows(2, 5, 5),
    "changes": dict,
    "observer": lambda: lambda *_: None,
    "cu_q": lambda: np.array([0, 2, 5]),
    "score": lambda: "entropy",
    "width": lambda: 8,
    "variant": lambda: qkv.Causal(),
    "original_max_position_embeddings": lambda: 16,
    "original_length": lambda: 16,
    "new_length": lambda: 32,
    "bytes_moved": lambda: 10,
    "low_freq_factor": lambda: 1.0,
    "high_freq_factor": lambda: 4.0,
    "short_factor": lambda: np.ones(4),
    "long_factor": lambda: np.ones(4),
    "seq_len": lambda: 32,
    "max_position_embeddings": lambda: 32,
    "query_rank": lambda: 4,
    "rank": lambda: 4,
    "rope_dim": lambda: 2,
    "capacity_": lambda: 4,
    "pairs_": lambda: 3,
    "trained_length": lambda: 16,
    "call": lambda: None,
    "batch": lambda: 1,
    "dtype": lambda: "float32",
    "axis_name": lambda: "rows",
}

LAYER = torch.nn.Sequential(torch.nn.Linear(8, 8))

EXACT: dict[str, Callable[[], Any]] = {
    "qkv.torch.MultiHeadAttention.forward.query": lambda: torch.ones(1, 5, 8),
    "qkv.torch.ScaledDotProductAttention.forward.query": lambda: tensor(),
    "qkv.torch.ScaledDotProductAttention.forward.key": lambda: tensor(),
    "qkv.torch.ScaledDotProductAttention.forward.value": lambda: tensor(),
    "qkv.torch.scaled_dot_product_attention.query": lambda: tensor(),
    "qkv.torch.scaled_dot_product_attention.key": lambda: tensor(),
    "qkv.torch.scaled_dot_product_attention.value": lambda: tensor(),
    "qkv.torch.Cache.append.key": lambda: tensor(),
    "qkv.torch.Cache.append.value": lambda: tensor(),
    "qkv.cache.PageAllocator.grow.num_pages": lambda: 8,
    "qkv.cache.PageAllocator.release.pages": lambda: [0],
    "qkv.cache.PageAllocator.share.pages": lambda: [0],
    "qkv.cache.Rows.parts": lambda: (),
    "qkv.cost.machine.name": lambda: qkv.cost.machine_names()[0],
    "qkv.cost.model_card.name": lambda: qkv.cost.model_names()[0],
    "qkv.cost.model_cost.model": lambda: qkv.cost.model_names()[0],
    "qkv.cost.Count.value": lambda: 3,
    "qkv.errata.erratum.name": lambda: qkv.errata.ERRATA[0].name,
    "qkv.exercises.check.name": lambda: qkv.exercises.EXERCISES[0].name,
    "qkv.hf.check.model": lambda: LAYER,
    "qkv.hf.inspect.model": lambda: LAYER,
    "qkv.hf.inspect_corpus.model": lambda: LAYER,
    "qkv.hf.intervene.model": lambda: LAYER,
    "qkv.cache.quantize.rows": heads,
    "qkv.Sinks.values": lambda: np.ones(2),
    "qkv.variants.Not.mask": qkv.Causal,
    "qkv.RelativeBias.table": lambda: rows(32, 2),
    "qkv.LearnedPositions.table": lambda: rows(16, 8),
    "qkv.RoPE.rotate.array": heads,
    "qkv.Mask.array": lambda: np.ones((5, 5), bool),
    "qkv.scaling_curve.draws": lambda: 50,
    "qkv.scaling_curve.d_k": lambda: [1, 2],
    "qkv.mechanisms.compare.names": lambda: ["causal"],
}


def good(subject: str, parameter: str) -> Any:
    """The argument, or KeyError if none is known for the name."""
    return (EXACT.get(f"{subject}.{parameter}") or GOOD[parameter])()
