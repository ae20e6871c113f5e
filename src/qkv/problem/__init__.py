"""The problem to compute, independent of backends: specification, expressions, bounds, tiles."""
