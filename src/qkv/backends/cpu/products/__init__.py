"""The matrix products that kernels are made of, as register tiles and as matrix tiles."""
