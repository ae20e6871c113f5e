"""Several interpreters in one process. NumPy lives in the first that imports it, and so do we."""

import pytest

from processes import in_a_process

INTERPRETERS = """
    import sys, warnings
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters

    def run(code):
        other = interpreters.create()
        path = f"import sys, warnings; warnings.simplefilter('ignore'); sys.path[:] = {sys.path}\\n"
        try:
            wrong = interpreters.run_string(other, path + code)
        except Exception as error:
            wrong = error
        interpreters.destroy(other)
        return wrong
"""

CALLS = """
import numpy as np, qkv
x = np.eye(3)
for _ in range(4):
    out, pullback = qkv.vjp(x, x, x, qkv.Causal())
assert (out[0] == x[0]).all() and pullback(out).query.shape == (3, 3)
"""


def test_the_second_interpreter_is_refused_by_numpy_and_the_first_goes_on() -> None:
    printed = in_a_process(
        f"""{INTERPRETERS}
    calls = {CALLS!r}
    exec(calls)
    wrong = str(run(calls))
    print("once per process" in wrong or "subinterpreters" in wrong)
    exec(calls)
    print("went on")
"""
    )
    assert printed == "True\nwent on\n"


def test_an_interpreter_that_is_the_first_to_import_us() -> None:
    """Where NumPy allows that; workers and kernels end with it."""
    printed = in_a_process(f"{INTERPRETERS}\n    print(run({CALLS!r}))\n", QKV_NUM_THREADS="2")
    if "does not support loading in subinterpreters" in printed:
        pytest.skip("this NumPy is loaded in the main interpreter only")
    assert printed == "None\n"
