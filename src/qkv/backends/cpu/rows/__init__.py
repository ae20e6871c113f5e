"""Compiled passes over rows before and after attention: rotary embedding and sinks.

row_pass                   what both have: the loop over heads, argument words and threads
rotation, rotation_kernel  rotary embedding: calls and tables of angles, and the code
sinks, sinks_kernel        the sinks' share: calls, and the code
"""
