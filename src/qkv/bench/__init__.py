"""`qkv bench`: qkv beside other libraries on this machine, in turns, each checked before timed.

workloads   what is run: a table            rules       what it says between q.k and softmax
contenders  who runs it                     reference   what must come out
worker      one contender's process         session     whose turn it is
peaks       what the machine can do         samples     medians and ratios
record      what is kept of a run           report, picture, compare   what is shown of it
"""
