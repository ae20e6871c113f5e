"""Which rows of a sequence each rank holds.

order   the orders themselves
work    how much of a problem each pair of shards is, and orders that share it out evenly
arrays  rows taken from arrays of any library, and put together
"""
