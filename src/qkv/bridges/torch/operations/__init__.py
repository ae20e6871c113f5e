"""The operations that torch differentiates and batches: a text and tensors in, tensors out.

operators  the operations
functions  how they are differentiated
groups     the groups in which these functions take their tensors
batches    how they are batched by `torch.vmap`
"""
