"""The kernel of second derivatives: tangents of attention and of its backward pass.

kernel       the kernel as formulas, and its tasks: each is a range of queries of one kv head
shared       the functions that many masks and score mods have in common
query_block  a block of queries: its rows in, two passes over its keys, its tangents out
rows         sums over the rows of a block of queries, before and after the first pass
block        one block of queries and one block of keys: scores, weights, and their tangents
frame        what these agree on
layout       what calls must know of the kernel: what its code depends on, and its memory
"""
