"""Writing LLVM IR: instructions, dtypes, elementary functions, expressions, argument blocks.

emitter         the Emitter: functions, loops, addresses, memory, vectors of lanes
argument_block  the argument block of a kernel, as a call fills it
frame           what every kernel has: argument block, operands, tables, the loop over tasks
expressions     score mods and masks as vector code
mask_bounds     what a mask can be over a block of keys, by interval arithmetic
storage         loading and storing dtypes, float16 and bfloat16 among them
packing         rows of any stride transposed into vectors, copied, or checked for NaN
transpose       dense masks and biases, transposed block by block
vector_math     exp, log, tanh, and sums with their rounding errors
philox          random numbers for dropout
"""
