"""The matrix products that kernels are made of, as register tiles and as matrix tiles.

query_lanes     both products of attention with queries in lanes, for many queries
dim_lanes       both products with lanes along head_dim, for few queries
bfloat16        pairs of bfloat16 numbers, which one instruction multiplies and adds
layout          sizes that operands are padded to: chunks of bfloat16, and matrix tiles
packed_pairs    products of rows of bfloat16 with pairs of each query, or two pairs at once
float16         products of float16 that are added to float32 without converting them
int8_tiles      both products with rows of int8, on the matrix unit
matrix_unit     products of bfloat16 tiles on the matrix unit of x86 (AMX)
tile_instructions   what that unit does, as its instructions or written out for other machines
"""
