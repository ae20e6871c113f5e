"""The problem to compute, independent of backends: what it is, and what it means in NumPy.

building        how it is made of the arrays and variants of a call, and checked
language        the expressions of masks and score changes: read, evaluated, differentiated, bounded
spec            what it is: `Spec`, structure without arrays, and `Operands`, the arrays
part            some rows and heads of a problem, as a rank of several computes them
stored_rows     keys and values in pages or as int8: `Paged`, `Quantized`, `StoredRows`
tiles           which tiles of the scores are empty, full or partial
scores, backward, second_derivatives
                attention, gradients and second derivatives over tiles, in NumPy
overflow        outputs computed again because a sum overflowed
philox          the random numbers of dropout
dense           one head written out in full, for the oracles of variants
"""
