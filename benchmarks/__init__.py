"""`python -m benchmarks`: qkv beside other libraries on this machine, in turns.

Every result is checked before it is timed. This is not part of the package that is installed: it is
run from the root of a checkout, and uses the qkv that Python finds there.

workloads   what is run: a table            rules       what it says between q.k and softmax
contenders  who runs it                     reference   what must come out
worker      one contender's process         session     whose turn it is
process     how a worker is asked           samples     medians and ratios
record      what is kept of a run           report, tables, picture, compare   what is shown of it
command     what the options ask for        latency, models   other kinds of run
"""
