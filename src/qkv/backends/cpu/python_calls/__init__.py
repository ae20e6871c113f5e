"""Compiled code that Python calls as built-in functions: it fills argument blocks and runs jobs.

code          the functions: what they expect of arrays, and what they write
function      compiled code as a built-in function
filled_block  an argument block with the functions that fill it
"""
