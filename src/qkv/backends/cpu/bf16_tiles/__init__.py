"""The forward kernel for bfloat16 on matrix tiles (AMX); docs/adr/0031 says why it is as it is.

tile_shape  the tile shape for the sizes of a problem, and how large tasks are
layout      what calls must know of the kernel: its sizes and its memory
kernel      what a task begins and ends with
tasks       tasks and units of 16 queries
sweep       all units of a task over the keys that they see
rows        K and V of neighbouring keys as tiles
unit        16 queries over neighbouring keys: products of tiles with the softmax between them
shift       the shifts and sums of 16 queries, and the weights of groups of keys
weights     scores to weights, two keys at a time
"""
