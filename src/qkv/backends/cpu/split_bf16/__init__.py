"""Kernels that multiply float32 and float16 as sums of bfloat16 numbers on matrix tiles (AMX)."""
