"""The decode kernel: few queries against many keys, split over tasks (split-K)."""
