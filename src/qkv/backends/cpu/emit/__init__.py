"""Writing LLVM IR: instructions, dtypes, elementary functions, expressions, argument blocks.

structured_code functions, loops that carry values, integers, addresses
emitter         the Emitter: all that, memory, and vectors of lanes
argument_block  the argument block of a kernel, as a call fills it
frame           what every kernel has: argument block, operands, tables, the loop over tasks
expressions     score mods and masks as vector code, their bounds, and the arrays that they read
storage         loading and storing dtypes, float16 and bfloat16 among them
packing         rows of any stride transposed into vectors, copied, or checked for NaN
transpose       dense masks and biases, transposed block by block; transposed_loads: which
forbidden_pairs the weight that marks a forbidden pair, and the test for it
vector_math     exp, log, tanh, and sums with their rounding errors
"""
