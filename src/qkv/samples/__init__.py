"""Small inputs that come with qkv."""

from qkv.samples.real import RealSample, real_sample
from qkv.samples.shared import SharedExample, shared_example

__all__ = ["RealSample", "SharedExample", "real_sample", "shared_example"]
