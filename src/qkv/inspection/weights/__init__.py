"""Weights that are computed again from query, key and lse.

replay             weights of any rows of a problem
lazy_weights       the lazy array of all of them
weight_blocks      sums and largest weights of blocks; weight_reductions of rows and columns
statistics         those of rows, for backends that have none
"""
