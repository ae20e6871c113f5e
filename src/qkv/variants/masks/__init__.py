"""Variants that forbid pairs of a query and a key, and how they are joined.

algebra         `MaskVariant`, the base of all of them, with `|`, `&` and `~`
causal, sliding_window, strided, prefix, global_tokens
                masks of positions
key_lengths, segments
                padded keys, and several sequences in one row
block_sparse, random_blocks
                masks of whole blocks
same_group      keys that share a number with the query; models and scores of heads use it
dense_mask      any other: `Mask`, a boolean array or a function
"""
