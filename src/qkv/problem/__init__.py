"""The problem to compute, independent of backends: specification, expressions, bounds, tiles.

check           the only validation of a call: arrays and variants in, a `Problem` out
builder         what variants build it with
spec            what it is: `Spec`, structure without arrays, and `Operands`, the arrays
part            some rows and heads of a problem, as a rank of several computes them
stored_rows     keys and values in pages or as int8: `Paged`, `Quantized`, `StoredRows`
offsets         the positions of rows
padding         what to write for a mask of padding
expressions, nodes, symbols
                masks and score mods: their language, its graphs, and how Python writes it
reading, replaced_values, score_functions, elementary
                functions of scores read as expressions, and what they may call
evaluate, derivative
                expressions computed on NumPy arrays, and differentiated
intervals, bounds, tiles
                what expressions can be over a tile, and which tiles are empty, full or partial
scores, backward, second_backward
                attention, gradients and second derivatives over tiles, in NumPy
overflow        outputs computed again because a sum overflowed
philox          the random numbers of dropout
dense           one head written out in full, for the oracles of variants
"""
