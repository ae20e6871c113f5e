"""Calls made ready for arrays of one dtype, shape and strides, to be repeated quickly."""
