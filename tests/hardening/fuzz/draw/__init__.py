"""Random problems: their structures, values and places in memory.

structure       a whole problem: sizes, layout, offsets, and what it is for
shape           its sizes, as variants see them
variants        one function for each kind of variant
mods            score mods
memory          where arrays lie
"""
