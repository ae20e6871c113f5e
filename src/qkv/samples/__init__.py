"""Small inputs and a small model that come with qkv."""

from qkv.samples.real import RealSample, real_sample
from qkv.samples.shared import SharedExample, shared_example
from qkv.samples.tiny import TinyModel, tiny_model

__all__ = [
    "RealSample",
    "SharedExample",
    "TinyModel",
    "real_sample",
    "shared_example",
    "tiny_model",
]
