"""Models of transformers, looked into while they run.

record          every head of a model; sequences: which tokens a layer reads
corpus          the heads of a model over many texts, which ranks share
intervention    heads that are changed
rotary_lengths  rotary frequencies that depend on the texts before
switching       a model with qkv for a while, for record and intervention
forward_calls   calls of a model, and the numbers of its layers
text_inputs     what a model is called with for a text
"""
