"""Rotary positions: the frequencies of each way to scale them, and the rotation of an array."""
