"""Attention over ranks on this machine: its speed, and the model of its speed.

    python -m benchmarks.ranks speed         # two ranks of one thread beside one process of two
    python -m benchmarks.ranks prediction    # qkv.distributed.plan beside the clock, 1 to 4 ranks
    python -m benchmarks.ranks memory        # what a rank holds beside its shards, 1 to 4 ranks
    python -m benchmarks.ranks balance       # orders beside each other and torch's, 8 and 64 ranks

Ranks are processes of this machine, joined by gloo over its own network. Every time is the least
of several rounds; that of the clock is the slowest rank's, that of processors is of all ranks
together, which waiting for messages does not change. What is compared takes turns. Results are
compared with one process before anything is timed.

__main__   the commands, and what they print
calls      what each rank does
processes  processes that are ranks
balance    how evenly orders share out the work of masks
"""
