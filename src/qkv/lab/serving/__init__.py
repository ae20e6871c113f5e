"""The page of `qkv lab`, served to one browser on this machine.

server       the process: its socket, its address, how it ends
application  what it answers
guard        who may ask
jobs         short answers by a few threads, and long jobs one at a time, which can be stopped
"""
