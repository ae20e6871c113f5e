"""Mechanisms that score some of the pairs of tokens only."""
