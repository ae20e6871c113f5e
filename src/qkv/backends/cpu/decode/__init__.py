"""The decode kernel: few queries against many keys, split over tasks (split-K).

kernel          the kernel: tasks, and how rows go through their keys
block_products  products of the rows with one block of keys or values
softmax         scores of a row and a stretch of keys become weights
merge           the results of all tasks of a kv head become rows of the output
layout          what calls must know of the kernel: what its code depends on, its words and memory
tasks           which keys each task reads, planned by the kernel itself
tile_blocks     blocks of int8 keys and values on matrix tiles
shared          the modules of functions that are the same for every mask and score mod
rows            where rows lie: argument block, pages, and scales of quantised rows

Sums are of `Spec.compute_dtype`, which is float32 for float16 and bfloat16. The products are in
`products.dim_lanes` and `products.int8_tiles`.
"""
