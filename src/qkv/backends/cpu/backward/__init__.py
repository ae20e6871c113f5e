"""The backward kernel, and the delta correction that few queries need before it.

kernel            the kernel as formulas, and its tasks: each computes dK and dV of a range of keys
functions         the functions of a kernel, by what it must do
shared            the modules of functions that many masks and score mods have in common
block_of_queries  what every pass over a block of queries begins with
query_block       a block of queries with all keys of a task, and its part of dQ
query_rows        rows of a block of queries: packed, delta, and dQ written back
block             one block of queries and one block of keys: P, dropout, dS and the chain rule
table_sums        gradients of the tables that scores read
partials          partial gradients, added up
gradient_sums     the products that add this block to dQ, and to dV and dK
frame             what these agree on
layout            what calls must know of the kernels: what their code depends on, and their memory
delta_correction  a kernel that reads all keys before the backward kernel does, for a better delta
"""
