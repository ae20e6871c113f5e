"""Calls that are like an earlier one: a backend prepares for them once, and they are not checked.

forms           what calls of one structure share to be alike
cache           prepared calls: an entry for each structure, and in it by form
preparing       ask a backend to prepare, when a form was seen before
decoding        calls that are alike whatever their number of keys
stored_steps    the same where keys lie in pages, as int8, or both
latest_step     the latest of them, which is tried first
numpy_runs      runs of prepared calls on NumPy arrays, with new arrays of results
"""
