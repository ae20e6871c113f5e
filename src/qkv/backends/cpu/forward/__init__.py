"""The forward kernels: online softmax over blocks of keys, for many queries.

kernel          the kernel for every dtype and machine
tasks           its tasks: neighbouring blocks of queries, which share blocks of keys
query_block     its work for one block of queries
boundary_blocks blocks that the boundary of a mask crosses
softmax         scores to weights: score mods, masks, row maximum and row sum
products        S = Q K^T and O += P V for one block of keys
rows            queries packed; keys and values copied; outputs and statistics unpacked
shared          the modules of functions that are the same for every mask and score mod
frame           arguments, tasks and queries in lanes of all forward kernels
layout          what calls must know of the kernels: what their code depends on, and their memory
"""
