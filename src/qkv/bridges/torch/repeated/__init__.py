"""Calls of tensors that are like an earlier one.

prepared  which prepared call takes them, found by the form of NumPy views
runs      how prepared calls run on tensors: one pass, a decoding step, both passes
passes    prepared forward and backward passes, which `operations.functions` carries
guards    whether tensors are like earlier ones
layouts   what prepared calls ask of tensors, and the empty tensors of results
"""
