"""Compiled code that Python calls as built-in functions: it fills argument blocks and runs jobs.

It saves 3.4 of 9.4 microseconds of a call of one token, beside the same checks and writes in Python
and a call through ctypes. `FilledBlock.of` makes all of it.

code          the functions: what they expect of arrays, and what they write
layout        the words of what is expected of a call
function      compiled code as a built-in function
filled_block  an argument block with the functions that fill it
"""
