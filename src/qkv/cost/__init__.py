"""The cost of attention and of models: operations, parameters, bytes, cache, roofline time.

model           what a model is made of
configs         models from the `config.json` of Hugging Face
cards           models whose sizes are published
layers, whole, mechanism
                the ledger of one layer, of a model, of one mechanism
machines        what machines can do; peaks measures this one
ranks           attention of a model whose sequence is spread over ranks

Counting itself (`Ledger`, `Count`) is in `qkv.ledger`, which every mechanism uses.
"""

from qkv.cost.cards import model_card, model_names
from qkv.cost.configs.config import read_config
from qkv.cost.machines import DTYPE_BYTES, Machine, Roofline, machine, machine_names
from qkv.cost.mechanism import MechanismCost, mechanism_cost
from qkv.cost.model import Attention, FeedForward, Latent, Layer, Model, Norm
from qkv.cost.ranks import RanksCost, SpreadCost, ranks_cost
from qkv.cost.whole import CONTEXTS, LayerCost, ModelCost, model_cost
from qkv.ledger import (
    Count,
    Ledger,
    attended_pairs,
    attention_ledger,
    attention_operations,
    ledger,
    matmul,
    memory,
    score_entries,
    softmax,
    step,
    symbols,
)

__all__ = [
    "CONTEXTS",
    "DTYPE_BYTES",
    "Attention",
    "Count",
    "FeedForward",
    "Latent",
    "Layer",
    "LayerCost",
    "Ledger",
    "Machine",
    "MechanismCost",
    "Model",
    "ModelCost",
    "Norm",
    "RanksCost",
    "Roofline",
    "SpreadCost",
    "attended_pairs",
    "attention_ledger",
    "attention_operations",
    "ledger",
    "machine",
    "machine_names",
    "matmul",
    "mechanism_cost",
    "memory",
    "model_card",
    "model_cost",
    "model_names",
    "ranks_cost",
    "read_config",
    "score_entries",
    "softmax",
    "step",
    "symbols",
]
