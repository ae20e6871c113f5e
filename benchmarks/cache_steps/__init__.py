"""What a decoding step over each kind of cache costs: append a token, and attend.

    python -m benchmarks.cache_steps [--rounds N] [--compare REVISION]

__main__    the turns of all processes, and the table
worker      one process, which checks what it times
"""
