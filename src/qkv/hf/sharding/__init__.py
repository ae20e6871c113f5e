"""Models of transformers whose sequence is spread over ranks.

| module | holds |
|---|---|
| `model.py` | `sharded`, which a model runs inside of |
| `inputs.py` | positions, padding, packed rows and labels of the whole sequence |
| `layers.py` | the attention function and the mask function of such a model |
| `record.py` | what `qkv.hf.inspect` records of it |
"""

from qkv.hf.sharding.model import sharded

__all__ = ["sharded"]
