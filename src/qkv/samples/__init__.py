"""Small inputs and a small model that come with qkv."""

from qkv.samples.language import LanguageModel, language_model
from qkv.samples.real import RealSample, real_sample
from qkv.samples.shared import SharedExample, shared_example
from qkv.samples.tiny import TinyModel, tiny_model

__all__ = [
    "LanguageModel",
    "RealSample",
    "SharedExample",
    "TinyModel",
    "language_model",
    "real_sample",
    "shared_example",
    "tiny_model",
]
