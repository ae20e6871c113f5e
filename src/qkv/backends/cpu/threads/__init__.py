"""The threads that compiled jobs run on, and the gate through which foreign threads call Python.

How many threads a call gets is decided in `passes` (`Workload.workers`) and in `rows`; this package
only starts, feeds and stops them.

jobs            runs a job on some threads; when they start, and how they end
pool            starts native workers without a C compiler, and stops them
pool_code       the code of workers, which spin, sleep and join a caller, and of the waiting caller
layout          what calls must know of the compiled code
openmp          a job on the threads of the caller's OpenMP library, as for tensors of torch
openmp_code     its code; floating_mode: a thread that joins a job rounds as its caller does
python_threads  Python's threads in their place, on systems without POSIX threads
gate            a C function that leads into Python until it is closed
"""
