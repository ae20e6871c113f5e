"""`python -m benchmarks`: qkv beside other libraries on this machine, in turns.

Every result is checked before it is timed. This is not part of the package that is installed: it is
run from the root of a checkout, and uses the qkv that Python finds there.

command       what the options ask for
problems/     what is run, and what must come out
contenders/   who runs it: a table, and one file for each library
running/      turns, processes, the machine, another revision beside this one
results/      what is kept of a run, and how it is shown
latency/, models/
              other kinds of run: small calls, whole models of transformers
first_calls/, cache_steps/, ranks/
              programs of their own: what a new process pays, what a step over a cache costs,
              attention over processes
linear_time, int8_means, second_derivatives, gpu
              the same in one file each: linear-time mechanisms, int8 caches, forward mode and
              double backward, kernels in Triton
"""
