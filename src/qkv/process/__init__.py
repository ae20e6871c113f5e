"""What the whole process shares, whoever calls.

forks           locks that a forked child can open, and whether there was a fork
threads         the number of threads of compiled code
openmp          the team of OpenMP threads that the caller's library has
"""
