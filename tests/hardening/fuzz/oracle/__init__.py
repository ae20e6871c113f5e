"""What a problem means, in float64 and from the definition; it imports nothing of the library.

attention       scores, weights, output and lse
masks           which pairs are allowed, positions, and rotations of rows
published       slopes, buckets and random numbers as the papers give them
derivatives     gradients and tangents, and the plain computation in any type
"""

from .attention import Oracle

__all__ = ["Oracle"]
