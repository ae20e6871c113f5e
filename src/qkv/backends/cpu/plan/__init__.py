"""Decided before anything runs: which blocks are computed, and what a kernel is compiled for."""
