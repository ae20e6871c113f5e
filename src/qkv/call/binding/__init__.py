"""A call taken apart: everything that is not an array, hashable, and the arrays.

options         the keyword arguments that all public functions share
flatten         a variant, an option or an operand as a tree without arrays, and its arrays
bound           `bind`: a call as `BoundCall(structure, leaves)`
structure_text, numbered
                that structure as JSON, for compilers; the objects that it names by number
variant_arrays  the arrays of variants
undeclared      arrays of objects that do not say what they hold
unknown_keywords
                the error for a keyword of another library
"""
