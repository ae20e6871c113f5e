"""Calls made ready for further calls of the same form: problems without values.

choice        which kernel is prepared, and which passes go around it
call          the passes of a call: rotate, attend, sinks, each of which takes addresses
stages        the passes around a kernel: rotary embedding before it, sinks after it
kernel        the kernel of a call, and the argument blocks that compiled code fills for it
forward       the kernel of many queries
decode        the kernel of few queries, in prepared calls and in a single call
steps         that of few queries over any number of keys; any_length proves what code may rely on
backward      gradients of query, key and value
placeholders  arrays of one element in the place of those that later calls bring
"""
