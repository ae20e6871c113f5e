"""Compiled passes over rows before and after attention: rotary embedding, sinks, int8.

row_pass, head_job         what both have: argument words and threads; the loop over heads
layout                     what calls must know of the kernels
rotation, rotation_kernel  rotary embedding: calls and tables of angles, and the code
sinks, sinks_kernel        the sinks' share: calls, and the code
int8, int8_kernel          rows rounded to int8: calls, and the code
"""
