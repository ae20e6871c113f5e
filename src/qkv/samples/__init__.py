"""Small inputs that come with qkv."""

from qkv.samples.real import RealSample, real_sample

__all__ = ["RealSample", "real_sample"]
