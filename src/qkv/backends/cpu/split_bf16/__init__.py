"""Kernels that multiply float32 and float16 as sums of bfloat16 numbers on matrix tiles (AMX).

choice          when these kernels run; the rest of the backend imports this module alone
layout          what calls must know of the kernels: their code, and the memory they need
terms           splits rows into bfloat16 terms, in the layout that tile products read
scores          S = K Q^T of split operands, for forward and replay
forward         the forward kernel, with tasks and sweeps of `bf16_tiles`
unit            32 queries over neighbouring keys: products of tiles with the softmax between them
backward        the backward kernel; backward_block is its code for one block of queries and keys
replay          computes the scores of `forward` again, for questions about the weights
non_finite      products of rows and elements that cannot be split, computed one by one
"""
