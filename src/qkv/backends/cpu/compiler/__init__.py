"""LLVM IR to machine code, and the cache of machine code on disk."""
