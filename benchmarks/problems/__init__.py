"""What is run, and what must come out.

workloads  the table of the benchmark
named      what the names on a command line choose
rules      masks and score changes of workloads, for qkv and for everybody else
reference  inputs, the truth for some rows, and how far from it is too far
moved      names that older revisions have in other modules
"""
