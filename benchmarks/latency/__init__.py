"""`python -m benchmarks --latency`: what a small call of every variant costs.

rows        the variants and compositions that are called
front_ends  how they are called: NumPy, torch, JAX, the Hugging Face interface
worker      one front end's process
session     all front ends, one after the other
report      the tables
"""
