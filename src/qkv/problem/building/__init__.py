"""How a problem is made of the arrays and variants of a call.

check           the only validation of a call: arrays and variants in, a `Problem` out
builder         what variants add masks, score changes and tables with
offsets         the positions of rows
padding         what to write for a mask of padding
"""
