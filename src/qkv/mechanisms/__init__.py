"""The family of attention mechanisms, one class a file, on one example and one interface."""

from qkv.mechanisms.base import Mechanism
from qkv.mechanisms.example import example_input, example_tokens
from qkv.mechanisms.explanation import Explanation
from qkv.mechanisms.registry import MECHANISMS

__all__ = ["MECHANISMS", "Explanation", "Mechanism", "example_input", "example_tokens"]
