"""LLVM IR to machine code, and the cache of machine code on disk.

compile         compiling and loading
stored_kernels  the files of the cache; `digest` decides what is in their key
canonical       the text of such a key, the same for equal values only
stack_probe     what compiled code with a large frame calls on Windows
"""
