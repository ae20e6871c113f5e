"""The language in which variants say what they do to a score, and which pairs they allow.

nodes, expressions
                graphs without arrays; the operations that build and read them
symbols         how Python writes them
reading         functions of scores and positions, read by calling them with symbols
replaced_values, score_functions, elementary
                what such functions capture, and what they may call
evaluate        expressions computed on NumPy arrays
derivative      expressions differentiated
intervals, bounds
                what an operation can give over a tile, and what an expression can
"""
