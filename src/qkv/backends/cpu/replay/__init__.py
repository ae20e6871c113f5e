"""The kernel that computes scores again to answer questions about the weights."""
