"""`python -m benchmarks`: qkv beside other libraries on this machine, in turns.

Every result is checked before it is timed. This is not part of the package that is installed: it is
run from the root of a checkout, and uses the qkv that Python finds there.

command       what the options ask for
workloads     what is run, and by which contenders: a table; rules: its masks and score changes
contenders/   who runs it: a table, and one file for each library
moved         names that older revisions have in other modules
reference     what must come out
session       whose turn it is; process, worker: one contender's process, and how it is asked
record        what is kept of a run; machine: where it ran
samples       medians and ratios
report        what is shown of a run; tables, picture, compare
first_calls/, cache_steps/
              programs of their own: what a new process pays, what a step over a cache costs;
              one_process: runs their workers
latency/, models/
              other kinds of run: small calls, whole models of transformers
linear_time   another, for the linear-time mechanisms
ranks         another, for attention over processes; balance: how orders share out work
int8_means    another, for int8 caches
"""
