"""Kernels that compute the scores of a forward pass again, to answer questions about its weights.

reduction      what all of them have: the scores of blocks of keys, and `Reduction`
kernel         the questions "sums", "top" and "received", each a `Reduction`
layout         what calls must know of the kernels: what their code depends on, and their memory
weight_blocks  the question "blocks": the largest weight and the sum of each block of pairs
"""
