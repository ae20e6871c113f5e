"""Positions outside the product: at the input of a model, and in the rotation of rows.

embeddings  sinusoidal and learned positions, added at the input
rotation    rotate rows by their positions
scaling     inverse frequencies of the RoPE scalings
hf_config   which of them a Hugging Face config describes
"""

from qkv.positions.embeddings import LearnedPositions, SinusoidalPositions

__all__ = ["LearnedPositions", "SinusoidalPositions"]
