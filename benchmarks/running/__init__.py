"""Who runs, when, and where.

session      whose turn it is
process      a contender's process, which is asked and answers
worker       what that process does
one_process  a worker that runs once and prints its times
revision     another revision of qkv beside this one
machine      which machine it was, and whether it was quiet
"""
