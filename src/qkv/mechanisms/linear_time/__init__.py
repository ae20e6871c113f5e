"""Mechanisms whose time and memory grow in proportion to the number of tokens."""
