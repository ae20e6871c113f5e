"""Models of transformers whose sequence is spread over ranks.

model   `sharded`, which a model runs inside of
inputs  positions, padding, packed rows and labels of the whole sequence
layers  the attention function and the mask function of such a model
rotary  rotary frequencies for the length of the whole sequence
record  what `qkv.hf.inspect` records of it
"""

from qkv.hf.sharding.model import sharded

__all__ = ["sharded"]
