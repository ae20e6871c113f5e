"""What ranks send to each other.

links      messages between the ranks of a process group, with errors that name the rank
agreement  what ranks tell each other of how they were called, before anything is computed
"""
