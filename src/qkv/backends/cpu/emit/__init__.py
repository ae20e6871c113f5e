"""Writing LLVM IR: instructions, dtypes, elementary functions, expressions, argument blocks."""
