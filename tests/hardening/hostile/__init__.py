"""Hostile arguments for every public class and function, from their signatures.

values    what is passed in place of what is meant
good      arguments that are meant, by the names of parameters
subjects  what is called: constructors, functions, and methods of objects
run       one call, and whether it ended as it may
"""
