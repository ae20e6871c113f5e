"""Which rows of a sequence each rank holds, and which heads.

order   the orders themselves
heads   heads of each rank after an all-to-all
work    how much of a problem each pair of shards is, and orders that share it out evenly
arrays  rows taken from arrays of any library, and put together
"""
