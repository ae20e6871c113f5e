"""Examples of a few tokens, on which the panels show every number.

examples       the examples: shipped, from a trace, or typed in
small_methods  what the lab answers about them
code_lines     readable source, and what each of its lines makes for a token
"""
