"""Random problems, each named by the numbers that it is drawn from."""

from qkv.testing.fuzz.problems import random_case

__all__ = ["random_case"]
