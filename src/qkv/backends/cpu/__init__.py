"""Compiled attention for the machine it is on."""

from qkv.backends.cpu.backend import CpuBackend, describe_host

__all__ = ["CpuBackend", "describe_host"]
