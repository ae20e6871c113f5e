"""Compiled attention for the machine it is on."""

from qkv.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
