"""What is computed, without saying how: specification, expressions, bounds, tiles, checks."""
