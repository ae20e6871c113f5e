"""Every head of a model.

model_record    of one text: layer_record of each layer; keep, which layers; model_file
layer_texts     names of queries that are of another sequence than the keys
comparison      of two records
corpus          over many texts, with confidence intervals; corpus_folder keeps them
"""
