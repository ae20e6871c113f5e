"""LLVM IR to machine code, and the cache of machine code on disk.

compile    compiling, loading, and the files of the cache; `_digest` decides what is in their key
canonical  the text of such a key, the same for equal values only
"""
