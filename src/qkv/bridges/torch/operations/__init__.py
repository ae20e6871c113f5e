"""The operations that torch differentiates and batches: a text and tensors in, tensors out.

operators         the operations
device_operators  those of calls on devices, whose arrays are read where a graph runs
functions         how the operations are differentiated
groups            the groups in which these functions take their tensors
batches           how they are batched by `torch.vmap`
"""
