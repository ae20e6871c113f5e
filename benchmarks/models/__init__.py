"""`python -m benchmarks --models`: whole transformers models with qkv's attention beside torch's.

rows     models and what they do
worker   one implementation's process
session  both processes in turns, results compared before the first turn
report   the table
"""
