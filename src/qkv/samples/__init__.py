"""Small inputs and small models that come with qkv.

shared          the example of five tokens that the classical teaching texts compute by hand
real            one layer of a real model on a paragraph
tiny, language  two small models; decoder: what they have in common
shipped_models  both by the names that commands and pages take
"""

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
