"""Mechanisms whose time and memory grow with the number of tokens, and their parts."""
