"""The forward kernel for bfloat16 on machines that multiply pairs of it.

kernel        the kernel: tasks, and the functions that go from key to key
score_blocks  one block of queries with one block of keys, step by step
operands      K as it lies or copied, V transposed, weights as pairs of keys
rows          rows of bfloat16: copied, packed, transposed, and what is not finite in them
layout        what calls must know of the kernel: its memory, and its blocks of keys

`bf16_tiles` reads its rows in the same way.
"""
