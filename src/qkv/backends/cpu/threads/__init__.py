"""The threads that compiled jobs run on, and the gate through which foreign threads call Python.

How many threads a call gets is decided in `passes` (`Pass.workers`) and in `rows`; this package
only starts, feeds and stops them.
"""
