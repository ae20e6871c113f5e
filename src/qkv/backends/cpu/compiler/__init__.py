"""LLVM IR to machine code, and the names of machine code on the disk.

compile         compiling and loading
elf_object      loading without LLVM, on Linux with x86-64
stored_kernels  the names of kernels on the disk; `digest` decides what is in them
canonical       the text of such a key, the same for equal values only
stack_probe     what compiled code with a large frame calls on Windows
"""
