"""Kernels in Triton. They are compiled for the GPU of the tensors, or run by Triton's interpreter.

elementary     operations of expressions that Triton lacks
tiles          scores, products and dropout of one tile
forward        output and lse
backward       gradients of query, key and value
"""
