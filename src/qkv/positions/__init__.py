"""Positions outside the product: at the input of a model, and in the rotation of rows."""

from qkv.positions.embeddings import LearnedPositions, SinusoidalPositions

__all__ = ["LearnedPositions", "SinusoidalPositions"]
