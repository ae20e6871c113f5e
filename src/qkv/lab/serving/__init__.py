"""The page of `qkv lab`, served to one browser on this machine.

server  the server itself
guard   who may ask, and how much
jobs    short answers by a few threads, and long jobs one at a time, which can be stopped
"""
