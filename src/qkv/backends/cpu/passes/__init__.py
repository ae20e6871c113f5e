"""One call of each kernel: which one, its argument block, its tasks and its threads."""
