"""Kernels that compute the scores of a forward pass again, to answer questions about its weights.

reduction      what all of them have: argument block, scratch memory, scores, and `Reduction`
kernel         the questions "sums", "top" and "received", each a `Reduction`
weight_blocks  the question "blocks": the largest weight and the sum of each block of pairs
"""
