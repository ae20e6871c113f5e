"""Tensors of torch.

calls       which way a call goes: computed at once, or as an operation
eager, compiled
            the two ways, the second while torch's compiler reads the call
operands    operands and arrays of a call as tensors
operations  the operations that torch differentiates and batches
repeated    calls like an earlier one
observers   whether torch traces, transforms or converts what operations are given
onnx        calls while torch exports to ONNX
comparisons what torch's compiler asks when a number is compared with a position
score_mods  functions of scores and positions that torch's compiler reads
outside     attention between two graphs of torch's compiler
openmp      the threads of torch, on which calls of tensors run
"""
