"""The forward kernels: online softmax over blocks of keys, for many queries."""
