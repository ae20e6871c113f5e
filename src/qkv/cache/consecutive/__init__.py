"""Caches that store each sequence in consecutive rows.

contiguous      all tokens, in an array that grows or has a fixed capacity
rolling         the last tokens, and some of the first
buffered        the base of both
buffer          their arrays, rows of all sequences side by side
"""
