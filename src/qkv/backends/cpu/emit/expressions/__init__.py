"""Score mods and masks in machine code.

vector_code          their expressions, for the lanes of one vector
tables               the arrays that they read
mask_bounds          what a mask can be over a block of keys
interval_arithmetic  bounds of an operation from the bounds of its arguments
philox               random words, for dropout
"""
