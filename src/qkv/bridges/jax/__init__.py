"""Arrays of JAX.

calls        which way a call goes: computed at once, or as an operation
operations   the operations: a text and arrays in, arrays out
derivatives  how they are differentiated and batched
rules        how XLA is asked for an operation, and what it will give
ffi          how XLA calls a function of Python
pytrees      variants as arguments and results of functions that JAX transforms
"""
