"""Derivatives of a bound call.

vjp             gradients by a public function
pull_back       gradients from what a forward pass has left, prepared or checked
gradients       gradients of operands, biases, sinks and other arrays of variants
jvp             tangents, and second derivatives
cotangents      cotangents, tangents and the form of gradients
"""
