"""Calls made ready for further calls of the same form: problems without values.

choice             which kernel is prepared, and which passes go around it
forward            many queries
decode             few queries, in prepared calls and in a single call
any_length_decode  few queries over any number of keys; any_length proves what code may rely on
backward           gradients of query, key and value
stages             compiled passes around a prepared call: rotary embedding before, sinks after
repeated           calls that ask by themselves whether arrays are like those prepared for
placeholders       arrays of one element in the place of those that later calls bring
"""
