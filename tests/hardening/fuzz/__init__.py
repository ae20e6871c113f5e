"""Random problems against an oracle that shares no code with the library.

problem         a problem as plain data; also as JSON
draw/           random problems: structures, their layouts, variants, memory
oracle/         what a problem means, in float64, and its derivatives
bounds          how far results may be off
calls, tensors  a problem as calls of the library
forcing         kernels that the library would not choose for it
checks          what is required, by the purpose of a problem
case            one draw as a case for tests elsewhere
shrink, kept/   smaller problems that fail, and those that once did
runner          long runs: `python -m tests.hardening.fuzz --help`
"""

from .case import random_case

__all__ = ["random_case"]
