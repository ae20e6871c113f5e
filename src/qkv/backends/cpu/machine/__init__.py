"""The machine that code is compiled for, and what the process must know of it.

host               the processor, its instruction set (`QKV_ISA`), and the tile shapes for it
processor          what LLVM says of the processor, kept on the disk
stored_files       the private folder of the user where that and kernels are kept
tiling             what a tile shape is
executable_memory  whether the system lets this process run code that is made in memory
arm_features       whether an Arm processor multiplies bfloat16 and float16
tile_permission    whether the system lets this process use matrix tiles (AMX)
threadpool_limits  lets threadpoolctl see and limit qkv's threads
"""
