"""What a new process pays before its calls are quick: imports, compilation, preparation.

    python -m benchmarks.first_calls [--compare REVISION] [--rounds N] [NAME ...]

Each row is a new process: the import of a library, NumPy apart, then the first call, the second and
the third. qkv runs with an empty kernel cache, where the first call compiles, and with the one that
this has left behind. The first result is checked. All take turns, round by round, and the least
time of each is shown.

__main__  the turns, and the table
calls     what is called
worker    one process; it imports nothing of qkv before the clock runs
"""
