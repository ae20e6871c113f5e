"""The backward kernel, and the delta correction that few queries need before it.

kernel            the kernel as formulas, and its tasks: each computes dK and dV of a range of keys
query_block       a block of queries with all keys of a task: packing, delta, and its part of dQ
block             code for one block of queries and one block of keys: P and dS, then the products
                  that add to dQ (`query_sums`), and to dV and dK (`key_sums`)
frame             what these agree on: the kernel key, the argument block and scratch memory
delta_correction  a kernel that reads all keys before the backward kernel does, for a better delta
"""
