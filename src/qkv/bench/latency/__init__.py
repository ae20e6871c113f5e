"""`qkv bench --latency`: what one small call costs, for every variant and every front end.

rows        the variants and compositions that are called
front_ends  how they are called: NumPy, torch, JAX, the Hugging Face interface
worker      one front end's process
session     all front ends, one after the other
report      the tables
"""
