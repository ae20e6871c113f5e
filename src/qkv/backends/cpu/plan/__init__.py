"""Decided before anything runs: which blocks are computed, and what a kernel is compiled for.

kernel_choice    which kernel a problem goes to, and the tile shape of it
schedule         which blocks of keys each block of queries needs, as tables that kernels read
block_skipping   blocks in which every weight is exactly 0, found from norms and bounds of the bias
kernel_spec      the part of a problem in the kernel cache's key, and how wide its integers are
table_gradients  where the tasks of a backward pass add gradients of tables
"""
