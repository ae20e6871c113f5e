"""Random problems, each named by the numbers that it is drawn from."""

from fuzz.problems import random_case

__all__ = ["random_case"]
