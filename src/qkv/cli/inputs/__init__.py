"""What a command is given.

arrays       arrays of a file or sample, reduced to the chosen rows
text         what a model is to read
model        a model, and the heads of one run of it
model_layer  one layer of a model, as arrays
"""
